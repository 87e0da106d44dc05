"""Policies against fixed settings: one cell is a load, a context, a drafter and lengths."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.control import acceptance, prices, respec
from specrl_jax.control.policies import make_spec
from specrl_jax.draft.replay import replaying
from specrl_jax.host import memory
from specrl_jax.host.compilation import CompilationCounter
from specrl_jax.host.launches import LAUNCHES, MEASURED, summary
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.layout import request
from specrl_jax.sampler import Sampler

from . import hindsight
from .controller_cells import Cell
from .controller_stats import best_fixed, describe, half_width, near
from .hindsight import Pace
from .timing import alternate
from .workload import heavy_limits

POLICIES = ("budget", "respec", "bandit", "oracle")
DEPTH = 4
LEAST = 12  # pairs of a duel: few may lie close together by chance
AGAIN = 3  # times `repeats`: the runs by which settings that are near the fastest are told apart
WARM_UPS = 4  # rollouts of every policy before it is timed
PAIRS = 4  # of one more occasion: budget's last rollout, its eighth, tries what may be cheaper
RECORDED, TIMED = 0, 1  # steps of the noise keys


@dataclasses.dataclass(frozen=True)
class Run:
    """One rollout. `seconds` are without prefill, which is the same for all."""

    result: Result
    compilations: int

    @property
    def seconds(self) -> float:
        return self.result.seconds - self.result.prefill_seconds

    @property
    def accept_length(self) -> float:
        counters = self.result.counters
        return counters["committed"] / max(counters["row_rounds"], 1)


class Shape:
    """The engines of one load and context; corruption and lengths are data.

    Args:
      config: its rollout section holds temperature, and max_new_tokens of a uniform row.
      prompts: token ids of all rows; where they are equal, they are samples of one prompt.
      stop: tokens that end a response.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 prompts: Sequence[Sequence[int]], stop: Sequence[int], drafter: str,
                 policies: Sequence[str], counter: CompilationCounter) -> None:
        self.config, self.counter, self.rows = config, counter, len(prompts)
        self._maps = 0  # of an engine's programs, the most so far
        self.group = len(prompts) if len({tuple(p) for p in prompts}) == 1 else 1
        self.prompts, self.stop = list(prompts)[:: self.group], stop
        self.new_tokens = config.rollout.max_new_tokens
        self.plain = self._sampler(source, params, config, "off", "off")
        # Where weights lie in memory is worth some per cent of a round: the same for all.
        make = functools.partial(self._sampler, source, self.plain.params, config, drafter)
        self.fixed = self._last = make("fixed")
        self.policies: dict[str, Sampler] = {}
        for policy in policies:
            self.policies[policy] = make(policy)
            self._turn_of(self.policies[policy])
        nodes = self.fixed.config.spec.max_nodes
        self.settings = respec.settings_of(
            config.control.settings, self.fixed.engine.machine.drafter.depth,
            self.fixed.config.spec.max_branch, nodes)

    def _sampler(self, source: Source, params: Any, config: Config, drafter: str, policy: str
                 ) -> Sampler:
        """
        Raises:
          ConfigError: its programs, as large as another engine's, do not fit this process.
        """
        held, most = memory.maps()
        if held + self._maps > most:
            raise ConfigError(
                f"--policies: the engine of {policy!r} has some {self._maps} memory maps, {held} "
                f"of {most} are taken; name fewer policies, or raise the bound with "
                f"`sysctl -w vm.max_map_count={4 * most}`")
        sampler = Sampler(
            shaped(config, self.rows, max(map(len, self.prompts)), self.group, drafter, policy),
            source.arch, self.stop, sharding.make_mesh(config.mesh), prompts=len(self.prompts),
            group=self.group, tokenizer=source.tokenizer, warn=lambda text: None)
        sampler.publish(params, 0)
        sampler.compile()
        memory.give_back()  # six engines of 64 rows of SmolLM2 need it
        self._maps = max(self._maps, memory.maps()[0] - held)
        return sampler

    def _turn_of(self, sampler: Sampler) -> None:
        """One cache of keys and values for all that draft; that of 64 rows of SmolLM2 is 1.1 GB."""
        if sampler not in (self.plain, self._last):
            self._last.engine.hand_on(sampler.engine)
            self._last = sampler

    def limits(self, lengths: str) -> np.ndarray:
        """i32[rows], at most twice the tokens of a uniform row."""
        if lengths != "heavy":
            tokens = self.new_tokens * (1 if lengths == "uniform" else 2)
            return np.full(self.rows, tokens, np.int32)
        return heavy_limits(self.rows, 2 * self.new_tokens)

    def run(self, sampler: Sampler, limits: np.ndarray, past: np.ndarray | None) -> Run:
        rows = np.arange(self.rows)
        keys = prng.row_keys(self.config.seed, "generate", TIMED, rows // self.group, rows * 0,
                             rows % self.group)
        asked = request(self.prompts, keys, self.group, sampler.config.rollout,
                        past if sampler.engine.layout.past else None)
        asked.limit = limits
        self._turn_of(sampler)
        self.counter.take()
        result = sampler.engine.run(sampler.params, asked, sampler.drafter_params,
                                    rounds=sampler.config.rollout.rounds_per_launch)
        return Run(result, self.counter.take())

    def begin(self, cell: Cell) -> None:
        """Forgets what earlier cells taught, and sets the drafter's quality."""
        for sampler in (self.fixed, *self.policies.values()):
            engine, machine = sampler.engine, sampler.engine.machine
            engine.acceptance = acceptance.blank(len(machine.drafter.names), machine.drafter.depth)
            if machine.controller.adaptive:
                before = engine.control
                tables = {size: prices.measured(before.prices[size], table)
                          for size, table in before.tables.items()}
                engine.control = machine.controller.init().replace(tables=tables)
            if cell.corruption is not None:
                sampler.drafter_params = engine.everywhere(replaying(cell.corruption))


