"""The state of a run as a checkpoint, and back: what a run that goes on takes over, and what it
refuses.

Saved are arrays (weights, the optimizer's moments, masters and number of updates, the recipe's
scales) and, as numbers, the step with what follows from it: rows so far, next learning rate.
Everything else is computed from the settings: the order of rows and every random number are
functions of the seeds and the step. So a run goes on with the same bits if the settings that decide
what is computed, the rows and the frozen weights are the same; those in ``BOOKKEEPING`` may change.
Arrays are whole and rows are counted, so that the rows of a step may also be divided into other
micro-batches: the same gradients, added up in another order.
"""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from surogate import checkpoint as checkpoints
from surogate.checkpoint import Checkpoint, Saved
from surogate.config import Config, config_to_dict
from surogate.errors import UserError
from surogate.optim.state import STEP, named_leaves, state_to_named
from surogate.settings import BOOKKEEPING, FIELDS
from surogate.step import TrainStep

DIVISION = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})


def find(config: Config, directory: Path) -> Saved | None:
    """The checkpoint to go on from; None to start anew.

    Prints each setting that changed and may; raises UserError when another did, or when there are
    checkpoints and none is whole.
    """
    checkpoints.clean(directory)
    if not config.resume_from_checkpoint:
        return None
    saved = checkpoints.newest_whole(directory, say=print)
    if saved is not None:
        # An earlier version computed what the default of a later key computes.
        defaults = {k: f.default for k, f in FIELDS.items() if f.default is not msgspec.NODEFAULT}
        changed = checkpoints.changes({**defaults, **saved.settings}, config_to_dict(config))
        divided = changed.keys() & _division(saved.settings, config)
        allowed = BOOKKEEPING | divided
        for key in sorted(changed.keys() & allowed):
            if getattr(config, key) != "auto":  # which leaves the choice to us
                print(f"changed: {changed[key]}", flush=True)
        if divided:
            print("a step has the same rows, added up in another order: not the same bits")
        refuse(saved, {key: line for key, line in changed.items() if key not in allowed})
    return saved


def _division(saved: Mapping[str, Any], config: Config) -> frozenset[str]:
    """The settings that divide a step's rows, if both divide the same number of them."""
    before = math.prod(saved.get(key, FIELDS[key].default) for key in DIVISION)
    now = math.prod(getattr(config, key) for key in DIVISION)
    return DIVISION if before == now else frozenset()


def refuse(saved: Saved, changed: Mapping[str, str]) -> None:
    """Raises UserError when something differs that decides what is computed, a line for each
    before it.
    """
    if not changed:
        return
    for line in changed.values():
        print(f"refused: {line}", file=sys.stderr)
    raise UserError(
        f"{saved.path}: was made with another {', '.join(changed)}; use what it had, another "
        "output_dir, or resume_from_checkpoint = false to start anew"
    )


def state_of(step: TrainStep, done: int, config: Config, sources: Mapping[str, Any]) -> Checkpoint:
    """The state after update ``done``. The arrays are the step's own, which updates alone change;
    what a recipe remembers may change with a micro-batch, and is copied.
    """
    step.settle()
    recipe = {name: array.copy() for name, array in step.recipe.named().items()}
    optimizer = {**state_to_named(step.state), **recipe}
    trained = dict(named_leaves(step.trainable))
    return Checkpoint(done, trained, optimizer, config_to_dict(config), sources)


def take_(step: TrainStep, saved: Saved) -> None:
    """Writes a checkpoint's arrays into a step's."""
    take_trained_(step, saved)
    state = {**state_to_named(step.state), **step.recipe.named()}
    checkpoints.fill_(saved.path / checkpoints.OPTIMIZER, state, put=step.device.put)
    step.state = step.state._replace(step=int(state[STEP]))
    step.recipe.loaded_()


def take_trained_(step: TrainStep, saved: Saved) -> None:
    """The same of what is trained alone."""
    trained = dict(named_leaves(step.trainable))
    checkpoints.fill_(saved.path / checkpoints.TRAINED, trained, put=step.device.put)
    step.recipe.loaded_()
    step.refresh()


def carried(step: TrainStep) -> Callable[[TrainStep], None]:
    """What a step has trained and its optimizer remembers, copied to the host: a function that
    writes it into a step of the same parameters, whatever recipe that has.
    """
    step.settle()
    kept = [{name: _copy(x) for name, x in arrays.items()} for arrays in _arrays(step)]

    def give_(other: TrainStep) -> None:
        for arrays, copies in zip(_arrays(other), kept, strict=True):
            assert arrays.keys() == copies.keys()
            for name, array in arrays.items():
                array[...] = copies[name] if name == STEP else other.device.put(copies[name])
        other.state = other.state._replace(step=int(kept[1][STEP]))
        other.recipe.loaded_()
        other.refresh()

    return give_


def _arrays(step: TrainStep) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(named_leaves(step.trainable)), dict(state_to_named(step.state))


def _copy(x: Any) -> np.ndarray:
    return x.copy() if isinstance(x, np.ndarray) else x.get()
