"""What a round costs on this device, for this model: measured, fitted, looked up in the loop.

A launch takes launch + rounds * (verify + draft) + catch-up. `verify` is a whole round without a
draft (layers, head, noise, walk, commit) in one bucket, `draft` what drafting to a depth adds to
it, and a catch-up is what a drafter must first read when it was not asked for some rounds. Plain
rounds have one decision a launch, which is part of `launch`, drafted ones one each; half of that is
in `draft`, since a measured launch has two rounds, and what `keep` weighs is not. Where rounds of
the largest batch size are long, launches of all sizes have one: two of them cannot tell what a
launch takes. A decision is then in `verify`: 0.2 % of a round of 64 rows of SmolLM2 on two cores.
And a size between two others (`left_out`) is found from these: its own launches only test that.
Measured are whole launches of the compiled programs that rollouts run, with settings forced.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.structs import Array

CONTEXTS = 3  # lengths of context that are measured
SHORTEST = 32  # context
ROUNDS = 2  # of a measured launch, where rounds are not long
UNSEEN = 0.002  # of a plain round: the least that a draft step takes, whatever was measured


class Bucket(NamedTuple):
    """One branch of the round's switch: W packed tokens, at most n nodes a row."""

    packed: int
    nodes: int


Ladders = Mapping[int, Sequence[Bucket]]
"""The buckets of each batch size of a shard, smallest first."""


def bucket_ladder(batch: int, nodes: int, most: int, empties: bool = False) -> tuple[Bucket, ...]:
    """Buckets of a batch, smallest first: plain decoding, then doubling up to `most` tokens.

    A forward of 2 to 8 tokens costs about the same, so nothing lies between 1 and 8.

    Args:
      empties: whether slots stay empty as rows end, as they do in the smallest batch size: then a
        bucket as wide as plain decoding verifies drafts in their places.
    """
    packed, widest = [batch], min(batch * nodes, most)
    while packed[-1] < widest:
        packed.append(min(max(2 * packed[-1], 8), widest))
    plain, *wider = (Bucket(w, min(nodes, w - batch + 1)) for w in packed)
    if empties and wider and wider[0].packed > 8:
        wider.insert(0, Bucket(batch, min(wider[0].nodes, batch)))
    return (plain, *wider)


@struct.dataclass
class Table:
    """Seconds of one batch size. Nothing falls as packed tokens, context or steps grow."""

    packed: Array  # f32[buckets] W
    nodes: Array  # f32[buckets] n
    context: Array  # f32[C] ascending
    verify: Array  # f32[buckets, C]
    draft: Array  # f32[D+1, C]
    catch_up: Array  # f32[] of one round that the drafter was not asked
    launch: Array  # f32[] of a launch, once


class Point(NamedTuple):
    """A launch to measure: settings are forced, and every row stands at `context`."""

    rows: int
    bucket: int  # 0 is plain decoding
    context: int
    steps: int
    missed: int  # positions that the drafter has not read
    rounds: int


class Run(NamedTuple):
    """A launch that was timed."""

    point: Point
    when: float  # it began, in seconds of this process's clock
    seconds: float


def contexts(longest: int) -> tuple[int, ...]:
    """The lengths that are measured, evenly spaced in their logarithm."""
    first = min(SHORTEST, longest)
    return tuple(sorted({int(round(c)) for c in np.geomspace(first, longest, CONTEXTS)}))


def blank(ladders: Ladders, longest: int, depth: int) -> dict[str, Table]:
    """Tables without times, by batch size."""
    grid = np.asarray(contexts(longest), np.float32)

    def table(buckets: Sequence[Bucket]) -> Table:
        return Table(packed=np.asarray([b.packed for b in buckets], np.float32),
                     nodes=np.asarray([b.nodes for b in buckets], np.float32), context=grid,
                     verify=np.zeros((len(buckets), len(grid)), np.float32),
                     draft=np.zeros((depth + 1, len(grid)), np.float32),
                     catch_up=np.float32(0), launch=np.float32(0))

    return {str(rows): table(buckets) for rows, buckets in ladders.items()}


def at(table: Table, context: Array) -> tuple[Array, Array]:
    """(verify f32[buckets], draft f32[D+1]) at a context f32[], linear between those measured."""
    last = table.context.shape[0] - 1
    if last == 0:
        return table.verify[:, 0], table.draft[:, 0]
    above = jnp.clip(jnp.sum(table.context < context), 1, last)
    low, high = table.context[above - 1], table.context[above]
    share = jnp.clip((context - low) / (high - low), 0.0, 1.0)
    verify, draft = ((1 - share) * a[:, above - 1] + share * a[:, above]
                     for a in (table.verify, table.draft))
    return verify, draft


