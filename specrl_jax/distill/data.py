"""Training data of a drafter: the actor's responses, or texts, cut into batches of few shapes.

A `Corpus` is on the host. Rollouts are stored part by part, so that a stopped run continues where
it was.
"""

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.data.examples import load_examples
from specrl_jax.data.prompts import Prompts, make_prompts, prompt_batches
from specrl_jax.distill import teacher
from specrl_jax.distill.teacher import SequenceBatch, in_rows
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.transformer import Params
from specrl_jax.model.weights import Source
from specrl_jax.rewards import judge
from specrl_jax.rewards.scoring import score_rollout
from specrl_jax.rl.advantage import group as group_advantages
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import RolloutInputs
from specrl_jax.runtime.paths import writing
from specrl_jax.structs import Rollout

STREAM = "train"
FIELDS = ("prompt_length", "tokens", "length", "prompt_id", "sample_id", "stopped")
PART_BATCHES = 4  # how often a stored part of the rollouts fills the slots
RESPONSE_WEIGHT = 4  # a response token counts as this many question tokens
LENGTH_CLASSES = (1 / 3, 2 / 3, 1.0)  # quantiles of length; each width is compiled
WIDTH_MULTIPLE = 32  # columns of a batch, so that a shape serves many


class PublishedActor(NamedTuple):
    """The actor whose responses a drafter learns."""

    source: Source
    params: Params  # as rollouts read them


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Q sequences of prompt and response."""

    tokens: list[np.ndarray]  # i32[length]
    first: np.ndarray  # i32[Q] index of the first response token, at least 1
    reward: np.ndarray  # f32[Q]
    advantage: np.ndarray  # f32[Q]
    key: np.ndarray  # u32[Q, 2] noise that the response was drawn with

    @property
    def length(self) -> np.ndarray:
        return np.asarray([len(t) for t in self.tokens], np.int32)

    @property
    def responses(self) -> np.ndarray:
        parts = [t[at:] for t, at in zip(self.tokens, self.first, strict=True)]
        return np.concatenate([np.zeros(0, np.int32), *parts])


def join(corpora: Sequence[Corpus]) -> Corpus:
    """Returns the sequences of all corpora as one."""
    return Corpus([t for c in corpora for t in c.tokens], *(
        np.concatenate([getattr(c, name) for c in corpora])
        for name in ("first", "reward", "advantage", "key")))


def load_prompts(config: Config, tokenizer: Tokenizer, training: int, eval_split: str,
                 held_out: int, say: Callable[[str], None]) -> tuple[Prompts, Prompts]:
    """Returns `training` prompts of config.data, maybe none, and `held_out` ones of `eval_split`.

    No text is in both. Raises a ConfigError as `make_prompts` does, or if all training prompts are
    held out.
    """
    def load(**changes: Any) -> Prompts:
        data = dataclasses.replace(config.data, **changes)
        return make_prompts(dataclasses.replace(config, data=data), tokenizer, say)

    held = load(split=eval_split, examples=held_out)
    if not training:
        return Prompts([], [], []), held
    prompts, out = load(examples=training), set(held.texts)
    kept = [i for i, text in enumerate(prompts.texts) if text not in out]
    check(bool(kept), "eval_split", eval_split, "holds out every training prompt; choose another, "
          "such as train[90%:] with --config.data.split=train[:90%]")
    if len(kept) < len(prompts.texts):
        say(f"{len(prompts.texts) - len(kept)} training prompts are held out")
    return prompts.select(kept), held


def gather(config: Config, actor: PublishedActor, prompts: tuple[Prompts, Prompts], samples: int,
           directory: Path, say: Callable[[str], None]) -> list[Corpus]:
    """Returns the sequences to learn from, if there are training prompts, and the held-out ones.

    Args:
      prompts: of `load_prompts`.
      samples: responses to each prompt.
      directory: where rollouts are stored.
    """
    tokenizer, (training, held) = actor.source.tokenizer, prompts
    every = Prompts([*held.examples, *training.examples], held.texts + training.texts,
                    held.tokens + training.tokens)
    judge.check_answers(config.reward.terms, every.examples)
    sampler, at_once = _sampler(config, actor.source, samples, len(every.tokens))
    initial = sampler.initial_state(actor.params)
    rolled = roll_out(sampler, initial, every, at_once, directory, say)
    reward = judge.of_config(config.reward, say)
    return [scored_corpus(rolled, part, config.seed, reward, tokenizer)
            for part in (training, held) if part.texts]


def _sampler(config: Config, source: Source, samples: int, prompts: int) -> tuple[Sampler, int]:
    """Returns a sampler that decodes plainly, and its prompts per call, which make equal parts.

    spec.rule becomes match whatever it is: `Evaluation.match` needs the noise of these draws.
    """
    mesh, slots = sharding.make_mesh(config.mesh), config.rollout.batch_size
    parts = -(-prompts * samples // (PART_BATCHES * slots))
    shards = sharding.shard_count(mesh)
    at_once = -(-prompts // parts // shards) * shards
    plain = dataclasses.replace(
        config, spec=dataclasses.replace(config.spec, drafter="off", rule="match"),
        rollout=dataclasses.replace(config.rollout, batch_size=min(slots, at_once * samples)))
    return Sampler(plain, source.arch, source.tokenizer.stop_ids, mesh,
                   prompts=at_once, group=samples), at_once


def roll_out(sampler: Sampler, state: RolloutInputs, prompts: Prompts, at_once: int,
             directory: Path, say: Callable[[str], None]) -> dict[str, np.ndarray]:
    """Samples every prompt in parts, which are stored in `directory` and generated only once.

    Returns FIELDS of all sequences, in canonical order within each part of `at_once` prompts.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    batches, parts = prompt_batches(prompts, at_once), []
    paths = [directory / f"{number:05d}.npz" for number in range(len(batches))]
    if not all(path.exists() for path in paths):
        sampler.compile(state.policy, state.drafter, say)
    for number, (batch, path) in enumerate(zip(batches, paths, strict=True)):
        if not path.exists():
            rollout, _, result = sampler.generate(batch, *state, STREAM, 0)
            first = rollout.occurrence == 0
            write_part(path, {name: getattr(rollout, name)[first] for name in FIELDS})
            tokens = int(rollout.length.sum())
            say(f"rollouts {number + 1}/{len(batches)}  {tokens} tokens  "
                f"{tokens / result.seconds:.0f} tok/s")
        parts.append(read_part(path))
    return {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}


