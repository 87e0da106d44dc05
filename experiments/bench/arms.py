"""Speculation at fixed settings and under policies against plain decoding, on real prompts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.control.protocol import make_spec
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import make_request
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.compilation import CompilationCounter

from .timing import alternate, ratio, spread

TIMED, WARM_UP, EARLIER = 0, 1, 2  # steps of the noise keys; from EARLIER on, earlier responses
TRIALS = 4  # rollouts from which a policy learns before it is timed


class Cell(NamedTuple):
    """The paper's (s, t, n): draft depth, children per node, nodes per row with the root."""

    steps: int
    branch: int
    nodes: int

    @property
    def name(self) -> str:
        return "x".join(map(str, self))


def parse(text: str) -> Cell:
    """Returns Cell(4, 2, 8) for `4x2x8`.

    Raises:
      ConfigError: the text has another form.
    """
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdigit() and int(number) for number in numbers):
        raise ConfigError(f"--setting={text}: give depth x branch x nodes, such as 4x1x5")
    return Cell(*map(int, numbers))


class Run(NamedTuple):
    """One rollout of all prompts."""

    result: Result
    compilations: int

    @property
    def tokens(self) -> int:
        return int(self.result.sequences.length.sum())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.result.seconds

    @property
    def round_seconds(self) -> float:
        """Seconds of a round in the compiled loops, without prefill and host."""
        return sum(launch.seconds for launch in self.result.trace) / self.result.counters["rounds"]

    @property
    def responses(self) -> np.ndarray:
        """i32[prompts, T], padded with -1."""
        made = self.result.sequences
        within = np.arange(made.tokens.shape[1])[None] < made.length[:, None]
        return np.where(within, made.tokens, -1).astype(np.int32)