def bucket_for(table: Table, packed: Array, nodes: Array) -> Array:
    """i32[...] the smallest bucket for so many tokens, and nodes of a row; else the largest."""
    each = (1,) * packed.ndim + (-1,)
    fits = (packed[..., None] <= table.packed.reshape(each)) & (
        nodes[..., None] <= table.nodes.reshape(each))
    return jnp.where(fits.any(-1), jnp.argmax(fits, -1), table.packed.shape[0] - 1)


# Measuring.


def left_out(ladders: Ladders) -> set[int]:
    """Batch sizes that are found from those above and below them, where rounds are long. The one
    above is at most twice the one below and drafts, and the one below packs as many tokens."""
    sizes, out = sorted(ladders, reverse=True), set[int]()
    for above, size, below in zip(sizes, sizes[1:], sizes[2:], strict=False):
        packs = ladders[below][-1].packed >= ladders[size][-1].packed
        if above not in out and above <= 2 * below and len(ladders[above]) > 1 and packs:
            out.add(size)
    return out


def points(ladders: Ladders, longest: int, depth: int, reads: bool, rounds: int = ROUNDS
           ) -> tuple[list[Point], list[Point]]:
    """What a fit needs, and what it is tested on. A round of another bucket drafts, as in use.
    The first launch of each batch size is a plain one, and one of the fit's has a round less.

    Args:
      rounds: of a launch: ROUNDS, or 1 where they are long, and sizes are left out of the fit.
      reads: whether the drafter must read what it missed. It misses the middle one of the measured
        contexts: of a few positions the noise of two launches would become that of long prompts.
    """
    grid, fit, held = contexts(longest), [], []
    middle, out = grid[len(grid) // 2], left_out(ladders) if rounds == 1 else set[int]()
    for rows, buckets in ladders.items():
        wider, needed = range(1, len(buckets)), rows not in out
        between = int(round((grid[0] * grid[-1]) ** 0.5)) if len(grid) < 3 else int(
            round((grid[-2] * grid[-1]) ** 0.5))
        held.append(Point(rows, 0, between, 0, 0, rounds))
        if wider:
            held += {Point(rows, wider[-1], between, 1, 0, rounds),
                     Point(rows, wider[0], between, (depth + 1) // 2, 0, rounds)}
        if needed:
            fit += [Point(rows, 0, c, 0, 0, rounds) for c in grid]
            fit.append(Point(rows, 0, grid[0], 0, 0, rounds - 1))
        if needed and wider:
            ends = _ends(grid)
            fit += [Point(rows, 0, c, 1, 0, rounds) for c in grid]
            fit += [Point(rows, b, c, 1, 0, rounds) for b in wider for c in ends]
            if reads:
                fit.append(Point(rows, 0, middle, 1, middle, rounds))
            if depth > 1:
                fit += [Point(rows, 0, c, depth, 0, rounds) for c in ends]
    return fit, held


def _ends(grid: Sequence[int]) -> list[int]:
    """Where what wider buckets and deeper drafts add to a round is measured; between them it is a
    line."""
    return sorted({grid[0], grid[-1]})


def steady(runs: Sequence[Run], reference: Point) -> dict[Point, float]:
    """Seconds of every launch that was run, from its ratios to the reference's runs around it.

    A machine that others use too is slower for half a second at a time. Launches side by side meet
    the same pace, so their ratio varies less than either, and choices in a batch size depend on
    ratios alone. Launches of 0.3 s with four between two of the reference still vary less so than
    by themselves (experiments/LOG.md, 2026-11-28).
    """
    known = [run for run in runs if run.point == reference]
    times, paces = [run.when for run in known], np.log([run.seconds for run in known])
    ratios: dict[Point, list[float]] = {}
    for run in runs:
        ratios.setdefault(run.point, []).append(
            np.log(run.seconds) - np.interp(run.when, times, paces))
    return {point: float(np.exp(np.median(paces) + np.median(of))) for point, of in ratios.items()}


def rounds_of(measured: Iterable[Point]) -> int:
    """Rounds of the launches that were measured, but for those that have a round less."""
    return max(point.rounds for point in measured)


def fit(measured: Mapping[Point, float], ladders: Ladders, longest: int, depth: int
        ) -> dict[str, Table]:
    """Tables from the seconds of the launches that `points` asks for."""
    rounds, tables = rounds_of(measured), blank(ladders, longest, depth)
    out = left_out(ladders) if rounds == 1 else set[int]()
    known = {size: _fit_rows(measured, size, tables[str(size)], depth, rounds)
             for size in ladders if size not in out}
    between = {size: _between(tables[str(size)], known[max(s for s in known if s < size)],
                              known[min(s for s in known if s > size)]) for size in out}
    return {str(size): (known | between)[size] for size in ladders}


def _fit_rows(measured: Mapping[Point, float], rows: int, table: Table, depth: int, rounds: int
              ) -> Table:
    grid, buckets = [int(c) for c in table.context], range(len(table.packed))

    def seconds(bucket: int, steps: int, at: Sequence[int] = grid) -> np.ndarray:
        return np.asarray([measured[Point(rows, bucket, c, steps, 0, rounds)] for c in at])

    # What a launch takes besides its rounds, with its one decision if these are short.
    less, whole = (measured[Point(rows, 0, grid[0], 0, 0, n)] for n in (rounds - 1, rounds))
    launch = max(0.0, less - (rounds - 1) * (whole - less))
    plain = (seconds(0, 0) - launch) / rounds
    verify, draft, catch_up = plain[None], np.zeros_like(table.draft), 0.0
    if len(buckets) > 1:
        def over(bucket: int, steps: int) -> np.ndarray:
            """What it adds to a round of one step in bucket 0, by context."""
            ends = _ends(grid)
            more = seconds(bucket, steps, ends) - seconds(0, 1, ends)
            return np.interp(grid, ends, more / rounds)

        verify = np.stack([plain, *(plain + np.maximum(over(b, 1), 0.0) for b in buckets[1:])])
        asked, extra = [1], [(seconds(0, 1) - seconds(0, 0)) / rounds]
        if depth > 1:
            asked.append(depth)
            extra.append(extra[0] + over(0, depth))
        extra = isotonic(np.maximum(0.0, extra))
        draft = np.stack([np.interp(np.arange(depth + 1), [0, *asked], [0, *column])
                          for column in extra.T], 1)
        least = np.maximum.accumulate(plain)  # as a draft's context grows its time must not fall
        draft = np.maximum(draft, UNSEEN * np.arange(depth + 1)[:, None] * least)
        middle = grid[len(grid) // 2]
        read = Point(rows, 0, middle, 1, middle, rounds)
        if read in measured:  # else the drafter reads nothing
            catch_up = max(0.0, measured[read] - measured[read._replace(missed=0)]) / middle
    return table.replace(verify=np.maximum(isotonic(verify), 1e-9).astype(np.float32),
                         draft=draft.astype(np.float32), catch_up=np.float32(catch_up),
                         launch=np.float32(launch))


def _between(table: Table, below: Table, above: Table) -> Table:
    """The table of a size that is left out: on a line between those below and above it lie their
    plain rounds, their rounds that pack as many tokens, and the rest."""
    size, low, high = (float(t.packed[0]) for t in (table, below, above))
    share = (size - low) / (high - low)

    def line(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return (1 - share) * np.float64(one) + share * np.float64(other)

    verify = line(*(_packing(t, table.packed) for t in (below, above)))
    verify[0] = line(below.verify[0], above.verify[0])
    return table.replace(verify=verify.astype(np.float32),
                         draft=line(below.draft, above.draft).astype(np.float32),
                         catch_up=np.float32(line(below.catch_up, above.catch_up)),
                         launch=np.float32(line(below.launch, above.launch)))


def _packing(table: Table, packed: np.ndarray) -> np.ndarray:
    """f[W, C] seconds of rounds that pack so many tokens. A bucket as wide as plain decoding is no
    part of that: more nodes, not more tokens, make it dearer."""
    widths = [0, *np.flatnonzero(table.packed > table.packed[0])]
    return np.stack([np.interp(packed, table.packed[widths], column)
                     for column in table.verify[widths].T], 1)


def isotonic(values: np.ndarray) -> np.ndarray:
    """The nearest matrix, by the largest change, that falls along neither axis.

    The middle of the largest value at or before each entry and the smallest at or after it
    (isotonic regression in the maximum norm; Robertson, Wright and Dykstra 1988, section 1.7).
    """
    values = np.asarray(values, np.float64)
    high = np.maximum.accumulate(np.maximum.accumulate(values, 0), 1)
    low = np.minimum.accumulate(np.minimum.accumulate(values[::-1, ::-1], 0), 1)[::-1, ::-1]
    return (high + low) / 2


def predict(tables: Mapping[str, Table], point: Point) -> float:
    """Seconds of a launch, on the host."""
    table = tables[str(point.rows)]
    verify, draft = (np.asarray(a) for a in at(table, jnp.float32(point.context)))
    return float(table.launch + point.rounds * (verify[point.bucket] + draft[point.steps])
                 + point.missed * table.catch_up)


def error(tables: Mapping[str, Table], measured: Mapping[Point, float],
          held: Sequence[Point]) -> float:
    """Mean relative error on held-out points."""
    return float(np.mean([abs(predict(tables, p) / measured[p] - 1) for p in held]))
