"""Times rollouts: tokens/s, rounds against the machine's bound, and other engines.

    python experiments/bench.py rollout
    python experiments/bench.py rollout --engine=llamacpp,transformers --workload=uniform,heavy

Writes results/bench_rollout.json. Every row has its own prompt and slot, at temperature 1, and no
token ends a row. Contenders of a case take turns in this process, and ratios are pair by pair. A
round's bound is the larger of (weights and cache) / bandwidth and FLOPs / peak, which are probed
right before and after each timed run.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.metrics.progress import say
from specrl_jax.model.source import Actor
from specrl_jax.model.weights import Source
from specrl_jax.runtime.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.runtime.machine import cores, peak_rss

from . import engines, hardware, results, roofline, tables
from .hardware import Hardware
from .specrl_engine import TIMED, WARM_UP, Run, SpecrlEngine, Timed, responses
from .timing import alternate, ratio, spread
from .workload import HEAVY_ROWS, WORKLOADS, Workload, make_workload

NEEDS_MODEL = True
FLAGS = flags.FLAGS
PROBE_REPEATS = 2  # of each probe, before and after each timed run


def define_flags() -> None:
    """Defines the flags of `bench.py rollout`."""
    results.define_flags(repeats=3)
    flags.DEFINE_list("batch", ["1", "8", "16", "64"], "rows of each case; with other workloads, "
                      "heavy runs those of 16 and 64")
    flags.DEFINE_list("drafter", ["off", "history"], "drafters of this project's engine")
    flags.DEFINE_list("engine", [], f"other engines: some of {', '.join(engines.MODULES)}")
    flags.DEFINE_list("workload", ["uniform"], f"some of {', '.join(WORKLOADS)}")
    flags.DEFINE_integer("new_tokens", 128, "tokens of a uniform row; a heavy-tailed row has up to "
                         "twice as many", lower_bound=8)
    flags.DEFINE_boolean("resume", False, "keep the cases that --out already holds")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases share."""

    config: Config
    source: Source
    params: Any  # on the device, in the layout of Actor.params
    drafters: Sequence[str]
    engines: Sequence[str]
    repeats: int
    directory: Path  # for weights converted for other engines
    counter: CompilationCounter
    say: Callable[[str], None]
    probe: Callable[[], Hardware]


def main(config: Config, actor: Actor) -> int:
    """Runs the cases that the flags name; returns the exit status."""
    out = results.destination(FLAGS.out, "bench_rollout.json")
    rows = check_flags(actor)
    use_persistent_cache()
    packages = [name for engine in FLAGS.engine for name in engines.PACKAGES[engine]]
    result = results.blank(config, tuple(packages))
    if FLAGS.resume:
        result["cases"] = results.earlier(out)
    with tempfile.TemporaryDirectory(prefix="specrl_bench_") as directory:
        params = actor.params(sharding.make_mesh(config.mesh))
        setting = Setting(
            config=config, source=actor.source, params=params,
            drafters=FLAGS.drafter, engines=FLAGS.engine, repeats=FLAGS.repeats,
            directory=Path(directory), counter=CompilationCounter(), say=say,
            probe=functools.partial(hardware.Probes().measure, PROBE_REPEATS))
        for workload, count in cases(rows):
            name = f"{workload}-{count}"
            if name not in result["cases"]:
                result["cases"][name] = run_case(setting, make_workload(
                    workload, count, FLAGS.new_tokens, actor.source.tokenizer)) | {
                    "command": results.command(sys.argv), "peak_rss_bytes": peak_rss()}
                results.write(out, result)
                jax.clear_caches()
            tables.console().print(*tables.rollout_tables(result["cases"][name]))
    print(f"wrote {out}")
    return 0


def check_flags(actor: Actor) -> list[int]:
    """Returns the rows of --batch.

    Raises:
      ConfigError: a flag has a value that cannot work.
    """
    results.among("workload", FLAGS.workload, WORKLOADS)
    results.among("drafter", FLAGS.drafter, DRAFTERS)
    if not FLAGS.drafter:
        raise ConfigError("--drafter=: name at least one drafter; off decodes plainly")
    for name in FLAGS.engine:
        engines.check_installed(name)
    if actor.run is not None and FLAGS.engine:
        raise ConfigError(f"--run={actor.run}: other engines read the model at --config.model.path;"
                          " drop --engine, or export the run and name the export there")
    return results.positive("batch", FLAGS.batch)


def cases(rows: Sequence[int]) -> list[tuple[str, int]]:
    """Returns (workload, rows) in the order in which they run."""
    alone = FLAGS.workload == ["heavy"] and FLAGS["batch"].present
    return [(name, count) for name in FLAGS.workload for count in rows
            if name == "uniform" or alone or count in HEAVY_ROWS]


