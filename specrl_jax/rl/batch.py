"""A rollout's sequences packed into rows, so that the work of an update follows their tokens.

A unit is a prompt with its response or, where a group shares one copy of its prompt, with all
responses of its group. Units of any length are packed into rows of a fixed number of columns,
each unit whole in one row.
"""

from typing import NamedTuple

import jax
import numpy as np
from flax import struct

from specrl_jax.config import Config
from specrl_jax.structs import AnyArray, Rollout

MORE = 8  # a row holds at most MORE times the units that fit it at full length


class Batch(struct.PyTreeNode):
    """n micro-batches of b rows: C columns, R response tokens and K sequences in each."""

    tokens: AnyArray  # i32[n, b, C]
    position: AnyArray  # i32[n, b, C] in the sequence
    segment: AnyArray  # i32[n, b, C] see model.attention; -1 pads
    prefix: AnyArray | None  # i32[n, b, C] segment of the shared prompt; None if nothing is shared
    predicted_at: AnyArray  # i32[n, b, R] column whose output predicts each response token
    response: AnyArray  # i32[n, b, R] response tokens, sequence after sequence
    rollout_logprob: AnyArray  # f32[n, b, R] of verification, with temperature, untruncated
    version: AnyArray  # i32[n, b, R] of the policy that drew each token; 0 is the one to update
    start: AnyArray  # i32[n, b, K] where each sequence begins in R
    length: AnyArray  # i32[n, b, K] response tokens; 0 pads
    sequence: AnyArray  # i32[n, b, K] index in the rollout; -1 pads
    advantage: AnyArray  # f32[n, b, K]
    temperature: AnyArray  # f32[n, b] positive


class Totals(struct.PyTreeNode):
    """Denominators of the whole batch, and how much there is to run."""

    tokens: AnyArray  # f32[]
    sequences: AnyArray  # f32[]
    columns: AnyArray  # i32[] that hold a token of a prompt or response
    micro_batches: AnyArray  # i32[]


class Layout(NamedTuple):
    """The shapes of a batch.

    Attributes:
      rows: b, rows of a micro-batch.
      together: sequences of a unit.
      columns: C; 0 is the length of one full unit.
    """

    rows: int
    together: int
    columns: int = 0


def layout_of(config: Config) -> Layout:
    """Returns the shapes that `learner.micro_batch`, `packing` and `tokens_per_row` ask for."""
    return Layout(config.learner.micro_batch // config.sequences_per_row,
                  config.sequences_per_unit, config.learner.tokens_per_row)


def part_of(rollout: Rollout, part: int, parts: int) -> Rollout:
    """Returns the sequences of one of `parts` equal, disjoint parts, in canonical order."""
    size = len(rollout.length) // parts
    return jax.tree.map(lambda a: a[part * size : (part + 1) * size], rollout)


def make_batch(rollout: Rollout, advantage: np.ndarray, temperature: float, layout: Layout,
               keep_all: bool) -> tuple[Batch, Totals]:
    """Returns the host arrays of a batch; its shapes depend on those of the arguments alone.

    Args:
      advantage: f32[Q].
      keep_all: pack units without any advantage too, because a KL term or a second update reads
        them. They have no gradient; if all are such, the first one is packed.
    """
    together = layout.together
    prompt, response = rollout.prompt.shape[1], rollout.tokens.shape[1]
    full = np.asarray([prompt + together * response, together * response, together])
    columns = layout.columns or int(full[0])
    fit = columns // int(full[0])  # units of full length
    most = np.asarray([columns, fit * full[1], fit * full[2] * MORE])

    lengths = rollout.length.reshape(-1, together)
    useful = (advantage.reshape(lengths.shape) != 0).any(1)
    chosen = np.flatnonzero(useful | keep_all) if keep_all or useful.any() else np.zeros(1, int)
    sizes = np.stack([rollout.prompt_length[::together] + lengths.sum(1), lengths.sum(1),
                      np.full(len(lengths), together)], 1)
    rows = first_fit(sizes[chosen], most)
    count = -(-len(lengths) // (fit * layout.rows))  # micro-batches at full length
    batch = _blank(count * layout.rows, most, temperature or 1.0, together > 1)
    for row, units in enumerate(rows):
        _fill(jax.tree.map(lambda a, row=row: a[row], batch), rollout, advantage, together,
              chosen[units])
    totals = Totals(tokens=np.float32(rollout.length.sum()),
                    sequences=np.float32((rollout.length > 0).sum()),
                    columns=np.int32(sizes[chosen, 0].sum()),
                    micro_batches=np.int32(-(-len(rows) // layout.rows)))
    return jax.tree.map(lambda a: a.reshape(count, layout.rows, *a.shape[1:]), batch), totals


def first_fit(sizes: np.ndarray, most: np.ndarray) -> list[list[int]]:
    """Returns the items of each row: each goes, in order, into the first row with room for it.

    Args: sizes i64[items, kinds] of the items, most i64[kinds] of a row; no item takes more.
    """
    rows: list[list[int]] = []
    used = np.zeros((len(sizes), len(most)), int)
    for item, size in enumerate(sizes):
        room = (used[: len(rows)] + size <= most).all(1)
        row = int(room.argmax()) if room.any() else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        used[row] += size
    return rows


def _blank(rows: int, most: np.ndarray, temperature: float, shares: bool) -> Batch:
    """Returns rows that hold nothing, [rows, ...]."""
    columns, responses, sequences = (int(x) for x in most)

    def ints(width: int) -> np.ndarray:
        return np.zeros((rows, width), np.int32)

    def floats(width: int) -> np.ndarray:
        return np.zeros((rows, width), np.float32)

    return Batch(tokens=ints(columns), position=ints(columns), segment=ints(columns) - 1,
                 prefix=ints(columns) - 1 if shares else None, predicted_at=ints(responses),
                 response=ints(responses), rollout_logprob=floats(responses),
                 version=ints(responses), start=ints(sequences), length=ints(sequences),
                 sequence=ints(sequences) - 1,
                 advantage=floats(sequences), temperature=np.full(rows, temperature, np.float32))


def _fill(row: Batch, rollout: Rollout, advantage: np.ndarray, together: int,
          units: np.ndarray) -> None:
    """Writes units into the fields of one row, one after the other."""
    column = slot = number = segment = 0

    def put(tokens: np.ndarray, first: int, prefix: int) -> None:
        nonlocal column
        at = slice(column, column + len(tokens))
        row.tokens[at], row.segment[at] = tokens, segment
        row.position[at] = np.arange(first, first + len(tokens))
        if row.prefix is not None:
            row.prefix[at] = prefix
        column += len(tokens)

    for unit in units:
        before = rollout.prompt_length[unit * together]
        put(rollout.prompt[unit * together, :before], 0, segment)
        shared, last = segment, column - 1  # of the prompt
        for sequence in range(unit * together, (unit + 1) * together):
            length = rollout.length[sequence]
            segment += together > 1
            at = slice(slot, slot + length)
            row.predicted_at[at] = np.r_[last, np.arange(column, column + length - 1)][:length]
            row.response[at] = rollout.tokens[sequence, :length]
            row.rollout_logprob[at] = rollout.raw_logprob[sequence, :length]
            row.version[at] = rollout.version[sequence, :length]
            row.start[number], row.length[number] = slot, length
            row.advantage[number], row.sequence[number] = advantage[sequence], sequence
            put(rollout.tokens[sequence, :length], int(before), shared)
            slot, number = slot + length, number + 1
        segment += 1
