"""Learning rates for asynchronous training with bounded staleness.

Asynchronous SGD whose gradients are at most T updates old converges at a constant rate gamma with

    L M gamma + 2 L^2 M^2 T^2 gamma^2 <= 1

where L is the Lipschitz constant of the loss's gradient and M the number of stochastic gradients that one update sums
(Lian et al. 2015, arXiv:1506.08272, theorem 1; Alistarh et al. 2017, arXiv:1610.02132, for quantised gradients). The
condition is sufficient, not tight: larger rates often converge too, much larger ones do not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from kvstore.config import Config
from kvstore.errors import ConfigError, ParameterError
from kvstore.on_stale import OnStale
from kvstore.optimizer import OptimizerSpec

THEORY = "theory"


def largest_learning_rate(smoothness: float, staleness: int, summed: int = 1) -> float:
    """gamma_max = (sqrt(1 + 8 T^2) - 1) / (4 L M T^2), and 1 / (L M) for T = 0.

    Args:
        smoothness: L, above 0. staleness: T, in updates. summed: M.
    """
    lm = smoothness * summed
    if staleness == 0:
        return 1 / lm
    return (math.sqrt(1 + 8 * staleness**2) - 1) / (4 * lm * staleness**2)


def check_learning_rate(rate: float, smoothness: float, staleness: int, summed: int = 1) -> bool:
    """True if the theory covers this rate; else warn, and return False."""
    largest = largest_learning_rate(smoothness, staleness, summed)
    if rate <= largest * (1 + 1e-12):
        return True
    warnings.warn(
        f"learning rate {rate:.4g} is above {largest:.4g}, up to which convergence is proven for staleness {staleness} "
        f"and smoothness {smoothness:.4g}; learning_rate='theory' takes that one",
        UserWarning,
        stacklevel=2,
    )
    return False


def updates_behind(config: Config) -> int | None:
    """The bound of staleness in updates of a server, None without a bound.

    Under `block` a worker may be T rounds ahead, in which every other worker makes up to 2 T + 1 updates meanwhile.
    """
    if config.staleness is None:
        return None
    if config.on_stale is OnStale.BLOCK:
        return (2 * config.staleness + 1) * max(config.num_workers - 1, 0)
    return config.staleness


def rate_from_theory(params: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The optimizer's parameters, with `learning_rate='theory'` replaced by the largest proven rate.

    Raises:
        ConfigError: staleness or smoothness is not set.
    """
    if params.get("learning_rate") != THEORY:
        return dict(params)
    bound = updates_behind(config)
    if bound is None or config.smoothness is None:
        raise ConfigError(
            "learning_rate='theory' needs the settings staleness (KVSTORE_STALENESS) and smoothness "
            "(KVSTORE_SMOOTHNESS, the Lipschitz constant of the loss's gradient)"
        )
    return {**params, "learning_rate": largest_learning_rate(config.smoothness, bound)}


def bounded_rate(spec: OptimizerSpec, config: Config) -> OptimizerSpec:
    """The spec itself; warns if its constant rate is beyond what is proven for this job's settings."""
    bound, rate = updates_behind(config), spec.params.get("learning_rate")
    if bound is not None and config.smoothness is not None and isinstance(rate, int | float):
        check_learning_rate(rate, config.smoothness, bound)
    return spec


def check_synchronous(name: str, config: Config) -> None:
    """Raise ParameterError for settings that only asynchronous stores take."""
    if config.staleness is not None:
        raise ParameterError(
            f"staleness={config.staleness} (KVSTORE_STALENESS) is for asynchronous stores, {name!r} has none: "
            f"create 'dist_async' or leave it out",
            parameter="staleness", given=str(config.staleness), allowed="not set",
        )  # fmt: skip
