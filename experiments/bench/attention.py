"""One rollout by engines that differ in the implementation of tree attention alone."""

import dataclasses
from typing import Any

from .case import describe_ours, parts_of, probed
from .hardware import Probes
from .ours import Ours
from .timing import alternate, ratio


def with_attention(one: Ours, name: str) -> Ours:
    """Before anything is compiled."""
    engine = one.sampler.engine
    engine.decoder = dataclasses.replace(engine.decoder, implementation=name)
    return one


def measure(ours: dict[str, Ours], probes: Probes, repeats: int) -> dict[str, Any]:
    """Rollouts, alternately, and the parts of their rounds."""
    times = alternate({name: probed(one, probes.measure) for name, one in ours.items()}, repeats)
    last = list(ours)[-1]
    rounds = {name: [t.round_seconds for t in found] for name, found in times.items()}
    return {
        "cases": {name: describe_ours(times[name], one) | {"parts": parts_of(one, times[name], 5)}
                  for name, one in ours.items()},
        "ratios": {f"{name}/{last} round_seconds": ratio(rounds[name], rounds[last])
                   for name in ours if name != last}}
