"""The cells that controllers are compared on: models, prompts, lengths, and engines' configs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from compile.traces import heavy_limits

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.data.chats import messages
from specrl_jax.data.examples import Example
from specrl_jax.data.prompts import make_prompts
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import Actor
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.weights import Source

STOP = "stop"
REPLAY = "studies.replay:perfect"
DEPTH = 4
CONTEXTS = (64, 1024)  # of replayed streams; one engine holds both, as a run's holds any prompt
VERSION = 2  # of what cells are
SMALL_MODEL = Architecture(vocab_size=8192, hidden_size=768, intermediate_size=2048, num_layers=4,
                           num_heads=12, num_kv_heads=4, head_dim=64, max_position=4096)
SMALL_TOKENS = {1: 192, 4: 96, 16: 48, 64: 24}  # of a uniform row, by rows
SMOLLM2_TOKENS = {1: 96, 4: 96, 16: 64, 64: 128}  # half of what a row of another length may have
STOPPED_TOKENS = 256  # half of what a row may have that ends at a stop token
LOADS = {"small": 8, "smollm2": 32}  # other noise, and prompts where there are as many
Sizes = tuple[int, tuple[int, ...], bool]
"""What cells with the same engines share: rows, contexts, whether rows end at stop tokens."""


class Cell(NamedTuple):
    """`corruption` is that of replayed streams; None drafts with config.spec.drafter. `lengths`
    are uniform, heavy (tailed), or STOP: rows end at stop tokens."""

    rows: int
    context: int
    corruption: float | None
    lengths: str

    @property
    def name(self) -> str:
        drafter = "own" if self.corruption is None else f"{self.corruption:g}"
        return f"{self.rows}x{self.context}-{drafter}-{self.lengths}"

    @property
    def sizes(self) -> Sizes:
        contexts = (self.context,) if self.corruption is None else CONTEXTS
        return self.rows, contexts, self.lengths == STOP

    def limits(self, new_tokens: int) -> np.ndarray:
        """i32[rows], at most twice the tokens of a uniform row."""
        if self.lengths == "heavy":
            return heavy_limits(self.rows, 2 * new_tokens)
        return np.full(self.rows, new_tokens * (1 if self.lengths == "uniform" else 2), np.int32)


LENGTHS = ("uniform", "heavy")
CELLS = {
    "small": tuple(Cell(rows, context, corruption, lengths)
                   for rows in (1, 4, 16, 64) for context in CONTEXTS
                   for corruption in (0.0, 0.4, 1.0) for lengths in LENGTHS),
    "smollm2": (*(Cell(rows, 64, None, lengths) for rows in (1, 4, 16) for lengths in LENGTHS),
                Cell(4, 512, None, "heavy"), Cell(64, 64, None, "heavy"),
                Cell(64, 64, None, STOP))}


def pick(preset: str, names: Sequence[str]) -> dict[Sizes, list[Cell]]:
    """Returns the cells of these names, all where none is given, by what they share.

    Raises:
      ConfigError: there is no such cell.
    """
    known, cells = {cell.name: cell for cell in CELLS[preset]}, {}
    for name in names or known:
        if name not in known:
            raise ConfigError(f"--cells={name}: choose of {', '.join(known)}")
        cells.setdefault(known[name].sizes, []).append(known[name])
    return cells


class Bench(NamedTuple):
    """A model, its drafter, and its prompts: `prompts(n)` yields those of at least n tokens, and
    None stands for synthetic ones."""

    config: Config
    source: Source
    params: Any
    stop: Sequence[int]
    drafter: str
    prompts: Callable[[int], Iterator[list[int]]] | None

    def new_tokens(self, rows: int, stops: bool) -> int:
        """Tokens of a uniform row."""
        if stops:
            return STOPPED_TOKENS
        return (SMALL_TOKENS if self.prompts is None else SMOLLM2_TOKENS)[rows]

    def loads(self, rows: int, context: int) -> list[list[list[int]]]:
        """Token ids of all rows, load by load: one prompt for all, or real ones, cut to the last
        2 * `context` tokens.

        Raises:
          ConfigError: there are too few.
        """
        if self.prompts is None:
            return [[[(7 * i) % 256 for i in range(context)]] * rows] * LOADS["small"]
        some = itertools.islice(self.prompts(context // 2), LOADS["smollm2"] * rows)
        tails = [prompt[-2 * context:] for prompt in some]
        loads = [tails[i:i + rows] for i in range(0, len(tails) - rows + 1, rows)]
        if len(loads) < 2:
            raise ConfigError(
                f"data.split = {self.config.data.split!r}, data.examples = "
                f"{self.config.data.examples}: {len(tails)} prompts are too few for two "
                f"rollouts of {rows} rows and context {context}; take a larger split, or all of "
                f"its examples with --config.data.examples=0")
        return loads


def small(config: Config) -> Bench:
    """Returns random weights that replay recorded streams; sizes are fixed."""
    source = Source(SMALL_MODEL, byte_tokenizer(), random_tensors(SMALL_MODEL, 0), "random")
    rollout = dataclasses.replace(config.rollout, temperature=1.0, top_k=0, top_p=1.0)
    return Bench(dataclasses.replace(config, rollout=rollout), source,
                 jax.device_put(source.params()), (), REPLAY, None)


def real(config: Config, actor: Actor, say: Callable[[str], None]) -> Bench:
    """Returns config.model on config.data, drafting with config.spec.drafter."""
    tokenizer = actor.source.tokenizer
    examples = make_prompts(config, tokenizer, say).examples
    return Bench(config, actor.source, actor.params(sharding.make_mesh(config.mesh)),
                 tokenizer.stop_ids, config.spec.drafter,
                 lambda least: long_prompts(tokenizer, examples, config.data.system, least))


def long_prompts(tokenizer: Tokenizer, examples: Sequence[Example], system: str, least: int
                 ) -> Iterator[list[int]]:
    """Yields tokens of prompts that have at least `least` of them, with as many other questions in
    the system message as that needs; no question is in two prompts.

    As turns without answers, arithmetic questions had the actor end its rows after 4 tokens, and
    with their solutions after some 30, where a cell's rows need up to 57.
    """
    others: list[str] = []
    for example in examples:
        before = [*([system] if system else []), "Problems of other people:", *others]
        asked = messages(example, "\n".join(before) if others else system)
        prompt = tokenizer.encode(tokenizer.chat(asked))
        if len(prompt) < least:
            others.append(example["question"])
        else:
            yield prompt
            others = []


def shaped(bench: Bench, sizes: Sizes, longest: int, group: int, drafter: str, policy: str
           ) -> Config:
    """Returns the config of an engine whose prompts have at most `longest` tokens.

    Where rows end at their limits, they weigh alike, because weights would know the future; where
    they end at stop tokens, weights and the smallest batch are those of the config.
    """
    config, (rows, _, stops) = bench.config, sizes
    least = min(config.rollout.min_batch, rows) if stops else max(min(4, rows), rows // 4)
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, max_prompt_tokens=max(2, longest), min_batch=least,
        max_new_tokens=2 * bench.new_tokens(rows, stops))
    branch = 1 if bench.drafter == REPLAY else config.spec.max_branch
    spec = dataclasses.replace(
        config.spec, drafter=drafter, history_past=group, max_depth=DEPTH, max_branch=branch,
        max_nodes=1 + DEPTH * branch, depth=1, branch=1, nodes=2, budget=0,
        max_packed=max(2 * rows, min(rows * (1 + DEPTH * branch), 64)))
    control = dataclasses.replace(config.control, policy=policy, min_survival=0.0,
                                  length_weight=config.control.length_weight if stops else 0.0)
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)
