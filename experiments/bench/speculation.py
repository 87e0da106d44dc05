"""Speculation at fixed settings against plain decoding of the same engine, on real prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.control.policies import make_spec
from specrl_jax.host.compilation import CompilationCounter
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import request
from specrl_jax.sampler import Sampler

from .timing import alternate, ratio, spread

STEP = 1  # of the noise keys; 0 makes the responses that history may draft from


class Cell(NamedTuple):
    """The paper's (s, t, n): draft depth, alternatives of a node, nodes a row with its root."""

    steps: int
    branch: int
    nodes: int

    @property
    def name(self) -> str:
        return "x".join(map(str, self))


def parse(text: str) -> Cell:
    """`4x2x8` -> Cell(4, 2, 8).

    Raises:
      ConfigError: it is no such text.
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--setting={text}: give depth x branch x nodes, such as 4x1x5")
    return Cell(*map(int, parts))


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed rollout."""

    seconds: float
    result: Result
    compilations: int

    @property
    def tokens(self) -> int:
        return int(self.result.sequences.length.sum())

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Arm:
    """One drafter's engine at one batch size; its settings are data.

    Args:
      config: its rollout section holds temperature and max_new_tokens.
      prompts: token ids, one sequence each.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 prompts: Sequence[Sequence[int]], drafter: str, cells: Sequence[Cell],
                 counter: CompilationCounter) -> None:
        self.config = arm_config(config, prompts, drafter, cells)
        self.prompts, self.counter = prompts, counter
        stop = source.tokenizer.stop_ids
        self.sampler = Sampler(self.config, source.arch, stop, sharding.make_mesh(config.mesh),
                               prompts=len(prompts), group=1, tokenizer=source.tokenizer)
        self.sampler.publish(params, 0)
        self.past: np.ndarray | None = None

    def warm_up(self) -> None:
        """Compiles, makes the responses that history drafts from, and calibrates acceptance."""
        self.sampler.compile()
        said = self.run(None, step=0).result.sequences
        if self.sampler.engine.layout.past:
            within = np.arange(said.tokens.shape[1])[None] < said.length[:, None]
            self.past = np.where(within, said.tokens, -1).astype(np.int32)[:, None]

    def run(self, cell: Cell | None, step: int = STEP) -> Run:
        """One rollout at a setting; None is without a draft."""
        engine = self.sampler.engine
        if self.config.spec.drafter != "off":
            engine.control = make_spec(*(cell or (0, 1, 1)), 0,
                                       (1.0,) * len(engine.machine.drafter.names))
        rows = np.arange(len(self.prompts))
        keys = prng.row_keys(self.config.seed, "generate", step, rows, rows * 0, rows * 0)
        asked = request(self.prompts, keys, 1, self.config.rollout, self.past)
        self.counter.take()
        result = engine.run(self.sampler.params, asked, self.sampler.drafter_params,
                            rounds=self.config.rollout.rounds_per_launch)
        return Run(result.seconds, result, self.counter.take())


def arm_config(config: Config, prompts: Sequence[Sequence[int]], drafter: str,
               cells: Sequence[Cell]) -> Config:
    """`config` with shapes that hold the prompts and all settings."""
    rows = len(prompts)
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=rows, rounds_per_launch=512,
        max_prompt_tokens=max(2, max(map(len, prompts))))
    steps, branch = max(c.steps for c in cells), max(c.branch for c in cells)
    nodes = max(1 + steps * branch if drafter in ("history", "merge") else 2,
                *(c.nodes for c in cells))
    spec = dataclasses.replace(
        config.spec, drafter=drafter, history_past=1, max_steps=steps, max_branch=branch,
        max_nodes=nodes, max_packed=max(rows * max(c.nodes for c in cells), rows + 1),
        steps=1, branch=1, nodes=2, budget=0)
    control = dataclasses.replace(config.control, policy="fixed")
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)


def run_case(config: Config, source: Source, params: Any, prompts: Sequence[Sequence[int]],
             drafters: Sequence[str], cells: Sequence[Cell], repeats: int,
             counter: CompilationCounter) -> dict[str, Any]:
    """All drafters at all settings and plain decoding, timed alternately."""
    check(len(prompts) > 0, "prompts", 0, "there is nothing to generate")
    arms = {name: Arm(config, source, params, prompts, name, cells, counter)
            for name in ("off", *drafters)}
    for arm in arms.values():
        arm.warm_up()
    tasks = {"off": lambda: arms["off"].run(None)}
    for name in drafters:
        tasks[f"{name} 0"] = lambda arm=arms[name]: arm.run(None)
        tasks |= {f"{name} {cell.name}": lambda arm=arms[name], cell=cell: arm.run(cell)
                  for cell in cells}
    found = alternate(tasks, repeats)
    plain = found["off"]
    return {"rows": len(prompts), "tokens": plain[-1].tokens,
            "arms": {name: describe(runs, plain) for name, runs in found.items()}}


def describe(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Speed, its ratio to plain decoding pair by pair, accept length, and whose drafts counted."""
    result, counters = runs[-1].result, runs[-1].result.counters
    same = np.asarray(result.sequences.tokens) == np.asarray(plain[-1].result.sequences.tokens)
    return {
        "tokens_per_second": spread([run.speed for run in runs]),
        "speedup": ratio([run.speed for run in runs], [run.speed for run in plain]),
        "accept_length": counters["committed"] / max(counters["row_rounds"], 1),
        "drafted_a_row": counters["drafted"] / max(counters["row_rounds"], 1),
        "round_seconds": spread([sum(launch["seconds"] for launch in run.result.trace)
                                 / run.result.counters["rounds"] for run in runs]),
        "by_drafter": result.by_drafter, "calibration_error": result.calibration[2],
        "equal_tokens": bool(same.all()), "compilations": sum(run.compilations for run in runs)}