def shaped(config: Config, rows: int, context: int, group: int, drafter: str, policy: str
           ) -> Config:
    """`config` for one load and context. All rows weigh alike: they end at their limits, so that
    weights would be an oracle's. Limits do tell policies how much is to come when a rollout begins;
    only where rows end at stop tokens they do not know that."""
    new = config.rollout.max_new_tokens
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=_least(rows), max_prompt_tokens=max(2, context),
        max_new_tokens=2 * new)
    branch = 1 if drafter == "replay" else config.spec.max_branch
    spec = dataclasses.replace(
        config.spec, drafter=drafter, history_past=group, max_steps=DEPTH, max_branch=branch,
        max_nodes=1 + DEPTH * branch, steps=1, branch=1, nodes=2, budget=0,
        max_packed=max(2 * rows, min(rows * (1 + DEPTH * branch), 64)))
    settings = respec.settings_of(config.control.settings, DEPTH, branch, spec.max_nodes)
    accept = tuple(1.0 for _ in settings) if policy == "oracle" else ()
    control = dataclasses.replace(config.control, policy=policy, min_survival=0.0, accept=accept,
                                  length_weight=0.0)
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)


def _least(rows: int) -> int:
    """The smallest batch. Each further one is a program more in the engine of every arm, and Linux
    maps 65,530 pieces of code and data at most into a process."""
    return max(min(4, rows), rows // 4)


def run_cell(shape: Shape, cell: Cell, repeats: int, precise: float, seconds: float,
             say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Chooses the best fixed setting, times all arms by turns, then budget against that one.

    `oracle` goes by what the settings gave and took in the runs that choose.

    Args:
      repeats: runs of each fixed setting to choose by, AGAIN times as many of the fastest ones,
        of each arm to time it by, and at a time of the last duel, which ends when the ratio is
        known; at least 2.
      precise: half-width of budget's 95 % interval at which it ends.
      seconds: of timed runs after those that choose, after which it ends in any case.
    """
    limits = shape.limits(cell.lengths)
    shape.begin(cell)
    plain = shape.run(shape.plain, limits, None)
    past = _recorded(plain.result, shape.group)
    arms = _arms(shape, limits, past)
    for run in arms.values():
        run()
    settings = [_name(setting) for setting in shape.settings]
    chosen_by = _choose({name: arms[name] for name in ("off", *settings)}, repeats)
    choosing = times(chosen_by)
    paced = {name: hindsight.paces(run.result for run in of) for name, of in chosen_by.items()}
    if "oracle" in shape.policies:
        _teach(shape.policies["oracle"].engine, settings,
               {name: of[-1].accept_length for name, of in chosen_by.items()}, paced)
    for policy in shape.policies:
        for _ in range(WARM_UPS - 1):
            arms[policy]()
    began = time.perf_counter()
    runs = alternate(arms, repeats, say)
    duel: dict[str, list[Run]] = {name: [] for name in (best_fixed(choosing), "budget")}
    while time.perf_counter() - began < seconds and (
            len(duel["budget"]) < LEAST
            or half_width(choosing, times(runs), times(duel)) > precise):
        for name, new in alternate({name: arms[name] for name in duel}, repeats).items():
            duel[name] += new
    priced = {name: s for name, s in shape.policies.items() if s.price}
    return describe(choosing, times(runs), times(duel),
                    _ceiling(shape, chosen_by, paced)) | {
        "cell": cell._asdict(), "tokens": int(plain.result.sequences.length.sum()),
        "compilations": sum(run.compilations for of in (*runs.values(), *duel.values())
                            for run in of),
        "equal_tokens": {name: _equal(of[-1].result, plain.result) for name, of in runs.items()},
        "accept_length": {name: _short(of[-1].accept_length) for name, of in runs.items()},
        "explained": {
            name: _explained(of[-1], name == "budget" and cell.lengths != "uniform")
            for name, of in runs.items() if name in shape.policies},
        "cost_error": {name: _short(s.price.error) for name, s in priced.items()},
        "cost_seconds": {name: _short(s.price.seconds) for name, s in priced.items()},
        "config": _changed(shape.policies["budget"].config, shape.config)}


def fight(shape: Shape, cell: Cell, best: str) -> dict[str, list[Run]]:
    """PAIRS runs of budget and the fixed setting `best` by turns, after both were warmed up."""
    limits = shape.limits(cell.lengths)
    shape.begin(cell)
    past = _recorded(shape.run(shape.plain, limits, None).result, shape.group)
    arms = _arms(shape, limits, past)
    arms = {name: arms[name] for name in (best, "budget")}
    arms[best]()
    for _ in range(WARM_UPS):
        arms["budget"]()
    return alternate(arms, PAIRS)


def _choose(arms: Mapping[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Runs of every fixed arm, and more of those among which the fastest still is."""
    runs = alternate(arms, repeats)
    for _ in range(AGAIN - 1):
        for name, new in alternate({name: arms[name] for name in near(times(runs))},
                                   repeats).items():
            runs[name] += new
    return runs


def _teach(oracle: Engine, settings: Sequence[str], accepted: Mapping[str, float],
           paced: Mapping[str, Mapping[int, Pace]]) -> None:
    """What the settings really gave and took, in the engine's order of settings and batch sizes."""
    oracle.control = oracle.control.replace(own=oracle.control.own.replace(
        tokens=np.asarray([accepted[name] for name in settings], np.float32),
        gain=hindsight.gains(paced, settings, sorted(oracle.shapes.batches))))


def _ceiling(shape: Shape, runs: dict[str, list[Run]], paced: dict[str, dict[int, Pace]]
             ) -> float | None:
    """Speed over plain decoding with foresight, of chains; None where no setting is a chain."""
    chains = {setting[0]: _name(setting) for setting in shape.settings if setting[1] == 1}
    if not chains:
        return None
    shards, most = shape.fixed.engine.shapes.shards, shape.fixed.engine.machine.most
    costs: dict[int, dict[int, float]] = {}
    for depth, name in ({0: "off"} | chains).items():
        for size, (_, seconds) in paced[name].items():
            costs.setdefault(size * shards, {})[depth] = seconds
    good = hindsight.acceptable(
        {depth: runs[name][-1].result for depth, name in chains.items()}, most * shards)
    length = np.asarray(runs["off"][-1].result.sequences.length)
    plain, best = (hindsight.seconds_with_foresight(good, length, most * shards, of) for of in (
        {size: {0: depths[0]} for size, depths in costs.items() if 0 in depths}, costs))
    return plain / best


def _arms(shape: Shape, limits: np.ndarray, past: np.ndarray | None
          ) -> dict[str, Callable[[], Run]]:
    def fixed(setting: tuple[int, int, int]) -> Run:
        engine = shape.fixed.engine
        engine.control = make_spec(*setting, 0, (1.0,) * len(engine.machine.drafter.names))
        return shape.run(shape.fixed, limits, past)

    arms: dict[str, Callable[[], Run]] = {
        "off": lambda: shape.run(shape.plain, limits, None)}
    arms |= {_name(setting): functools.partial(fixed, setting) for setting in shape.settings}
    return arms | {name: functools.partial(shape.run, sampler, limits, past)
                   for name, sampler in shape.policies.items()}


def _explained(run: Run, launches: bool) -> dict[str, Any]:
    """Metrics of a rollout; launch by launch only for those that a picture may show."""
    told, one_by_one = summary(run.result.trace), (LAUNCHES, MEASURED)
    return {name: value if name in one_by_one else _short(value) for name, value in told.items()
            if launches or name not in one_by_one}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _changed(config: Config, base: Config) -> dict[str, dict[str, Any]]:
    """What an engine was built with, where that is not what the file's config says."""
    old = as_dict(base)
    return {name: {field: value for field, value in as_dict(config)[name].items()
                   if value != old[name][field]} for name in ("rollout", "spec", "control")}


def _name(setting: tuple[int, int, int]) -> str:
    return "x".join(map(str, setting))


def times(runs: dict[str, list[Run]]) -> dict[str, list[float]]:
    return {name: [run.seconds for run in of] for name, of in runs.items()}


def _recorded(result: Result, group: int) -> np.ndarray:
    """i32[Q / M, M, T] what was said, -1 behind it."""
    s = result.sequences
    within = np.arange(s.tokens.shape[1])[None] < s.length[:, None]
    said = np.where(within, s.tokens, -1).astype(np.int32)
    return said.reshape(-1, group, said.shape[1])


def _equal(one: Result, other: Result) -> bool:
    return bool((np.asarray(one.sequences.length) == other.sequences.length).all()
                and (_recorded(one, 1) == _recorded(other, 1)).all())
