"""Speculation at fixed settings against plain decoding of the same engine, on real prompts."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.control.protocol import make_spec
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import request
from specrl_jax.rollout.sampler import Sampler

from . import parts
from .timing import alternate, ratio, seconds_of, spread

PART_REPEATS = 9
TRIALS = 4  # rollouts from which a policy learns before it is timed
STEP = 0  # of the noise keys of what is timed
CALIBRATING = 1  # and of what calibrates
EARLIER = 2  # the first of the responses that history may draft from


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

    @property
    def rounds(self) -> int:
        return self.result.counters["rounds"]

    @property
    def round_seconds(self) -> float:
        """Of the compiled loops alone."""
        return sum(launch.seconds for launch in self.result.trace) / self.rounds

    @property
    def host_seconds(self) -> float:
        """The host's share of a round; prefill is nobody's."""
        return (self.seconds - self.result.prefill_seconds) / self.rounds - self.round_seconds


class Arm:
    """One drafter's engine at one batch size; its settings are data.

    Args:
      config: its rollout section holds temperature and max_new_tokens.
      prompts: token ids, one sequence each; as many as `rows` or more, which then wait for a slot.
      policy: fixed, whose setting each run names, or one that chooses for itself.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 prompts: Sequence[Sequence[int]], rows: int, drafter: str, cells: Sequence[Cell],
                 counter: CompilationCounter, policy: str = "fixed") -> None:
        self.config = arm_config(config, prompts, rows, drafter, cells, policy)
        self.prompts, self.rows, self.counter = prompts, rows, counter
        stop = source.tokenizer.stop_ids
        self.sampler = Sampler(self.config, source.arch, stop, sharding.make_mesh(config.mesh),
                               prompts=len(prompts), group=1, tokenizer=source.tokenizer)
        self.sampler.publish(params, 0)
        self.past: np.ndarray | None = None

    def earlier(self, count: int) -> np.ndarray:
        """Other responses to the same prompts, without a draft: i32[Q, count, T], -1 fills."""
        found = []
        for step in range(EARLIER, EARLIER + count):
            said = self.run(None, step).result.sequences
            within = np.arange(said.tokens.shape[1])[None] < said.length[:, None]
            found.append(np.where(within, said.tokens, -1).astype(np.int32))
        return np.stack(found, 1)

    def warm_up(self, widest: Cell, past: np.ndarray | None) -> None:
        """Compiles, and calibrates the estimates of survival by one rollout that is not timed."""
        self.sampler.compile()
        if self.sampler.engine.layout.past:
            self.past = past
        for _ in range(1 if self.config.control.policy == "fixed" else TRIALS):
            self.run(widest, CALIBRATING)

    def run(self, cell: Cell | None, step: int = STEP) -> Run:
        """One rollout at a setting; None is without a draft, or what the policy chooses."""
        engine = self.sampler.engine
        if self.config.spec.drafter != "off" and self.config.control.policy == "fixed":
            engine.control = make_spec(*(cell or (0, 1, 1)), 0,
                                       (1.0,) * len(engine.decoder.drafter.names))
        index = np.arange(len(self.prompts))
        keys = prng.row_keys(self.config.seed, "generate", step, index, index * 0, index * 0)
        asked = request(self.prompts, keys, 1, self.config.rollout, self.past)
        self.counter.take()
        result = engine.run(self.sampler.params, asked, self.sampler.drafter_params,
                            rounds=self.config.rollout.rounds_per_launch)
        return Run(result.seconds, result, self.counter.take())


def arm_config(config: Config, prompts: Sequence[Sequence[int]], rows: int, drafter: str,
               cells: Sequence[Cell], policy: str) -> Config:
    """`config` with shapes that hold the prompts and all settings."""
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, min_batch=rows, rounds_per_launch=512,
        max_prompt_tokens=max(2, max(map(len, prompts))))
    steps, branch = max(c.steps for c in cells), max(c.branch for c in cells)
    nodes = max(1 + steps * branch if drafter in ("history", "merge") else 2,
                *(c.nodes for c in cells))
    spec = dataclasses.replace(
        config.spec, drafter=drafter, max_steps=steps, max_branch=branch,
        max_nodes=nodes, max_packed=max(rows * max(c.nodes for c in cells), rows + 1),
        steps=1, branch=1, nodes=2, budget=0)
    control = dataclasses.replace(config.control, policy=policy,
                                  settings=tuple(cell.name for cell in cells))
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)