def run_case(setting: Setting, workload: Workload) -> dict[str, Any]:
    """Times all contenders of one workload alternately; returns the case of the result file."""
    label = f"{workload.name}, {workload.rows} rows"
    ours = {}
    for drafter in setting.drafters:
        setting.say(f"{label}: preparing {drafter}")
        ours[drafter] = prepared(setting, workload, drafter)
    with other_engines(setting, workload, label) as others:
        tasks: dict[str, Callable[[], Any]] = {
            name: probed(one, setting.probe, workload.tokens) for name, one in ours.items()}
        tasks |= {name: engines.timed(one, workload) for name, one in others.items()}
        setting.say(f"{label}: timing {', '.join(tasks)}")
        times = alternate(tasks, setting.repeats)
        found = {name: speed(times[name]) | {"settings": one.settings()}
                 for name, one in others.items()}
    return {
        "workload": workload.name, "rows": workload.rows, "useful_tokens": workload.tokens,
        "prompt_tokens": hardware.lengths_summary(workload.prompt_lengths),
        "new_tokens": hardware.lengths_summary(workload.limits),
        "contenders": {name: describe(times[name], one, workload)
                       for name, one in ours.items()} | found,
        "ratios": ratios(times, setting.drafters), "equal_streams": equal_streams(times)}


def prepared(setting: Setting, workload: Workload, drafter: str) -> SpecrlEngine:
    """Returns a compiled engine that has generated once; history drafts from these responses."""
    one = SpecrlEngine(config_for(setting.config, workload, drafter), setting.source,
                       setting.params, workload.prompts, setting.counter, limits=workload.limits)
    one.sampler.compile()
    first = one.generate(WARM_UP)
    if one.remembers:
        one.past = responses(first)[:, None]
    return one


def config_for(config: Config, workload: Workload, drafter: str) -> Config:
    """Returns `config` with the shapes of a workload, temperature 1 and no truncation."""
    rows = workload.rows
    smallest = {"heavy": 1, "uniform": rows if drafter == "off" else max(1, rows // 2)}
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=smallest[workload.name],
        max_prompt_tokens=max(2, int(workload.prompt_lengths.max())),
        max_new_tokens=workload.longest, temperature=1.0, top_k=0, top_p=1.0)
    spec = dataclasses.replace(config.spec, drafter=drafter, history_past=1)
    return dataclasses.replace(config, rollout=rollout, spec=spec)


def probed(one: SpecrlEngine, probe: Callable[[], Hardware], tokens: int) -> Callable[[], Run]:
    """Returns a timed rollout of `tokens` tokens between two probes of the machine."""
    def run() -> Run:
        before, timed = probe(), one.generate(TIMED)
        if timed.tokens != tokens:
            raise RuntimeError(f"{timed.tokens} tokens were made, {tokens} were wanted")
        return dataclasses.replace(timed, hardware=before.best(probe()))

    return run


@contextlib.contextmanager
def other_engines(setting: Setting, workload: Workload, label: str
                  ) -> Iterator[dict[str, engines.OtherEngine]]:
    """Makes and warms up the other engines, and closes them at the end."""
    found: dict[str, engines.OtherEngine] = {}
    try:
        for name in setting.engines:
            setting.say(f"{label}: preparing {name}")
            found[name] = engines.make_engine(name, setting.source, workload, cores(),
                                              setting.directory)
            engines.warm_up(found[name])
        yield found
    finally:
        for engine in found.values():
            engine.close()


def describe(times: Sequence[Run], one: SpecrlEngine, workload: Workload) -> dict[str, Any]:
    """Returns speed, rounds against the bound of the probes around each run, and counters."""
    result = times[-1].result
    counters = result.counters
    bounds = [bound(t, one, workload) for t in times]
    return speed(times) | {
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


def bound(run: Run, one: SpecrlEngine, workload: Workload) -> roofline.Bound:
    """Returns the least seconds that a run's rounds can take on the hardware around it."""
    sequences, counters = run.result.sequences, run.result.counters
    rows, context = roofline.context_by_round(
        workload.prompt_lengths, sequences.commits, sequences.rounds)
    nodes = 1 + counters["drafted"] / counters["row_rounds"]
    itemsize = np.dtype(one.config.model.dtype).itemsize
    return roofline.rounds_bound(one.sampler.engine.decoder.arch, run.hardware, rows, context,
                                 nodes, itemsize)


def speed(times: Sequence[Timed]) -> dict[str, Any]:
    """Returns tokens/s and seconds of one contender."""
    return {"tokens_per_second": spread([t.tokens_per_second for t in times]),
            "seconds": spread([t.seconds for t in times])}


def ratios(times: Mapping[str, Sequence[Timed]], drafters: Sequence[str]) -> dict[str, Any]:
    """Returns tokens/s of each drafter over those of off and of each other engine."""
    speeds = {name: [t.tokens_per_second for t in found] for name, found in times.items()}
    others = [name for name in times if name == "off" or name not in drafters]
    return {f"{mine}/{other}": ratio(speeds[mine], speeds[other])
            for mine in drafters for other in others if mine != other}


def equal_streams(times: Mapping[str, Sequence[Any]]) -> float | None:
    """Returns the share of sequences that are equal with off and history; near ties may differ."""
    if not {"off", "history"} <= times.keys():
        return None
    plain, drafted = (times[name][-1].result.sequences for name in ("off", "history"))
    within = np.arange(plain.tokens.shape[1])[None] < plain.length[:, None]
    return float(((plain.tokens == drafted.tokens) | ~within).all(1).mean())