def read_part(path: Path) -> dict[str, np.ndarray]:
    """Returns FIELDS of a stored part of the rollouts; raises a ConfigError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in FIELDS}
    except (ValueError, TypeError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile,
            zlib.error) as error:  # damage has many names
        raise ConfigError(f"{path}: {error}; corrupt file; delete it to regenerate"
                          ) from error


def write_part(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Stores a part of the rollouts: the whole file or none."""
    temporary = path.with_suffix(".tmp")
    try:
        with writing(path):
            with open(temporary, "wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except ConfigError:
        temporary.unlink(missing_ok=True)
        raise


def scored_corpus(rolled: dict[str, np.ndarray], prompts: Prompts, seed: int,
                  reward: judge.Judge, tokenizer: Tokenizer) -> Corpus:
    """Returns the sequences of `prompts` among FIELDS `rolled`, with rewards and advantages."""
    mine = np.isin(rolled["prompt_id"], list(prompts.index_of))
    stored = {name: values[mine] for name, values in rolled.items()}
    ids, samples = stored["prompt_id"], stored["sample_id"]
    fields: dict[str, Any] = dict.fromkeys(
        ("prompt", "logprob", "raw_logprob", "top_p_mass", "commits", "rounds", "version"))
    fields |= stored | {"birth": ids * 0, "occurrence": ids * 0}
    scored, rewards, _ = score_rollout(Rollout(**fields), prompts, tokenizer, reward)
    tokens = [np.asarray([*prompts.tokens[prompts.index_of[int(i)]], *sample["tokens"]], np.int32)
              for i, sample in zip(ids, scored, strict=True)]
    group = int(samples.max(initial=0)) + 1
    advantages = np.zeros_like(rewards) if group == 1 else group_advantages(
        rewards.reshape(-1, group)).reshape(-1)
    return Corpus(tokens, stored["prompt_length"], rewards, advantages,
                  prng.row_keys(seed, STREAM, 0, ids, ids * 0, samples))


def token_counts(config: Config, source: Source, corpus: Corpus) -> np.ndarray:
    """Returns i64[V], weighted token counts of the responses and of config.data's questions.

    Answers repeat names of their questions. The split's questions cost no rollout, so they show
    which rare tokens a draft vocabulary needs (experiments/LOG.md).
    """
    questions = [token for example in load_examples(dataclasses.replace(config.data, examples=0))
                 for token in source.tokenizer.encode(example["question"])]
    size = source.arch.vocab_size
    return (RESPONSE_WEIGHT * np.bincount(corpus.responses, minlength=size)
            + np.bincount(np.asarray(questions, np.int64), minlength=size))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sequences of one update: rows of the corpus in n micro-batches of b."""

    rows: np.ndarray  # i64[n, b]; -1 pads
    width: int  # S
    window: int  # T, the most response tokens


def make_plans(corpus: Corpus, tokens: int, micro_tokens: int, shards: int, seed: int
               ) -> list[Plan]:
    """Cuts a corpus into plans of few shapes: each third of the lengths has its own width.

    Each plan is a random part of its class; every sequence is in exactly one plan. `tokens` of an
    update and `micro_tokens` of a micro-batch include padding; b is a multiple of `shards`.
    """
    plans = []
    for width, members in _classes(corpus.length, tokens):
        b = max(micro_tokens // width // shards, 1) * shards
        n = max(tokens // (b * width), 1)
        window = _round_up(int((corpus.length - corpus.first)[members].max()))
        words = np.random.Philox(key=np.array([seed, width], np.uint64)).random_raw(len(members))
        rows = in_rows(members[np.argsort(words, kind="stable")], n * b)
        plans += [Plan(part, width, window) for part in rows.reshape(-1, n, b)]
    return plans


def _classes(length: np.ndarray, tokens: int) -> list[tuple[int, np.ndarray]]:
    """Returns (width, sequences); sequences that do not fill an update go to the next width."""
    widths = sorted({_round_up(int(np.quantile(length, q, method="higher")))
                     for q in LENGTH_CLASSES})
    classes, start = [], 0
    for width in widths:
        members = np.flatnonzero((length > start) & (length <= width))
        if width == widths[-1] or len(members) * width >= tokens:
            classes.append((width, members))
            start = width
    return classes


def _round_up(size: int) -> int:
    return -(-size // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def batch_of(corpus: Corpus, plan: Plan, temperature: float) -> SequenceBatch:
    """Returns the plan's sequences as host arrays [n, b, ...]."""
    return teacher.batch_of(
        plan.rows, corpus.tokens.__getitem__, plan.width, temperature, length=corpus.length,
        first=corpus.first, reward=corpus.reward, advantage=corpus.advantage)
