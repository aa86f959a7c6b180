"""Learning-rate schedules by name and numbers, counted in server updates of a key (1, 2, ...).

The formulas, names and defaults are those of MXNet 1.9.1's `lr_scheduler`, written as functions of the update
number alone: nothing is counted or remembered, so every server and every restart gives the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvstore.errors import ParameterError, UnknownNameError, nearest_first
from kvstore.parameters import convert_parameters

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class _Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """What all schedules share: a warm-up over the updates below `warmup_steps`."""

    warmup_steps: Count = 0
    warmup_begin_lr: Rate = 0.0
    warmup_mode: Literal["linear", "constant"] = "linear"

    def rate(self, base: float, update: int) -> float:
        """Return the learning rate of the `update`-th update (from 1), where `base` is the optimizer's rate."""
        if update >= self.warmup_steps:
            return self.decayed(base, update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (base - self.warmup_begin_lr) * update / self.warmup_steps

    def decayed(self, base: float, update: int) -> float:
        """Return the rate after the warm-up."""
        raise NotImplementedError


class Constant(_Schedule, frozen=True, kw_only=True, tag="constant"):
    """The optimizer's own rate; of use with a warm-up."""

    def decayed(self, base: float, update: int) -> float:
        """Return `base`."""
        return base


class Factor(_Schedule, frozen=True, kw_only=True, tag="factor"):
    """Times `factor` after every `step` updates, never below `stop_factor_lr`."""

    step: Positive
    factor: Fraction = 1.0
    stop_factor_lr: Rate = 1e-8

    def decayed(self, base: float, update: int) -> float:
        """Return base * factor ** floor((update - 1) / step), at least `stop_factor_lr`."""
        drops = max(0, update - 1) // self.step
        return max(base * self.factor**drops, self.stop_factor_lr) if drops else base


class MultiFactor(_Schedule, frozen=True, kw_only=True, tag="multi_factor"):
    """Times `factor` after each of the update numbers in `step`, which increase."""

    step: Annotated[list[Positive], Meta(min_length=1)]
    factor: Fraction = 1.0

    def __post_init__(self) -> None:
        if any(later <= earlier for earlier, later in zip(self.step, self.step[1:], strict=False)):
            raise _refuse("multi_factor", "step", self.step, "increasing update numbers")

    def decayed(self, base: float, update: int) -> float:
        """Return base * factor ** (how many of `step` are below `update`)."""
        for _ in range(sum(update > step for step in self.step)):
            base *= self.factor
        return base


class _UntilMaximum(_Schedule, frozen=True, kw_only=True):
    """From the optimizer's rate down to `final_lr` at update `max_update`, and no further."""

    max_update: Positive
    final_lr: Rate = 0.0
    shape: ClassVar[str]

    def __post_init__(self) -> None:
        if self.max_update <= self.warmup_steps:
            raise _refuse(self.shape, "max_update", self.max_update, f"more than warmup_steps ({self.warmup_steps})")

    def decayed(self, base: float, update: int) -> float:
        """Return final_lr + (base - final_lr) * remaining(progress), progress from 0 to 1."""
        progress = (min(update, self.max_update) - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return self.final_lr + (base - self.final_lr) * self.remaining(progress)

    def remaining(self, progress: float) -> float:
        """Return the part of the way that is left: 1 at progress 0, 0 at progress 1."""
        raise NotImplementedError


class Poly(_UntilMaximum, frozen=True, kw_only=True, tag="poly"):
    """A polynomial of power `pwr`."""

    shape: ClassVar[str] = "poly"
    pwr: Annotated[float, Meta(gt=0)] = 2.0

    def remaining(self, progress: float) -> float:
        """Return (1 - progress) ** pwr."""
        return float((1 - progress) ** self.pwr)


class Cosine(_UntilMaximum, frozen=True, kw_only=True, tag="cosine"):
    """Half a wave of the cosine."""

    shape: ClassVar[str] = "cosine"

    def remaining(self, progress: float) -> float:
        """Return (1 + cos(pi * progress)) / 2."""
        return (1 + math.cos(math.pi * progress)) / 2


Schedule: TypeAlias = Constant | Factor | MultiFactor | Poly | Cosine

SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "factor": Factor,
    "multi_factor": MultiFactor,
    "poly": Poly,
    "cosine": Cosine,
}


def make_schedule(given: Mapping[str, object] | Schedule) -> Schedule:
    """Return a checked schedule from {'name': 'factor', 'step': 100, 'factor': '0.5'}.

    Raises:
        UnknownNameError: the name is missing or is none of `SCHEDULES`.
        ParameterError: one of the numbers.
    """
    numbers = dict(given) if isinstance(given, Mapping) else dict(msgspec.to_builtins(given))
    name = str(numbers.pop("name", ""))
    if name not in SCHEDULES:
        known = ", ".join(nearest_first(name, SCHEDULES))
        raise UnknownNameError(f"no learning-rate schedule is called {name!r}; known: {known}", name=name)
    return convert_parameters(SCHEDULES[name], numbers, f"schedule {name!r}")


def _refuse(schedule: str, name: str, value: object, allowed: str) -> ParameterError:
    text = f"schedule {schedule!r}: parameter {name!r} is {value}, allowed: {allowed}"
    return ParameterError(text, parameter=name, given=str(value), allowed=allowed)
