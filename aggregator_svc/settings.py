"""What the aggregator takes from the configuration.

Not here: defaults that are applied before a request arrives (``aggregator.mode``, ``aggregator.timeout_ms``): the
registered record already carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorSettings:
    """Bounds of the request store."""

    result_ttl_s: float = 600.0
    """Seconds that the results of a finished request are kept."""
    max_requests: int = 10_000
    """Most requests kept at a time, running and finished."""

    @classmethod
    def from_config(cls, config: Config) -> AggregatorSettings:
        """The settings in ``kev.aggregator``."""
        section = config.aggregator
        return cls(result_ttl_s=section.result_ttl_s, max_requests=section.max_requests)
