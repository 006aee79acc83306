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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from surogate import checkpoint as checkpoints
from surogate.checkpoint import Checkpoint, Saved
from surogate.config import Config, config_to_dict
from surogate.errors import UserError
from surogate.models.recipe import STATE_OF_RECIPES
from surogate.optim.state import STEP, named_leaves, state_to_named
from surogate.settings import BOOKKEEPING, DATASET_FIELDS, FIELDS
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
        changed = checkpoints.changes(_completed(saved.settings), config_to_dict(config))
        divided = changed.keys() & _division(saved.settings, config)
        allowed = BOOKKEEPING | divided | _moved(changed)
        for key in sorted(changed.keys() & allowed):
            if getattr(config, key, None) != "auto":  # which leaves the choice to us
                print(f"changed: {changed[key]}", flush=True)
        if divided:
            print("a step has the same rows, added up in another order: not the same bits")
        refuse(saved, {key: line for key, line in changed.items() if key not in allowed})
    return saved


def _completed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint with keys that came later: an earlier version computed what
    their defaults compute.
    """
    settings, of_data = (
        {k: f.default for k, f in fields.items() if f.default is not msgspec.NODEFAULT}
        for fields in (FIELDS, DATASET_FIELDS)
    )
    settings |= saved
    for name in ("datasets", "validation_datasets"):
        settings[name] = [{**of_data, **dataset} for dataset in settings[name]]
    return settings


def _division(saved: Mapping[str, Any], config: Config) -> frozenset[str]:
    """The settings that divide a step's rows, if both divide the same number of them."""
    before = math.prod(saved.get(key, FIELDS[key].default) for key in DIVISION)
    now = math.prod(getattr(config, key) for key in DIVISION)
    return DIVISION if before == now else frozenset()


def _moved(changed: Mapping[str, str]) -> set[str]:
    """The places of data sets, where nothing else of them changed: that the rows are what they
    were, wherever they lie now, is told by their hash.
    """
    keys = {key for key in changed if key.startswith("datasets.")}
    return keys if all(key.endswith(".path") for key in keys) else set()


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
    """Writes a checkpoint's arrays into a step's. Those of a recipe that the step is done with are
    left out.
    """
    recipe = step.recipe.named()
    state = {**state_to_named(step.state), **recipe}
    for file, arrays, left_out in (
        (checkpoints.TRAINED, dict(named_leaves(step.trainable)), ()),
        (checkpoints.OPTIMIZER, state, () if recipe else STATE_OF_RECIPES),
    ):
        checkpoints.fill_(saved.path / file, arrays, put=step.device.put, left_out=left_out)
    step.state = step.state._replace(step=int(state[STEP]))
    step.recipe.loaded_()
    step.refresh()
