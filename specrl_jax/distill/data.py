"""What a drafter learns from: the actor's own responses, or texts, cut into batches of few shapes.

A `Corpus` lies on the host. Rollouts are stored part by part, so that a run that was stopped goes
on where it was.
"""

import dataclasses
import gzip
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.distill.update import Texts
from specrl_jax.io.data import load_examples, messages
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.transformer import Params
from specrl_jax.model.weights import Source
from specrl_jax.rl.advantage import group as group_advantages
from specrl_jax.rl.reward import ComposedReward, compose
from specrl_jax.rollout.prompts import Prompts, make_prompts, prompt_batches
from specrl_jax.rollout.sampler import Sampler

STREAM = "train"
FIELDS = ("prompt_length", "tokens", "length", "prompt_id", "sample_id", "stopped")
PART_BATCHES = 4  # a stored part of the rollouts fills the slots about that often
RESPONSE_WEIGHT = 4  # of a response's token over a question's
LENGTH_CLASSES = (1 / 3, 2 / 3, 1.0)  # quantiles; each width is compiled
WIDTH_MULTIPLE = 32  # columns of a batch, so that a shape serves many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Sequences of prompt and response; Q of them."""

    tokens: list[np.ndarray]  # i32[length]
    first: np.ndarray  # i32[Q] index of the first response token, at least 1
    reward: np.ndarray  # f32[Q]
    advantage: np.ndarray  # f32[Q]
    key: np.ndarray  # u32[Q, 2] noise that the response was drawn with

    @property
    def length(self) -> np.ndarray:
        """i32[Q] tokens of prompt and response."""
        return np.asarray([len(t) for t in self.tokens], np.int32)

    @property
    def responses(self) -> np.ndarray:
        """i32[...] all response tokens."""
        parts = [t[at:] for t, at in zip(self.tokens, self.first, strict=True)]
        return np.concatenate([np.zeros(0, np.int32), *parts])


def join(corpora: Sequence[Corpus]) -> Corpus:
    return Corpus([t for c in corpora for t in c.tokens], *(
        np.concatenate([getattr(c, name) for c in corpora])
        for name in ("first", "reward", "advantage", "key")))


# The actor's responses.


def load_prompts(config: Config, tokenizer: Tokenizer, training: int, eval_split: str,
                 held_out: int, say: Callable[[str], None]) -> tuple[Prompts, Prompts]:
    """Training prompts, maybe none, and held-out ones; no text is in both.

    Args:
      training, held_out: the first so many of config.data's split, and of `eval_split`.

    Raises:
      ConfigError: see `make_prompts`; or all training prompts are held out.
    """

    def load(**changes: Any) -> Prompts:
        data = dataclasses.replace(config.data, **changes)
        return make_prompts(dataclasses.replace(config, data=data), tokenizer, say)

    held = load(split=eval_split, examples=held_out)
    if not training:
        return Prompts([], [], []), held
    asked, out = load(examples=training), set(held.texts)
    kept = [i for i, text in enumerate(asked.texts) if text not in out]
    check(bool(kept), "eval_split", eval_split, "holds out every training prompt; choose another, "
          "such as train[90%:] with --config.data.split=train[:90%]")
    if len(kept) < len(asked.texts):
        say(f"{len(asked.texts) - len(kept)} training prompts are held out")
    return Prompts([asked.examples[i] for i in kept], [asked.texts[i] for i in kept],
                   [asked.tokens[i] for i in kept]), held


def gather(config: Config, source: Source, params: Params, prompts: tuple[Prompts, Prompts],
           samples: int, texts: str, directory: Path, say: Callable[[str], None]
           ) -> tuple[Corpus, Corpus]:
    """The sequences to learn from and those to evaluate on.

    Args:
      source, params: the actor; its parameters as published.
      prompts: of `load_prompts`.
      samples: responses to each prompt.
      texts: file to learn from as well, or "".
      directory: where rollouts are stored.
    """
    tokenizer, (asked, held) = source.tokenizer, prompts
    most = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    read = [read_texts(Path(texts), tokenizer, config.data.system, most)] if texts else []
    every = Prompts([*held.examples, *asked.examples], held.texts + asked.texts,
                    held.tokens + asked.tokens)
    sampler, at_once = _sampler(config, source, samples, len(every.tokens))
    sampler.publish(params, 0)
    rolled = roll_out(sampler, every, at_once, directory, say)
    reward = compose(config.reward.terms, config.reward.weights)
    answers = [judged(rolled, part, config.seed, reward, tokenizer)
               for part in (asked, held) if part.texts]
    return join([*answers[:-1], *read]), answers[-1]


