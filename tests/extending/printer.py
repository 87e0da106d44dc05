"""A tracker that prints one line a step."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.metrics.trackers import RunInfo


class Printer:
    """The tracker of track.to = printer:Printer. One that raises is left out from then on."""

    def __init__(self, info: RunInfo) -> None:
        """`info` has the working directory, the configuration, and the steps done before."""
        print(f"run {info.config.get('name')} after {sum(1 for _ in info.history())} steps",
              file=sys.stderr)

    def write(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        print(f"step {metrics['step']}: reward {metrics['reward/mean']:.3f}, first answer "
              f"{samples[0]['completion']!r}", file=sys.stderr)

    def close(self) -> None:
        pass
