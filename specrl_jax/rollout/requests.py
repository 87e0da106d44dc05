"""Rollouts as requests to an engine, and what the engine generates as rollouts again.

A rollout may have fewer groups than the engine has places, and its sequences may have tokens
already. Host functions.
"""

from typing import Any

import jax
import numpy as np

from specrl_jax.config import RolloutConfig
from specrl_jax.data.prompts import PromptBatch
from specrl_jax.rollout.layout import RolloutRequest, Shapes, blank_sequences, make_request, pad
from specrl_jax.structs import Records, Rollout, Sequences, carrier

GENERATED = ("tokens", "logprob", "raw_logprob", "top_p_mass", "commits", "length", "rounds")
"""Fields that Rollout and Sequences share."""


def begin(batch: PromptBatch, step: int, shapes: Shapes) -> Rollout:
    """Returns `shapes.group` sequences without a token for each prompt, in canonical order.

    Args:
      step: in which they begin.
    """
    group, order = shapes.group, np.lexsort((batch.occurrence, batch.prompt_id))
    tokens, length = pad([batch.prompts[i] for i in order], shapes.prompt)
    ids, occurrence = (np.repeat(a[order], group).astype(np.int32)
                       for a in (batch.prompt_id, batch.occurrence))
    blank = blank_sequences(len(ids), shapes.response)
    return carrier(
        Rollout, prompt=np.repeat(tokens, group, 0), prompt_length=np.repeat(length, group),
        prompt_id=ids, birth=np.full_like(ids, step), occurrence=occurrence,
        sample_id=np.tile(np.arange(group, dtype=np.int32), len(order)), stopped=blank.done,
        version=blank.tokens, **{name: getattr(blank, name) for name in GENERATED})


def finished(rollout: Rollout) -> np.ndarray:
    """Returns which sequences get no more tokens, bool[Q]."""
    return np.asarray(rollout.stopped | (rollout.length >= rollout.tokens.shape[1]))


def places(unfinished: np.ndarray, count: int, shards: int) -> np.ndarray:
    """Returns the group that has each of an engine's places, i64[count]; -1 leaves one empty.

    Groups with work, bool[groups], are spread evenly over the shards, in order; then the others.
    """
    runs = np.array_split(np.flatnonzero(unfinished), shards)
    rest = iter([*np.flatnonzero(~unfinished), *[-1] * (count - len(unfinished))])
    return np.concatenate([[*run, *(next(rest) for _ in range(count // shards - len(run)))]
                           for run in runs]).astype(np.int64)


def request_of(rollout: Rollout, at: np.ndarray, keys: np.ndarray, limit: np.ndarray,
               config: RolloutConfig, past: np.ndarray | None) -> RolloutRequest:
    """Returns the request for the sequences i64[Q] at the indices `at`; -1 is none.

    Args:
      keys: u32[Q, 2].
      limit: i32[sequences] most tokens of each, those that it has already included.
      past: i32[groups, K, T] earlier responses.
    """
    group = int(rollout.sample_id.max()) + 1
    real, first = at >= 0, at[::group]
    prompts = [rollout.prompt[i, :rollout.prompt_length[i]].tolist() if i >= 0 else [0]
               for i in first]
    earlier = None if past is None else np.where(
        (first >= 0)[:, None, None], past[first // group], -1)
    request = make_request(prompts, keys, group, config, earlier)
    length = np.where(real, rollout.length[at], 0).astype(np.int32)
    request.limit = np.where(real, np.minimum(request.limit, limit[at]), 0).astype(np.int32)
    if length.any():
        fields = {name: getattr(rollout, name)[at] for name in GENERATED}
        request.begun = carrier(Sequences, **fields | {"length": length}, done=request.limit == 0)
    return request


def extended(rollout: Rollout, at: np.ndarray, sequences: Sequences, version: int,
             stop: np.ndarray) -> Rollout:
    """Returns the rollout with what an engine generated of the sequences at the indices `at`.

    Args:
      version: of the policy that drew the new tokens.
      stop: stop tokens.
    """
    real = at >= 0

    def placed(values: np.ndarray, new: Any) -> np.ndarray:
        whole = np.array(values)
        whole[at[real]] = np.asarray(new)[real]
        return whole

    fields = {name: placed(getattr(rollout, name), getattr(sequences, name))
              for name in GENERATED}
    length, index = fields["length"], np.arange(rollout.tokens.shape[1])[None]
    new = (index >= rollout.length[:, None]) & (index < length[:, None])
    last = fields["tokens"][np.arange(len(length)), np.maximum(length - 1, 0)]
    return rollout.replace(
        **fields, stopped=np.isin(last, stop) & (length > 0),
        version=np.where(new, np.int32(version), rollout.version))


def records_of(rollout: Rollout, at: np.ndarray, records: Records) -> Records:
    """Returns what was recorded of the sequences at the indices `at`, in the rollout's order."""
    columns = rollout.tokens.shape[1]
    place = np.empty(len(rollout.length), np.int64)
    place[at[at >= 0]] = np.flatnonzero(at >= 0)
    records = jax.tree.map(lambda a: np.asarray(a)[place], records)
    return records.replace(states=records.states[:, : rollout.prompt.shape[1] + columns],
                           depth=records.depth[:, :columns])