def _sampler(config: Config, source: Source, samples: int, prompts: int) -> tuple[Sampler, int]:
    """A sampler of plain decoding's tokens, and how many prompts it takes at once: equal parts.

    Whatever spec.rule is: drafts are judged by the match rule, against the noise of these draws.
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


def roll_out(sampler: Sampler, prompts: Prompts, at_once: int, directory: Path,
             say: Callable[[str], None]) -> dict[str, np.ndarray]:
    """Samples every prompt, in parts that are stored in `directory` and not made twice.

    Args:
      sampler: for `at_once` prompts, published.

    Returns:
      FIELDS of all sequences, in canonical order within each part.
    """
    directory.mkdir(parents=True, exist_ok=True)
    asked, parts = prompt_batches(prompts, at_once), []
    paths = [directory / f"{number:05d}.npz" for number in range(len(asked))]
    if not all(path.exists() for path in paths):
        sampler.compile(say)
    for number, (part, path) in enumerate(zip(asked, paths, strict=True)):
        if not path.exists():
            rollout, result = sampler.generate(part, STREAM, 0)
            _store(path, {name: getattr(rollout, name)[rollout.occurrence == 0] for name in FIELDS})
            tokens = int(rollout.length.sum())
            say(f"rollouts {number + 1}/{len(asked)}  {tokens} tokens  "
                f"{tokens / result.seconds:.0f} tok/s")
        parts.append(_stored(path))
    return {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}


def _stored(path: Path) -> dict[str, np.ndarray]:
    """
    Raises:
      ConfigError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in FIELDS}
    except (ValueError, TypeError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile,
            zlib.error) as error:  # damage has many names
        raise ConfigError(f"{path}: {error}; the file is damaged, remove it and it is made again"
                          ) from error


def _store(path: Path, arrays: dict[str, np.ndarray]) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def judged(rolled: dict[str, np.ndarray], prompts: Prompts, seed: int, reward: ComposedReward,
           tokenizer: Tokenizer) -> Corpus:
    """The sequences of `prompts` among those rolled out, with rewards and advantages."""
    index = {prompts.examples[i]["id"]: i for i in range(len(prompts.tokens))}
    mine = np.flatnonzero(np.isin(rolled["prompt_id"], list(index)))
    ids, samples = rolled["prompt_id"][mine], rolled["sample_id"][mine]
    tokens, rewards = [], np.zeros(len(mine), np.float32)
    for n, q in enumerate(mine):
        said = rolled["tokens"][q, : rolled["length"][q]]
        at = index[int(ids[n])]
        completion = tokenizer.decode(said[: len(said) - rolled["stopped"][q]].tolist())
        rewards[n] = reward(prompts.texts[at], completion, prompts.examples[at])[0]
        tokens.append(np.concatenate([prompts.tokens[at], said]).astype(np.int32))
    return Corpus(tokens, rolled["prompt_length"][mine], rewards, _advantages(rewards, samples),
                  prng.row_keys(seed, STREAM, 0, ids, ids * 0, samples))


def _advantages(rewards: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """f32[Q] within each prompt's samples; 0 where there is one."""
    group = int(samples.max(initial=0)) + 1
    if group == 1:
        return np.zeros_like(rewards)
    return group_advantages(rewards.reshape(-1, group)).reshape(-1)


# Texts.


def read_texts(path: Path, tokenizer: Tokenizer, system: str, most: int) -> Corpus:
    """Sequences of a JSONL file, plain or gzipped, with reward 1 and advantage 0.

    An object with "question" and "answer" is a chat whose response is the answer; one with "text"
    is a response to its own first token.

    Args:
      most: tokens beyond this are cut off.

    Raises:
      ConfigError: the file cannot be read, or a line holds something else, or nothing to learn.
    """
    tokens, first = [], []
    for number, row in enumerate(_rows(path), 1):
        asked, said = _question_and_text(row, tokenizer, system)
        sequence = [*asked, *said][:most]
        check(len(sequence) > max(len(asked), 1), "texts", f"{path}:{number}",
              f"no token to learn among the first {most}; raise rollout.max_new_tokens or "
              f"drop the line")
        tokens.append(np.asarray(sequence, np.int32))
        first.append(max(len(asked), 1))
    zero = np.zeros(len(tokens), np.float32)
    return Corpus(tokens, np.asarray(first, np.int32), zero + 1, zero,
                  np.zeros((len(tokens), 2), np.uint32))


def _rows(path: Path) -> Iterator[Any]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"texts = {str(path)!r}: {error}; give a JSONL file") from error


