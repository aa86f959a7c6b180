"""What an optimizer is, as plain data (OptimizerSpec) and as a rule that a server applies (Optimizer).

A worker sends a name and numbers, never code: nothing is unpickled. Built-in rules are in `update_rules` and
`adaptive_rules`. An own rule is a class in a module that both the worker's script and the servers import::

    @register_optimizer("clipped_sgd")
    class ClippedSgd(Optimizer[OptimizerParams]):
        def create_state(self, n, dtype): return {}
        def update(self, key, shape, offset, value, grad, state, step):
            return value - self.learning_rate(key, step) * np.clip(grad, -1, 1)

and the servers are started with `--import MODULE`. Rules never see how a key is spread over servers unless they ask
for the whole array by `whole = True`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.errors import ConfigError, NotSupportedError, ParameterError, UnknownNameError, nearest_first
from kvstore.parameters import convert_parameters, convert_value
from kvstore.schedules import Schedule, make_schedule

Key: TypeAlias = int | str
Array: TypeAlias = NDArray[Any]
Rate: TypeAlias = Annotated[float, Meta(ge=0)]

ENTRY_POINT_GROUP = "kvstore.optimizers"


class OptimizerParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters every rule takes; an own rule derives its own struct from this one. Names are MXNet's."""

    learning_rate: Rate = 0.01
    wd: Rate = 0.0  # weight decay
    rescale_grad: float = 1.0  # 1 / batch size, for example; the gradient is the SUM over workers
    clip_gradient: Annotated[float, Meta(gt=0)] | None = None  # after rescaling, element by element; None: off


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An optimizer as plain data; made by `make_spec`, which fills in the defaults.

    `lr_mult` and `wd_mult` map a key, or a glob pattern over keys, to a factor; an exact key wins, then the first
    pattern that matches. An integer key is matched by its decimal text.
    """

    name: str
    params: dict[str, float | int | str | bool]
    lr_mult: dict[str, float] = {}
    wd_mult: dict[str, float] = {}
    schedule: Schedule | None = None


P = TypeVar("P", bound=OptimizerParams)


class Optimizer(ABC, Generic[P]):
    """An update rule. Immutable: what changes between updates is in the state arrays and the step number.

    A half-precision key is updated on its float32 master, so arrays are float32 or float64 throughout.
    """

    Params: ClassVar[type[OptimizerParams]] = OptimizerParams
    whole: ClassVar[bool] = False
    """True: needs the whole array at once (norms, for example); the key is then placed whole on one server."""

    def __init__(self, params: P, spec: OptimizerSpec) -> None:
        self.params = params
        self.spec = spec

    @abstractmethod
    def create_state(self, n: int, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Return the state of a chunk of `n` elements before its first update: name -> array (n,)."""

    @abstractmethod
    def update(
        self,
        key: Key,
        shape: tuple[int, ...],
        offset: int,
        value: Array,
        grad: Array,
        state: dict[str, Array],
        step: int,
    ) -> Array:
        """Return the new values of one chunk.

        Args:
            key: the key; `shape`: the shape of its whole array; `offset`: first element of this chunk in it.
            value: (n,) flat float32 or float64; read only, since readers may still hold it.
            grad: (n,) of value's dtype, the sum over workers; may be overwritten.
            state: as `create_state` gave it; updated in place.
            step: number of this update of the chunk, from 1.

        Returns:
            a new array (n,) of value's dtype, which is neither `value` nor `grad`.
        """

    def learning_rate(self, key: Key, step: int) -> float:
        """Return the rate for `key` at its `step`-th update: base or schedule, times the key's multiplier."""
        base, schedule = self.params.learning_rate, self.spec.schedule
        return (schedule.rate(base, step) if schedule else base) * multiplier(self.spec.lr_mult, key)

    def weight_decay(self, key: Key) -> float:
        """Return the weight decay for `key`: `wd` times the key's multiplier."""
        return self.params.wd * multiplier(self.spec.wd_mult, key)


def multiplier(factors: Mapping[str, float], key: Key) -> float:
    """Return the factor of `key`: exact name first, then the first glob pattern that matches, else 1."""
    name = str(key)
    if name in factors:
        return factors[name]
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


_REGISTRY: dict[str, type[Optimizer[Any]] | str] = {
    "sgd": "kvstore.update_rules:Sgd",
    "nag": "kvstore.update_rules:Nag",
    "adam": "kvstore.adaptive_rules:Adam",
    "adamw": "kvstore.adaptive_rules:AdamW",
    "adagrad": "kvstore.adaptive_rules:AdaGrad",
    "rmsprop": "kvstore.adaptive_rules:RmsProp",
    "signum": "kvstore.update_rules:Signum",
    "test": "kvstore.update_rules:Test",
}
OPTIMIZERS: Mapping[str, type[Optimizer[Any]] | str] = MappingProxyType(_REGISTRY)
"""Read-only view of the registry: name -> class, or 'module:Class' that is imported on first use."""

C = TypeVar("C", bound=type[Optimizer[Any]])


def register_optimizer(name: str) -> Callable[[C], C]:
    """Return a class decorator that registers an update rule under `name` (case does not matter).

    Raises:
        ConfigError: the name is taken, or the class is no Optimizer.
    """

    def register(rule: C) -> C:
        if not (isinstance(rule, type) and issubclass(rule, Optimizer)):
            raise ConfigError(f"optimizer {name!r}: {rule!r} is not a subclass of kvstore.optimizer.Optimizer")
        if name.lower() in _REGISTRY:
            taken = _REGISTRY[name.lower()]
            raise ConfigError(f"optimizer {name!r} is already registered, as {taken}; choose another name")
        _REGISTRY[name.lower()] = rule
        return rule

    return register