def run_case(config: Config, source: Source, params: Any, prompts: Sequence[Sequence[int]],
             rows: int, drafters: Sequence[str], cells: Sequence[Cell], repeats: int,
             counter: CompilationCounter, policies: Sequence[str] = (),
             say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All drafters at all settings and under all policies, and plain decoding, timed alternately
    in `rows` slots.

    Each setting is also run once with roots alone verified: what such a round takes more than one
    that drafts nothing is what drafting takes.
    """
    check(len(prompts) > 0, "prompts", 0, "there is nothing to generate")
    arms = {name: Arm(config, source, params, prompts, rows, name, cells, counter)
            for name in ("off", *drafters)}
    arms |= {f"{name} {policy}": Arm(config, source, params, prompts, rows, name, cells, counter,
                                     policy) for name in drafters for policy in policies}
    arms["off"].sampler.compile()
    remembering = [a for a in arms.values() if a.sampler.engine.layout.past]
    past = arms["off"].earlier(config.spec.history_past) if remembering else None
    for name, arm in list(arms.items())[1:]:
        say(f"preparing {name}")
        arm.warm_up(max(cells, key=lambda cell: cell.nodes), past)
    tasks = {"off": lambda: arms["off"].run(None)}
    roots = {}  # of each setting: drafted, but roots alone verified
    for name in drafters:
        arm = arms[name]
        tasks[nothing(name)] = roots[nothing(name)] = functools.partial(arm.run, None)
        for cell in cells:
            tasks[f"{name} {cell.name}"] = functools.partial(arm.run, cell)
            roots[f"{name} {cell.name}"] = functools.partial(arm.run, cell._replace(nodes=1))
        tasks |= {f"{name} {policy}": functools.partial(arms[f"{name} {policy}"].run, None)
                  for policy in policies}
    say(f"timing {', '.join(tasks)}")
    found, drafted = alternate(tasks, repeats, say), alternate(roots, 1)
    plain = found["off"]
    told = {name: describe(runs, plain) for name, runs in found.items()}
    for name in drafters:
        for cell in cells:
            key = f"{name} {cell.name}"
            draft = drafted[key][0].round_seconds - drafted[nothing(name)][0].round_seconds
            told[key]["parts"] = parts_of(arms[name], found[key], draft, cell.steps)
    compared = plain[-1].tokens * (len(told) - 1)
    flips = sum(arm["flips"] for arm in told.values())
    return {"rows": rows, "prompts": len(prompts), "tokens": plain[-1].tokens,
            "flips_per_million_tokens": 1e6 * flips / compared, "tokens_compared": compared,
            "arms": told}


def nothing(drafter: str) -> str:
    """The arm of a drafter that is switched off."""
    return f"{drafter} 0"


def parts_of(arm: Arm, runs: Sequence[Run], draft: float, steps: int) -> dict[str, Any]:
    """Seconds of the parts of a round, and their shares of a round and the host together.

    `draft` is taken from whole rounds. `noise` and `commit` are timed apart: noise for all that was
    packed, and for the tokens that a network drafts from, once for each row and step, which is not
    counted as draft. `verify` is the rest: forward, head, the draw without its noise, bookkeeping.
    """
    engine, result = arm.sampler.engine, runs[-1].result
    rows, counters = arm.rows, result.counters
    packed = round(counters["packed"] * rows / counters["slots"])
    tasks = {"noise": parts.noise_part(engine.decoder.arch.vocab_size, packed),
             "drafts' noise": parts.noise_part(drafted_vocab(arm.sampler), rows * steps),
             "commit": parts.commit_part(engine.decoder, situation(arm, result),
                                         arm.sampler.params)}
    timed = {name: (lambda part=part: seconds_of(part, jax.block_until_ready))
             for name, part in tasks.items()}
    alternate(timed, 1)  # compiles
    found = alternate(timed, PART_REPEATS)
    of_drafts = found.pop("drafts' noise")
    found["noise"] = [a + b for a, b in zip(found["noise"], of_drafts, strict=True)]
    found["draft"] = [draft - statistics.median(of_drafts)]
    found["host"] = [run.host_seconds for run in runs]
    seconds = {name: spread(values) for name, values in found.items()}
    median = {name: one["median"] for name, one in seconds.items()}
    total = statistics.median(run.round_seconds + run.host_seconds for run in runs)
    median["verify"] = total - sum(median.values())
    return {"seconds": seconds, "share": {name: value / total for name, value in median.items()}}


def drafted_vocab(sampler: Sampler) -> int:
    """Tokens whose scores drafters perturb, of all networks that draft."""
    head, decoder = sampler.drafting.head, sampler.engine.decoder
    small = decoder.arch.vocab_size if "small_lm" in decoder.drafter.names else 0
    return small + (head.draft_vocab if head else 0)


def situation(arm: Arm, result: Result) -> parts.Situation:
    """The middle of a rollout."""
    shapes, rows = arm.sampler.engine.shapes, arm.rows
    said = result.sequences.length
    prompt = np.zeros((rows, shapes.prompt), np.int32)
    context = [len(tokens) - 1 + said[i] // 2 for i, tokens in enumerate(arm.prompts[:rows])]
    counters = result.counters
    return parts.Situation(
        rows=rows, packed=counters["packed"] * rows / counters["slots"],
        context=np.asarray(context, np.int32), prompt=prompt,
        past=np.zeros((rows, 0, shapes.response), np.int32), segments=shapes.segments,
        count=round(counters["committed"] / max(counters["row_rounds"], 1)))


def describe(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Speed, its ratio to plain decoding pair by pair, accept length, and whose drafts counted.

    `flips` are sequences that differ: near ties, unless something is wrong.
    """
    result, counters = runs[-1].result, runs[-1].result.counters
    same = np.asarray(result.sequences.tokens) == np.asarray(plain[-1].result.sequences.tokens)
    return {
        "tokens_per_second": spread([run.speed for run in runs]),
        "speedup": ratio([run.speed for run in runs], [run.speed for run in plain]),
        "accept_length": counters["committed"] / max(counters["row_rounds"], 1),
        "drafted_a_row": counters["drafted"] / max(counters["row_rounds"], 1),
        "round_seconds": spread([run.round_seconds for run in runs]),
        "by_drafter": result.by_drafter, "calibration_error": result.calibration.error,
        "equal_tokens": bool(same.all()), "flips": int((~same).any(1).sum()),
        "compilations": sum(run.compilations for run in runs)}