def _question_and_text(row: Any, tokenizer: Tokenizer, system: str) -> tuple[list[int], list[int]]:
    """Token ids of what is asked and of what is said."""
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("text"), str):
        return [], tokenizer.encode(row["text"])
    if not (isinstance(row.get("question"), str) and isinstance(row.get("answer"), str)):
        raise ConfigError(f"texts: {json.dumps(row)[:60]} has neither a text nor a question and "
                          f"its answer")
    prompt = tokenizer.encode(tokenizer.chat(messages(row, system)))
    return prompt, tokenizer.encode(row["answer"]) + list(tokenizer.stop_ids[:1])


def token_counts(config: Config, source: Source, corpus: Corpus) -> np.ndarray:
    """i64[V]: how often responses have each token, and, for less, the questions of config.data.

    Answers repeat names of their questions, so the split's questions, which cost no rollout, tell
    which rare tokens a draft vocabulary needs (experiments/LOG.md).
    """
    asked = [np.zeros(0, np.int64)]
    for example in load_examples(dataclasses.replace(config.data, examples=0)):
        asked.append(np.asarray(source.tokenizer.encode(example["question"])))
    size = source.arch.vocab_size
    return (RESPONSE_WEIGHT * np.bincount(corpus.responses, minlength=size)
            + np.bincount(np.concatenate(asked), minlength=size))


# Batches.


@dataclasses.dataclass(frozen=True)
class Plan:
    """One update's sequences: rows of the corpus in n micro-batches of b."""

    rows: np.ndarray  # i64[n, b]; -1 pads
    width: int  # S
    window: int  # T, the most response tokens


def make_plans(corpus: Corpus, tokens: int, micro_tokens: int, shards: int, seed: int
               ) -> list[Plan]:
    """Cuts a corpus into plans of a few shapes: each third of the lengths has a width of its own.

    Each plan is a random part of its class; every sequence is in one.

    Args:
      tokens, micro_tokens: of an update and of a micro-batch, padding included.
      shards: b is a multiple of this.
    """
    plans = []
    for width, members in _classes(corpus.length, tokens):
        b = max(micro_tokens // width // shards, 1) * shards
        n = max(tokens // (b * width), 1)
        window = _round_up(int((corpus.length - corpus.first)[members].max()))
        words = np.random.Philox(key=np.array([seed, width], np.uint64)).random_raw(len(members))
        rows = np.full(-(-len(members) // (n * b)) * n * b, -1)
        rows[: len(members)] = members[np.argsort(words, kind="stable")]
        plans += [Plan(part, width, window) for part in rows.reshape(-1, n, b)]
    return plans


def _classes(length: np.ndarray, tokens: int) -> list[tuple[int, np.ndarray]]:
    """(width, sequences): those that fit and fill an update, others go to the next width."""
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


def texts_of(corpus: Corpus, plan: Plan, temperature: float) -> Texts:
    """The plan's sequences as host arrays [n, b, ...]; `temperature` 0 counts as 1."""
    used = plan.rows >= 0
    tokens = np.zeros((*plan.rows.shape, plan.width), np.int32)
    for at in np.argwhere(used):
        sequence = corpus.tokens[plan.rows[tuple(at)]]
        tokens[tuple(at)][: len(sequence)] = sequence

    def take(values: np.ndarray, pad: float) -> np.ndarray:
        return np.where(used, values[plan.rows], pad).astype(values.dtype)

    return Texts(tokens=tokens, length=take(corpus.length, 0), first=take(corpus.first, 1),
                 temperature=np.full(used.shape, temperature or 1.0, np.float32),
                 reward=take(corpus.reward, 0), advantage=take(corpus.advantage, 0))
