"""What bounded staleness does beyond its bound."""

from __future__ import annotations

from enum import StrEnum


class OnStale(StrEnum):
    """What happens to an asynchronous worker or push beyond the bound of staleness."""

    BLOCK = "block"  # a worker's pull waits until the slowest one has caught up
    DROP = "drop"  # the push is not applied
    SCALE = "scale"  # the push is multiplied by bound / staleness
