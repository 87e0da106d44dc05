"""Controllers against fixed settings: the engines of one number of rows, and one cell's runs."""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from bench.timing import alternate

from specrl_jax import prng, sharding
from specrl_jax.config import ConfigError
from specrl_jax.control import respec
from specrl_jax.control.protocol import make_spec
from specrl_jax.metrics.launches import LAUNCHES, MEASURED, summary
from specrl_jax.rollout import profile
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import make_request
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import RolloutInputs
from specrl_jax.runtime import machine
from specrl_jax.runtime.compilation import CompilationCounter

from .controller_cells import Bench, Cell, Sizes, shaped
from .controller_stats import Times, best_fixed, near
from .recorded import replay_params

POLICIES = ("budget", "respec")
AGAIN = 3  # times `repeats`: the runs by which settings that are near the fastest are told apart
WARM_UPS = 4  # rollouts of every policy before it is timed

Run = Callable[[int], Result]  # a rollout of a load
Results = Mapping[str, Sequence[Result]]


class Shape:
    """The engines of one number of rows; context, corruption and lengths are data.

    One half of the loads chooses the best fixed setting and teaches, the other half is timed.
    """

    def __init__(self, bench: Bench, sizes: Sizes, policies: Sequence[str]) -> None:
        self.bench, self.sizes, (self.rows, contexts, stops) = bench, sizes, sizes
        self.new_tokens, self.counter = bench.new_tokens(self.rows, stops), CompilationCounter()
        loads = {context: bench.loads(self.rows, context) for context in contexts}
        every = [load for of in loads.values() for load in of]
        self.group = self.rows if all(len(set(map(tuple, load))) == 1 for load in every) else 1
        self.longest = max(len(prompt) for load in every for prompt in load)
        self.all_loads = {context: [load[:: self.group] for load in of]
                          for context, of in loads.items()}
        self.recorded: dict[tuple[int, str, int], np.ndarray] = {}  # by context, lengths and load
        self.fresh: dict[Sampler, RolloutInputs] = {}  # by sampler, nothing learned yet
        self.maps = 0  # memory maps of an engine's programs, the most so far
        self.plain = self._sampler(bench.params, "off", "off")
        # Where weights lie in memory is worth some per cent of a round: the same for all.
        weights = self.fresh[self.plain].policy.params
        make = functools.partial(self._sampler, weights, bench.drafter)
        self.fixed = make("fixed")
        self.policies = {policy: make(policy) for policy in policies}
        self.states = dict(self.fresh)
        self.settings = respec.settings_of(
            bench.config.control.settings,
            profile.limits_of(self.fixed.engine)._replace(
                branch=self.fixed.config.spec.max_branch))

    def _sampler(self, params: Any, drafter: str, policy: str) -> Sampler:
        """Returns a compiled sampler.

        Raises:
          ConfigError: its programs, as large as another engine's, do not fit this process.
        """
        held, most = machine.maps()
        if held + self.maps > most:
            raise ConfigError(
                f"--policies: the engine of {policy!r} has some {self.maps} memory maps, {held} "
                f"of {most} are taken; name fewer policies or cells, or raise the bound "
                f"with `sysctl -w vm.max_map_count={4 * most}`")
        config = shaped(self.bench, self.sizes, self.longest, self.group, drafter, policy)
        source = self.bench.source
        sampler = Sampler(config, source.arch, self.bench.stop, sharding.make_mesh(config.mesh),
                          prompts=self.rows // self.group, group=self.group,
                          tokenizer=source.tokenizer, warn=lambda text: None)
        state = sampler.initial_state(params)
        sampler.compile(state.policy, state.drafter)
        self.fresh[sampler] = state._replace(speculation=sampler.find_costs(state))
        machine.give_back()
        self.maps = max(self.maps, machine.maps()[0] - held)
        return sampler

    def begin(self, cell: Cell) -> None:
        """Selects a cell: its loads and lengths, the drafter's quality, and nothing learned yet."""
        self.cell, self.loads = cell, self.all_loads[cell.context]
        for load in range(len(self.loads)) if cell.corruption is not None else ():
            if (key := (cell.context, cell.lengths, load)) not in self.recorded:
                self.recorded[key] = generated(self.run(self.plain, load), self.group)
        for sampler in (self.fixed, *self.policies.values()):
            state = self.fresh[sampler]
            if cell.corruption is not None:
                replayed = sampler.engine.replicate(replay_params(cell.corruption))
                state = state._replace(drafter=state.drafter.replace(params=replayed))
            self.states[sampler] = state

    def choosing(self, turn: int) -> int:
        """Returns a load that chooses or teaches, none of those that are timed."""
        return turn % (len(self.loads) // 2)

    def timed(self, turn: int) -> int:
        """Returns a load that is timed."""
        return len(self.loads) - 1 - self.choosing(turn)

    def run(self, sampler: Sampler, load: int) -> Result:
        """Returns a rollout of the selected cell."""
        rows = np.arange(self.rows)
        keys = prng.row_keys(self.bench.config.seed, "generate", load, rows // self.group,
                             rows * 0, rows % self.group)
        past = None if sampler == self.plain else self.recorded.get(
            (self.cell.context, self.cell.lengths, load))
        asked = make_request(self.loads[load], keys, self.group, sampler.config.rollout, past)
        asked.limit = self.cell.limits(self.new_tokens)
        policy, drafter, speculation = self.states[sampler]
        result, speculation = sampler.engine.run(
            policy.params, drafter.params, speculation, asked,
            rounds=sampler.config.rollout.rounds_per_launch)
        self.states[sampler] = self.states[sampler]._replace(speculation=speculation)
        return result

    def arms(self) -> dict[str, Run]:
        """Returns plain decoding, every fixed setting, and every policy."""
        def fixed(setting: respec.Setting, load: int) -> Result:
            names = self.fixed.engine.decoder.drafter.names
            state = self.states[self.fixed]
            self.states[self.fixed] = state._replace(speculation=state.speculation.replace(
                control=make_spec(*setting, 0, (1.0,) * len(names))))
            return self.run(self.fixed, load)

        return {"off": functools.partial(self.run, self.plain),
                **{"x".join(map(str, setting)): functools.partial(fixed, setting)
                   for setting in self.settings},
                **{name: functools.partial(self.run, s) for name, s in self.policies.items()}}


def run_cell(shape: Shape, cell: Cell, repeats: int, seconds: float,
             say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Chooses the best fixed setting, times all arms by turns, then budget against that one.

    Args:
      repeats: runs of each fixed setting to choose by, AGAIN times as many of the fastest ones,
        and of each arm to time it by; at least 2.
      seconds: of further pairs of budget and the best fixed setting.
    """
    shape.begin(cell)
    arms = shape.arms()
    fixed = {name: arm for name, arm in arms.items() if name not in shape.policies}
    chosen_by = _by_turns(fixed, shape.choosing, 0, repeats)
    for i in range(1, AGAIN):
        closest = {name: arms[name] for name in near(times(chosen_by))}
        chosen_by = _joined(chosen_by, _by_turns(closest, shape.choosing, i * repeats, repeats))
    for policy, turn in itertools.product(shape.policies, range(WARM_UPS)):
        arms[policy](shape.choosing(turn))
    shape.counter.take()
    runs, best = _by_turns(arms, shape.timed, 0, repeats, say), best_fixed(times(chosen_by))
    duel = fight(shape, best, seconds, repeats) if "budget" in arms else {}
    return {
        "cell": cell._asdict(), "best_fixed": best, "choosing": times(chosen_by),
        "seconds": times(runs), "duels": [times(duel)] if duel else [],
        "compilations": shape.counter.take(), "equal_tokens": same([*runs.values()]),
        "tokens": int(runs["off"][0].sequences.length.sum()),
        "accept_length": {name: _accept_length(of) for name, of in runs.items()},
        "explained": {name: {key: value for key, value in summary(runs[name][-1].trace).items()
                             if key not in (LAUNCHES, MEASURED)} for name in shape.policies}}


def fight(shape: Shape, best: str, seconds: float, turn: int) -> dict[str, list[Result]]:
    """Returns runs of budget and the best fixed setting by turns, until `seconds` have passed."""
    arms, began, runs = shape.arms(), time.perf_counter(), {}
    while seconds and (not runs or time.perf_counter() - began < seconds):
        runs = _joined(runs, _by_turns({name: arms[name] for name in (best, "budget")},
                                       shape.timed, turn, 2))
        turn += 2
    return runs


def _by_turns(arms: Mapping[str, Run], load: Callable[[int], int], first: int, repeats: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[Result]]:
    """Returns the runs of all arms, each repeat with the next load."""
    loads = [load(first + i) for i in range(repeats)]
    tasks = {name: functools.partial(next, map(arm, loads)) for name, arm in arms.items()}
    return alternate(tasks, repeats, say)


def _joined(runs: Results, more: Results) -> dict[str, list[Result]]:
    return {name: [*runs.get(name, ()), *more.get(name, ())] for name in {**runs, **more}}


def times(runs: Results) -> Times:
    """Returns the seconds of runs without prefill, which is the same for all."""
    return {name: [float(f"{run.seconds - run.prefill_seconds:.5g}") for run in of]
            for name, of in runs.items()}


def same(runs: Sequence[Sequence[Result]]) -> bool:
    """Returns whether all arms generated the same tokens in each repeat."""
    return all(np.array_equal(generated(one, 1), generated(other, 1))
               for others in runs for one, other in zip(runs[0], others, strict=True))


def _accept_length(runs: Sequence[Result]) -> float:
    lengths = [run.counters["committed"] / run.counters["row_rounds"] for run in runs]
    return float(f"{np.mean(lengths):.5g}")


def generated(result: Result, group: int) -> np.ndarray:
    """Returns i32[Q / M, M, T] generated tokens, -1 after the last."""
    s = result.sequences
    within = np.arange(s.tokens.shape[1])[None] < s.length[:, None]
    tokens = np.where(within, s.tokens, -1).astype(np.int32)
    return tokens.reshape(-1, group, tokens.shape[1])
