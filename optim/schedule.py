"""The learning rate as a pure function of the step: no state, so a resumed run takes the same list.

Steps count from 1 to total_steps. A run is warmup, then the body, then cooldown, and within a phase
of n steps the k-th step (k = 1..n) has progress t = (k - 1) / n: it begins at its full value, and
its end value belongs to the step after it. So no step has rate 0 unless the peak is 0.

    warmup     peak * step / warmup_steps                    (warmup_steps first steps)
    linear     peak * (1 - (1 - final) * t)                  over total_steps - warmup_steps
    cosine     peak * (final + (1 - final) * (1 + cos(pi t)) / 2)
    constant   peak
    wsd        peak, then peak * (final + (1 - final) * (1 - sqrt(t))) over the last
               round(wsd_decay_fraction * total_steps) steps
    cooldown   start * (1 - sqrt(t)) + final * peak * sqrt(t) over the last cooldown_steps steps,
               where start is what the body has at the first of them

Two things differ from the original trainer. Its warmup is peak * (step - 1) / warmup_steps, which
spends the first step at rate 0; ours ends at the peak. And there linear and cosine are over before
cooldown begins, so that cooldown_steps only prolongs the floor; here cooldown replaces their last
part.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from surogate.kernels.arrays import require

Kind = Literal["linear", "cosine", "constant", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each step of a run; equal settings are equal curves.

    Attributes:
        peak: highest learning rate, at least 0.
        total_steps: steps of the whole run.
        kind: shape of the body.
        warmup_steps: length of the linear rise, 0 for none.
        cooldown_steps: length of the final 1 - sqrt(t) tail, 0 for none.
        final_fraction: end rate over peak, from 0 to 1; constant reaches it only by a cooldown.
        wsd_decay_fraction: share of all steps that wsd decays over, from 0 to 1.

    Raises:
        ValueError: when a setting is out of range or the phases do not fit into total_steps.
    """

    peak: float
    total_steps: int
    kind: Kind = "linear"
    warmup_steps: int = 0
    cooldown_steps: int = 0
    final_fraction: float = 0.0
    wsd_decay_fraction: float = 0.1

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.peak) and self.peak >= 0,
            f"Schedule: peak must be finite and at least 0, got {self.peak}",
        )
        require(
            self.total_steps >= 1,
            f"Schedule: total_steps must be at least 1, got {self.total_steps}",
        )
        require(
            self.kind in get_args(Kind),
            f"Schedule: kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}",
        )
        for name in ("warmup_steps", "cooldown_steps"):
            value = getattr(self, name)
            require(value >= 0, f"Schedule: {name} must be at least 0, got {value}")
        for name in ("final_fraction", "wsd_decay_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"Schedule: {name} must be from 0 to 1, got {value}")
        for name, tail in (
            ("cooldown_steps", self.cooldown_steps),
            ("wsd decay", self.decay_steps),
        ):
            require(
                self.warmup_steps + tail <= self.total_steps,
                f"Schedule: warmup_steps ({self.warmup_steps}) and {name} ({tail}) must fit into "
                f"total_steps ({self.total_steps})",
            )

    @property
    def decay_steps(self) -> int:
        """Steps that wsd decays over; 0 for the other kinds."""
        return round(self.wsd_decay_fraction * self.total_steps) if self.kind == "wsd" else 0

    def at(self, step: int) -> float:
        """The learning rate of ``step``, which counts from 1. Raises ValueError outside the run."""
        require(
            1 <= step <= self.total_steps,
            f"Schedule.at: step must be from 1 to {self.total_steps}, got {step}",
        )
        first_cooldown = self.total_steps - self.cooldown_steps + 1
        if step < first_cooldown:
            return self._before_cooldown(step)
        root = math.sqrt((step - first_cooldown) / self.cooldown_steps)
        start = self._before_cooldown(first_cooldown)
        return start * (1 - root) + self.final_fraction * self.peak * root

    def _before_cooldown(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - 1 - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        span = 1 - self.final_fraction
        if self.kind == "linear":
            return self.peak * (1 - span * progress)
        if self.kind == "cosine":
            return self.peak * (self.final_fraction + span * (1 + math.cos(math.pi * progress)) / 2)
        into_decay = step - 1 - (self.total_steps - self.decay_steps)
        if self.kind == "constant" or into_decay < 0:
            return self.peak
        return self.peak * (1 - span * math.sqrt(into_decay / self.decay_steps))
