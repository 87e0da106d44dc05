"""One case of the rollout benchmark: all contenders on one workload, timed alternately."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.config import Config
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.io.device import cores
from specrl_jax.model.weights import Source

from . import hardware, parts, peers
from .hardware import Hardware
from .ours import Ours, Timed, TimedRollout
from .timing import alternate, ratio, spread
from .workload import Workload

PART_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases of a benchmark share."""

    config: Config
    source: Source
    params: Any  # on the device, as Actor.params lays them out
    drafters: Sequence[str]
    peers: Sequence[str]
    repeats: int
    directory: Path  # for peers' converted weights
    counter: CompilationCounter
    say: Callable[[str], None]
    probe: Callable[[], Hardware]


def run_case(setting: Setting, workload: Workload) -> dict[str, Any]:
    """Times the contenders alternately and accounts for our rounds."""
    ours = {drafter: Ours(setting.config, setting.source.arch, setting.params, workload, drafter,
                          setting.counter) for drafter in setting.drafters}
    for drafter, one in ours.items():
        setting.say(f"{workload.name}, {workload.rows} rows: preparing {drafter}")
        one.warm_up()
    with _peers(setting, workload) as others:
        tasks = {name: probed(one, setting.probe) for name, one in ours.items()}
        tasks |= {name: peers.timed(peer, workload) for name, peer in others.items()}
        setting.say(f"{workload.name}, {workload.rows} rows: timing {', '.join(tasks)}")
        times = alternate(tasks, setting.repeats)
        found = {name: describe_peer(times[name], peer) for name, peer in others.items()}
    ours_found = {}
    for name, one in ours.items():
        ours_found[name] = describe_ours(times[name], one)
        if workload.name == "uniform":
            setting.say(f"{workload.name}, {workload.rows} rows: parts of a round, {name}")
            ours_found[name]["parts"] = parts_of(one, times[name], PART_REPEATS)
    return {
        "workload": workload.name, "rows": workload.rows, "useful_tokens": workload.tokens,
        "prompt_tokens": hardware.lengths_summary(workload.prompt_lengths),
        "new_tokens": hardware.lengths_summary(workload.limits),
        "contenders": ours_found | found,
        "ratios": ratios(times, setting.drafters), "equal_streams": equal_streams(times)}


def probed(one: Ours, probe: Callable[[], Hardware]) -> Callable[[], TimedRollout]:
    """A timed rollout between two probes of the machine."""
    def run() -> TimedRollout:
        before, timed = probe(), one.run()
        return dataclasses.replace(timed, hardware=before.best(probe()))

    return run


@contextlib.contextmanager
def _peers(setting: Setting, workload: Workload) -> Iterator[dict[str, peers.Peer]]:
    found: dict[str, peers.Peer] = {}
    try:
        for name in setting.peers:
            setting.say(f"{workload.name}, {workload.rows} rows: preparing {name}")
            found[name] = peers.make_peer(name, setting.source, workload, cores(),
                                          setting.directory)
            peers.warm_up(found[name])
        yield found
    finally:
        for peer in found.values():
            peer.close()


def describe_peer(times: Sequence[Timed], peer: peers.Peer) -> dict[str, Any]:
    return _speed(times) | {"settings": peer.settings()}


def describe_ours(times: Sequence[TimedRollout], one: Ours) -> dict[str, Any]:
    """Speed, rounds against the bound that the machine had next to each run, and counters."""
    result = times[-1].result
    counters = result.counters
    bounds = [one.bound(t.result, t.hardware) for t in times]
    return _speed(times) | {
        "prefill_seconds": spread([t.result.prefill_seconds for t in times]),
        "round_seconds": spread([t.round_seconds for t in times]),
        "host_seconds": spread([t.host_seconds for t in times]),
        "bandwidth": spread([t.hardware.bandwidth for t in times]),
        "peak": spread([t.hardware.peak for t in times]),
        "bound_round_seconds": spread([b.seconds / counters["rounds"] for b in bounds]),
        "bound_kind": sorted({b.kind for b in bounds}),
        "over_bound": spread([t.launch_seconds / b.seconds
                              for t, b in zip(times, bounds, strict=True)]),
        "occupancy": counters["row_rounds"] / counters["slots"],
        "accept_length": counters["committed"] / counters["row_rounds"],
        "compilations": sum(t.compilations for t in times),
        "launches": len(result.trace), "counters": counters}


def _speed(times: Sequence[Timed]) -> dict[str, Any]:
    return {"tokens_per_second": spread([t.tokens_per_second for t in times]),
            "seconds": spread([t.seconds for t in times])}


def ratios(times: dict[str, list[Any]], drafters: Sequence[str]) -> dict[str, Any]:
    """tokens/s of each of our arms over those of off and of each peer, pair by pair."""
    speeds = {name: [t.tokens_per_second for t in found] for name, found in times.items()}
    others = [name for name in times if name == "off" or name not in drafters]
    return {f"{mine}/{other}": ratio(speeds[mine], speeds[other])
            for mine in drafters for other in others if mine != other}


def equal_streams(times: dict[str, list[Any]]) -> float | None:
    """Share of sequences that are the same with and without a draft; near ties may differ."""
    if not {"off", "history"} <= times.keys():
        return None
    plain, drafted = (times[name][-1].result.sequences for name in ("off", "history"))
    within = np.arange(plain.tokens.shape[1])[None] < plain.length[:, None]
    return float(((plain.tokens == drafted.tokens) | ~within).all(1).mean())


def parts_of(one: Ours, times: Sequence[TimedRollout], repeats: int) -> dict[str, Any]:
    """Seconds and share of each part of a round, the host's and what is left over included.

    Shares are of the round and the host together, medians of each.
    """
    seconds = parts.time_parts(one.sampler.engine.decoder, one.sampler.params, _situation(
        one, times[-1]), repeats)
    seconds["host"] = [t.host_seconds for t in times]
    found = {name: spread(values) for name, values in seconds.items()}
    median = {name: part["median"] for name, part in found.items()}
    total = spread([t.round_seconds for t in times])["median"] + median["host"]
    rest = total - sum(median.values())
    share = {name: value / total for name, value in (median | {"rest": rest}).items()}
    return {"seconds": found, "rest_seconds": rest, "share": share}


def _situation(one: Ours, timed: TimedRollout) -> parts.Situation:
    """The middle of the rollout, with its mean of packed tokens."""
    counters, workload = timed.result.counters, one.workload
    engine, pad = one.sampler.engine, functools.partial(np.zeros, dtype=np.int32)
    shapes = engine.shapes
    past = one.past
    if past is None:
        past = pad((workload.rows, 0, shapes.response))
    prompt = pad((workload.rows, shapes.prompt))
    for row, tokens in enumerate(workload.prompts):
        prompt[row, : len(tokens)] = tokens
    return parts.Situation(
        rows=workload.rows, packed=counters["packed"] * workload.rows / counters["slots"],
        context=(workload.prompt_lengths - 1 + workload.limits // 2).astype(np.int32),
        prompt=prompt, past=past, segments=shapes.segments,
        count=round(counters["committed"] / counters["row_rounds"]))
