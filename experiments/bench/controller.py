"""Policies against fixed settings: one cell is rows, a context, a drafter and lengths."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .controller_cells import Cell, shaped
from .controller_stats import best_fixed, describe, half_width, near
from .hindsight import Pace
from .timing import alternate
from .workload import heavy_limits

POLICIES = ("budget", "respec", "bandit", "oracle")
LEAST = 12  # pairs of a duel: few may lie close together by chance
AGAIN = 3  # times `repeats`: the runs by which settings that are near the fastest are told apart
WARM_UPS = 4  # rollouts of every policy before it is timed
PAIRS = 4  # of one more occasion: budget's last rollout, its eighth, tries what may be cheaper


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


Arm = Callable[[int], Run]  # a rollout of a load


class Shape:
    """The engines of one number of rows and context; corruption and lengths are data.

    Args:
      config: its rollout section holds temperature, and max_new_tokens of a uniform row.
      loads: token ids of all rows, of one rollout after the other, at least two; where they are
        equal, rows are samples of one prompt. One half chooses and teaches, the other is timed.
      stop: tokens that end a response.
      said: what rows of these loads say, as far as an earlier shape recorded it.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 loads: Sequence[Sequence[Sequence[int]]], stop: Sequence[int], drafter: str,
                 policies: Sequence[str], counter: CompilationCounter,
                 said: dict[tuple[str, int], np.ndarray] | None = None) -> None:
        self.config, self.counter, self.rows = config, counter, len(loads[0])
        self._said = {} if said is None else said
        self._replays = drafter == "replay"  # others must not know what they will say
        self._maps = 0  # of an engine's programs, the most so far
        self.group = self.rows if all(len(set(map(tuple, load))) == 1 for load in loads) else 1
        self.loads, self.stop = [list(load)[:: self.group] for load in loads], stop
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
            shaped(config, self.rows, max(len(prompt) for load in self.loads for prompt in load),
                   self.group, drafter, policy),
            source.arch, self.stop, sharding.make_mesh(config.mesh), prompts=len(self.loads[0]),
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

    def choosing(self, turn: int) -> int:
        """The load of a rollout that chooses or teaches, not one of those that are timed."""
        return turn % (len(self.loads) // 2)

    def timed(self, turn: int) -> int:
        return len(self.loads) - 1 - self.choosing(turn)

    def run(self, sampler: Sampler, lengths: str, load: int) -> Run:
        rows, prompts = np.arange(self.rows), self.loads[load]
        keys = prng.row_keys(self.config.seed, "generate", load, rows // self.group, rows * 0,
                             rows % self.group)
        drafts = sampler != self.plain
        past = self._said[lengths, load] if self._replays and drafts else None
        asked = request(prompts, keys, self.group, sampler.config.rollout, past)
        asked.limit = self.limits(lengths)
        self._turn_of(sampler)
        self.counter.take()
        result = sampler.engine.run(sampler.params, asked, sampler.drafter_params,
                                    rounds=sampler.config.rollout.rounds_per_launch)
        return Run(result, self.counter.take())

    def begin(self, cell: Cell) -> None:
        """Forgets what earlier cells taught, sets the drafter's quality, and records once what a
        rollout without drafts says, for those who replay it."""
        for load in range(len(self.loads)) if self._replays else ():
            if (cell.lengths, load) not in self._said:
                plain = self.run(self.plain, cell.lengths, load)
                self._said[cell.lengths, load] = _said(plain.result, self.group)
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
    shape.begin(cell)
    arms = _arms(shape, cell.lengths)
    for run in arms.values():
        run(shape.choosing(0))
    settings = [_name(setting) for setting in shape.settings]
    chosen_by = _choose({name: arms[name] for name in ("off", *settings)}, shape.choosing, repeats)
    choosing = times(chosen_by)
    paced = {name: hindsight.paces(run.result for run in of) for name, of in chosen_by.items()}
    if "oracle" in shape.policies:
        _teach(shape.policies["oracle"].engine, settings,
               {name: _accept_length(of) for name, of in chosen_by.items()}, paced)
    for policy in shape.policies:
        for turn in range(1, WARM_UPS):
            arms[policy](shape.choosing(turn))
    began, turns = time.perf_counter(), map(shape.timed, itertools.count())
    runs = _by_turns(arms, turns, repeats, say)
    duel: dict[str, list[Run]] = {name: [] for name in (best_fixed(choosing), "budget")}
    while time.perf_counter() - began < seconds and (
            len(duel["budget"]) < LEAST
            or half_width(choosing, times(runs), times(duel)) > precise):
        for name, new in _by_turns({name: arms[name] for name in duel}, turns, repeats).items():
            duel[name] += new
    equal = {name: all(map(_equal, of, runs["off"])) for name, of in runs.items()}
    equal["budget"] &= same(duel)
    priced = {name: s for name, s in shape.policies.items() if s.price}
    return describe(choosing, times(runs), times(duel),
                    _ceiling(shape, chosen_by, paced, repeats)) | {
        "cell": cell._asdict(), "tokens": int(np.mean([
            run.result.sequences.length.sum() for run in runs["off"]])),
        "compilations": sum(run.compilations for of in (*runs.values(), *duel.values())
                            for run in of),
        "equal_tokens": equal,
        "accept_length": {name: _short(_accept_length(of)) for name, of in runs.items()},
        "explained": {
            name: _explained(of[-1], name == "budget" and cell.lengths != "uniform")
            for name, of in runs.items() if name in shape.policies},
        "cost_error": {name: _short(s.price.error) for name, s in priced.items()},
        "cost_seconds": {name: _short(s.price.seconds) for name, s in priced.items()},
        "config": _changed(shape.policies["budget"].config, shape.config)}


def fight(shape: Shape, cell: Cell, best: str, occasion: int) -> dict[str, list[Run]]:
    """PAIRS runs of budget and the fixed setting `best` by turns, after both were warmed up."""
    shape.begin(cell)
    arms = _arms(shape, cell.lengths)
    arms = {name: arms[name] for name in (best, "budget")}
    arms[best](shape.choosing(0))
    for turn in range(WARM_UPS):
        arms["budget"](shape.choosing(turn))
    return _by_turns(arms, map(shape.timed, itertools.count(PAIRS * occasion)), PAIRS)


def same(runs: Mapping[str, Sequence[Run]]) -> bool:
    """Whether all arms said the same in each repeat."""
    first, *others = runs.values()
    return all(all(map(_equal, first, of)) for of in others)


def _by_turns(arms: Mapping[str, Arm], loads: Iterator[int], repeats: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[Run]]:
    """The runs of all arms, each repeat with the next load."""
    some = list(itertools.islice(loads, repeats))
    tasks = {name: functools.partial(next, map(arm, some)) for name, arm in arms.items()}
    return alternate(tasks, repeats, say)


def _choose(arms: Mapping[str, Arm], load: Callable[[int], int], repeats: int
            ) -> dict[str, list[Run]]:
    """Runs of every fixed arm, and more of those among which the fastest still is."""
    loads = map(load, itertools.count())
    runs = _by_turns(arms, loads, repeats)
    for _ in range(AGAIN - 1):
        for name, new in _by_turns({name: arms[name] for name in near(times(runs))}, loads,
                                   repeats).items():
            runs[name] += new
    return runs


def _teach(oracle: Engine, settings: Sequence[str], accepted: Mapping[str, float],
           paced: Mapping[str, Mapping[int, Pace]]) -> None:
    """What the settings really gave and took, in the engine's order of settings and batch sizes."""
    oracle.control = oracle.control.replace(own=oracle.control.own.replace(
        tokens=np.asarray([accepted[name] for name in settings], np.float32),
        gain=hindsight.gains(paced, settings, sorted(oracle.shapes.batches))))


def _ceiling(shape: Shape, runs: dict[str, list[Run]], paced: dict[str, dict[int, Pace]],
             repeats: int) -> float | None:
    """Speed over plain decoding with foresight, of chains; None where no setting is a chain."""
    chains = {setting[0]: _name(setting) for setting in shape.settings if setting[1] == 1}
    if not chains:
        return None
    shards, most = shape.fixed.engine.shapes.shards, shape.fixed.engine.machine.most
    costs: dict[int, dict[int, float]] = {}
    for depth, name in ({0: "off"} | chains).items():
        for size, (_, seconds) in paced[name].items():
            costs.setdefault(size * shards, {})[depth] = seconds
    plain = best = 0.0
    for i in range(repeats):
        good = hindsight.acceptable(
            {depth: runs[name][i].result for depth, name in chains.items()}, most * shards)
        length = np.asarray(runs["off"][i].result.sequences.length)
        plain += hindsight.seconds_with_foresight(good, length, most * shards, {
            size: {0: depths[0]} for size, depths in costs.items() if 0 in depths})
        best += hindsight.seconds_with_foresight(good, length, most * shards, costs)
    return plain / best


def _arms(shape: Shape, lengths: str) -> dict[str, Arm]:
    def fixed(setting: tuple[int, int, int], load: int) -> Run:
        engine = shape.fixed.engine
        engine.control = make_spec(*setting, 0, (1.0,) * len(engine.machine.drafter.names))
        return shape.run(shape.fixed, lengths, load)

    arms: dict[str, Arm] = {"off": functools.partial(shape.run, shape.plain, lengths)}
    arms |= {_name(setting): functools.partial(fixed, setting) for setting in shape.settings}
    return arms | {name: functools.partial(shape.run, sampler, lengths)
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


def _said(result: Result, group: int) -> np.ndarray:
    """i32[Q / M, M, T] what was said, -1 behind it."""
    s = result.sequences
    within = np.arange(s.tokens.shape[1])[None] < s.length[:, None]
    said = np.where(within, s.tokens, -1).astype(np.int32)
    return said.reshape(-1, group, said.shape[1])


def _equal(one: Run, other: Run) -> bool:
    return bool((_said(one.result, 1) == _said(other.result, 1)).all())


def _accept_length(runs: Sequence[Run]) -> float:
    return float(np.mean([run.accept_length for run in runs]))
