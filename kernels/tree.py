"""Trees of arrays: NamedTuples, tuples, lists and dicts, nested. None is an empty subtree.

Parameters, gradients and optimizer moments are trees of one shape, so that a function of one leaf
becomes a function of a model.
"""

from collections.abc import Callable, Iterator
from typing import Any


def _children(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a node and how to rebuild it, or None for a leaf."""
    if isinstance(tree, dict):
        keys = list(tree)
        return [tree[k] for k in keys], lambda values: dict(zip(keys, values, strict=True))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(tree), lambda values: type(tree)(*values)
    if isinstance(tree, (tuple, list)):
        return list(tree), type(tree)
    return None


def map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies ``f`` to matching leaves of trees of one structure; None stays None."""
    if tree is None:
        return None
    node = _children(tree)
    if node is None:
        return f(tree, *others)
    children, rebuild = node
    columns = []
    for other in others:
        found = _children(other)
        if found is None or len(found[0]) != len(children):
            raise ValueError(f"tree.map: a {type(tree).__name__} does not match {other!r}")
        columns.append(found[0])
    return rebuild([map(f, *row) for row in zip(children, *columns, strict=True)])


def iterate(tree: Any) -> Iterator[Any]:
    """The leaves, in order, without None."""
    if tree is None:
        return
    node = _children(tree)
    if node is None:
        yield tree
        return
    for child in node[0]:
        yield from iterate(child)


def leaves(tree: Any) -> list[Any]:
    """The leaves, in order, without None."""
    return list(iterate(tree))


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves and the function that builds the same tree from other leaves."""
    flat = leaves(tree)

    def rebuild(values: list[Any]) -> Any:
        if len(values) != len(flat):
            raise ValueError(f"tree.flatten: expected {len(flat)} leaves, got {len(values)}")
        remaining = iter(values)
        return map(lambda _: next(remaining), tree)

    return flat, rebuild
