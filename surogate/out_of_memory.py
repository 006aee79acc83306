"""What a run says that ran out of memory: what it takes by group, and what takes less."""

import sys
import textwrap

from rich.console import Console

from surogate.config import Config
from surogate.device import choose_device
from surogate.errors import UserError
from surogate.plan import (
    SPARE,
    WIDTH,
    find_model,
    in_words,
    memory_table,
    place_of,
    predict,
    remedies,
    settled,
)


def explained(config: Config, error: BaseException) -> UserError:
    """The error for the user. The plan of the run and the settings that take less are printed on
    stderr before it, as ``surogate plan`` has them.
    """
    model, _ = find_model(config)
    kind, _, free = place_of(config)
    if kind == "cuda" and free is not None:  # what this run has taken was free before it
        free += choose_device("cuda").library.get_default_memory_pool().total_bytes()
    config = settled(config, model, kind, free)
    plan = predict(config, model, kind, free)
    console = Console(file=sys.stderr, width=WIDTH, highlight=False)
    console.print(memory_table(plan))
    # It has run out, whatever was free at the start: what helps takes less than the plan.
    tight = plan._replace(free=plan.memory.total)
    console.print("\nwhat takes less:")
    for remedy in remedies(config, model, tight):
        start = f"{in_words(remedy.plan.memory.total):>12}  "
        for line in textwrap.wrap(
            remedy.text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        ):
            console.print(line, markup=False)
    first = (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
    why = ""
    if plan.fits and free is not None:
        why = (
            f"; the run was to take {in_words(plan.memory.total)} of {in_words(free)}, of which "
            f"{SPARE:.0%} stay free: does another process take memory?"
        )
    return UserError(
        f"out of memory: {first}{why}; change a setting as above and run again: a run goes on "
        "from its newest checkpoint where that computes the same"
    )