class Arm:
    """The engine of one drafter at one batch size. Changing the setting compiles nothing.

    Args:
      config: its rollout section sets temperature and max_new_tokens.
      params: float32, in the layout of Actor.params.
      prompts: token ids, one sequence each; those beyond `rows` wait for a slot.
      policy: fixed, where each run names its setting, or a policy that chooses.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 prompts: Sequence[Sequence[int]], rows: int, drafter: str, cells: Sequence[Cell],
                 counter: CompilationCounter, policy: str = "fixed") -> None:
        self.config = arm_config(config, prompts, rows, drafter, cells, policy)
        self.prompts, self.counter = prompts, counter
        self.sampler = Sampler(self.config, source.arch, source.tokenizer.stop_ids,
                               sharding.make_mesh(config.mesh), prompts=len(prompts), group=1,
                               tokenizer=source.tokenizer)
        self.state = self.sampler.initial_state(params)
        self.past: np.ndarray | None = None  # i32[prompts, K, T], where the drafter reads it

    @property
    def remembers(self) -> bool:
        """Whether the drafter reads earlier responses."""
        return bool(self.sampler.engine.layout.past)

    def compile(self) -> None:
        """Compiles all programs, and measures what rounds cost."""
        self.sampler.compile(self.state.policy, self.state.drafter)
        self.state = self.state._replace(speculation=self.sampler.find_costs(self.state))

    def earlier(self, count: int) -> np.ndarray:
        """Returns other plain responses to the same prompts, i32[Q, count, T], padded with -1."""
        return np.stack([self.run(None, EARLIER + i).responses for i in range(count)], 1)

    def warm_up(self, widest: Cell, past: np.ndarray | None) -> None:
        """Compiles, and calibrates acceptance estimates with rollouts that are not timed."""
        self.compile()
        if self.remembers:
            self.past = past
        for _ in range(1 if self.config.control.policy == "fixed" else TRIALS):
            self.run(widest, WARM_UP)

    def run(self, cell: Cell | None, step: int = TIMED) -> Run:
        """Returns a timed rollout at a setting; None drafts nothing or leaves it to the policy."""
        engine, (policy, drafter, speculation) = self.sampler.engine, self.state
        if self.config.spec.drafter != "off" and self.config.control.policy == "fixed":
            names = engine.decoder.drafter.names
            speculation = speculation.replace(
                control=make_spec(*(cell or (0, 1, 1)), 0, (1.0,) * len(names)))
        index = np.arange(len(self.prompts))
        keys = prng.row_keys(self.config.seed, "generate", step, index, index * 0, index * 0)
        batch = make_request(self.prompts, keys, 1, self.config.rollout, self.past)
        self.counter.take()
        result, speculation = engine.run(policy.params, drafter.params, speculation, batch,
                                         rounds=self.config.rollout.rounds_per_launch)
        self.state = self.state._replace(speculation=speculation)
        return Run(result, self.counter.take())


def arm_config(config: Config, prompts: Sequence[Sequence[int]], rows: int, drafter: str,
               cells: Sequence[Cell], policy: str) -> Config:
    """Returns `config` with shapes that hold the prompts and all settings."""
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=rows, rounds_per_launch=512,
        max_prompt_tokens=max(2, max(map(len, prompts))))
    steps, branch = max(c.steps for c in cells), max(c.branch for c in cells)
    nodes = max(1 + steps * branch if drafter in ("history", "merge") else 2,
                *(c.nodes for c in cells))
    spec = dataclasses.replace(
        config.spec, drafter=drafter, max_depth=steps, max_branch=branch,
        max_nodes=nodes, max_packed=max(rows * max(c.nodes for c in cells), rows + 1),
        depth=1, branch=1, nodes=2, budget=0)
    control = dataclasses.replace(config.control, policy=policy,
                                  settings=tuple(cell.name for cell in cells))
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)


def run_case(config: Config, source: Source, params: Any, prompts: Sequence[Sequence[int]],
             rows: int, drafters: Sequence[str], cells: Sequence[Cell], repeats: int,
             counter: CompilationCounter, policies: Sequence[str] = (),
             say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Times all drafters at all settings and under all policies alternately in `rows` slots.

    Returns:
      The case of the result file: each arm against plain decoding.
    """
    check(len(prompts) > 0, "prompts", 0, "there is nothing to generate")
    arms = {name: Arm(config, source, params, prompts, rows, name, cells, counter)
            for name in ("off", *drafters)}
    arms |= {f"{name} {policy}": Arm(config, source, params, prompts, rows, name, cells, counter,
                                     policy) for name in drafters for policy in policies}
    arms["off"].compile()
    remembering = [a for a in arms.values() if a.remembers]
    past = arms["off"].earlier(config.spec.history_past) if remembering else None
    for name, arm in list(arms.items())[1:]:
        say(f"preparing {name}")
        arm.warm_up(max(cells, key=lambda cell: cell.nodes), past)
    tasks = {"off": lambda: arms["off"].run(None)}
    for name in drafters:
        tasks[switched_off(name)] = functools.partial(arms[name].run, None)
        tasks |= {f"{name} {cell.name}": functools.partial(arms[name].run, cell) for cell in cells}
        tasks |= {f"{name} {policy}": functools.partial(arms[f"{name} {policy}"].run, None)
                  for policy in policies}
    say(f"timing {', '.join(tasks)}")
    seconds = alternate(tasks, repeats, say)
    plain = seconds["off"]
    described = {name: describe(runs, plain) for name, runs in seconds.items()}
    compared = plain[-1].tokens * (len(described) - 1)
    flips = sum(arm["flips"] for arm in described.values())
    return {"rows": rows, "prompts": len(prompts), "tokens": plain[-1].tokens,
            "flips_per_million_tokens": 1e6 * flips / compared, "tokens_compared": compared,
            "arms": described}


def switched_off(drafter: str) -> str:
    """Returns the name of the arm whose drafter is loaded and drafts nothing."""
    return f"{drafter} 0"


def describe(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Returns speed, its ratio to plain decoding pair by pair, accept length and drafters' counts.

    `flips` counts sequences that differ from plain decoding, which only near ties may.
    """
    result, counters = runs[-1].result, runs[-1].result.counters
    speed, plain_speed = ([run.tokens_per_second for run in each] for each in (runs, plain))
    same = np.asarray(result.sequences.tokens) == np.asarray(plain[-1].result.sequences.tokens)
    return {
        "tokens_per_second": spread(speed), "speedup": ratio(speed, plain_speed),
        "accept_length": counters["committed"] / max(counters["row_rounds"], 1),
        "drafted_a_row": counters["drafted"] / max(counters["row_rounds"], 1),
        "round_seconds": spread([run.round_seconds for run in runs]),
        "by_drafter": result.by_drafter, "calibration_error": result.calibration.error,
        "equal_tokens": bool(same.all()), "flips": int((~same).any(1).sum()),
        "compilations": sum(run.compilations for run in runs)}