def find_optimizer(name: str) -> type[Optimizer[Any]]:
    """Return the class registered as `name`, importing it on first use.

    Raises:
        UnknownNameError: nobody registered it; the text lists the known names and says how to register.
    """
    entry = _REGISTRY.get(name.lower()) or _from_entry_point(name.lower())
    if entry is None:
        known = ", ".join(nearest_first(name, _REGISTRY))
        raise UnknownNameError(
            f"no optimizer is called {name!r}; known here: {known}. An own class is registered with "
            f"@register_optimizer({name!r}) in a module that the training script imports and that the servers are "
            f"told to import: `--import MODULE` on kvstore-server",
            name=name,
        )
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
    assert isinstance(entry, type)
    return entry


def _from_entry_point(name: str) -> type[Optimizer[Any]] | str | None:
    from importlib.metadata import entry_points  # here, since it takes as long to import as all of ours

    found = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    return found.value if found else None


def make_spec(
    optimizer: str | OptimizerSpec,
    *,
    lr_mult: Mapping[str, object] | None = None,
    wd_mult: Mapping[str, object] | None = None,
    schedule: Mapping[str, object] | Schedule | None = None,
    **params: object,
) -> OptimizerSpec:
    """Check an optimizer on the worker, before anything is sent; values may be text ('0.1').

    Args:
        optimizer: a registered name, or a spec whose settings the other arguments override.
        lr_mult, wd_mult: key or glob pattern -> factor.
        schedule: {'name': 'cosine', 'max_update': 1000}, see `kvstore.schedules`.

    Raises:
        UnknownNameError: no such optimizer or schedule.
        ParameterError: a parameter is unknown, of the wrong type or out of range.
    """
    if isinstance(optimizer, OptimizerSpec):
        lr_mult = optimizer.lr_mult if lr_mult is None else lr_mult
        wd_mult = optimizer.wd_mult if wd_mult is None else wd_mult
        schedule = optimizer.schedule if schedule is None else schedule
        params = {**optimizer.params, **params}
        optimizer = optimizer.name
    if not isinstance(optimizer, str):
        raise ParameterError(
            f"an optimizer is named, not passed as a {type(optimizer).__name__}: give 'sgd', for example, and its "
            f"parameters as keywords",
            parameter="optimizer", given=repr(optimizer), allowed="a registered name, or an OptimizerSpec",
        )  # fmt: skip
    checked = convert_parameters(find_optimizer(optimizer).Params, params, f"optimizer {optimizer!r}")
    spec = OptimizerSpec(
        name=optimizer.lower(),
        params={name: value for name, value in msgspec.structs.asdict(checked).items() if value is not None},
        lr_mult=_factors(lr_mult or {}, "lr_mult"),
        wd_mult=_factors(wd_mult or {}, "wd_mult"),
        schedule=None if schedule is None else make_schedule(schedule),
    )
    _check_warmup(spec.schedule, checked.learning_rate)
    return spec


def _factors(given: Mapping[str, object], owner: str) -> dict[str, float]:
    return {str(key): convert_value(factor, Rate, str(key), owner) for key, factor in given.items()}


def _check_warmup(schedule: Schedule | None, learning_rate: float) -> None:
    if schedule is not None and schedule.warmup_begin_lr > learning_rate:
        raise ParameterError(
            f"schedule: parameter 'warmup_begin_lr' is {schedule.warmup_begin_lr}, allowed: at most the "
            f"learning_rate {learning_rate}",
            parameter="warmup_begin_lr",
            given=str(schedule.warmup_begin_lr),
            allowed=f"at most {learning_rate}",
        )


def with_learning_rate(
    spec: OptimizerSpec, learning_rate: object = None, lr_mult: Mapping[str, object] | None = None
) -> OptimizerSpec:
    """Return `spec` with another learning rate, other multipliers, or both; None leaves a setting as it is.

    Raises:
        NotSupportedError: a rate is given but the spec has a schedule, which decides the rate (as in MXNet).
        ParameterError: the rate or a multiplier is no finite number of at least 0.
    """
    if learning_rate is None:
        return make_spec(spec, lr_mult=lr_mult)
    if spec.schedule is not None:
        raise NotSupportedError(
            "set_learning_rate: the optimizer has a learning-rate schedule, which decides the rate; call "
            "set_optimizer without `schedule` to set rates by hand"
        )
    return make_spec(spec, lr_mult=lr_mult, learning_rate=learning_rate)


def create_optimizer(spec: OptimizerSpec) -> Optimizer[Any]:
    """Build the rule on a server; everything is checked again, since a spec may come from the network or a file."""
    checked = make_spec(spec)
    rule = find_optimizer(checked.name)
    return rule(convert_parameters(rule.Params, checked.params, f"optimizer {checked.name!r}"), checked)


def spec_to_json(spec: OptimizerSpec) -> str:
    """Return the text that crosses the wire; equal specs give equal texts."""
    return msgspec.json.encode(spec).decode()


def spec_from_json(text: str | bytes) -> OptimizerSpec:
    """Read a spec from the wire or a checkpoint. Raises ParameterError when it does not have the form of one."""
    try:
        return msgspec.json.decode(text, type=OptimizerSpec)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ParameterError(f"this is no optimizer specification: {error}", parameter="spec") from error
