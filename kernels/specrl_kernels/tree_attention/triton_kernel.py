"""The Triton program of tree attention; imported only where jax-triton is (see triton.py)."""

# Triton is no dependency: a type checker finds the module beside this one in its place.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e30)  # as in softmax.py
HIDDEN = tl.constexpr(-2e30)


@triton.jit
def add_keys(top, total, out, score, visible, values):
    """softmax.add_keys: keys with scores [TILE, T], values [T, E], onto (top, total, out)."""
    score = tl.where(visible, score, HIDDEN)
    higher = tl.maximum(top, tl.max(score, 1))
    rescale = tl.exp(top - higher)
    weight = tl.exp(score - higher[:, None])
    total = total * rescale + tl.sum(weight, 1)
    fresh = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return higher, total, out * rescale[:, None] + fresh


@triton.jit
def add_tree(top, total, sums, query, words, tree_k, tree_v, tree, line, mine,
             E: tl.constexpr, nodes: tl.constexpr, word_count: tl.constexpr, scale: tl.constexpr):
    """Adds the tree's own keys, in a row's first share; `line` is the queries' first word."""
    node, e = tl.arange(0, nodes), tl.arange(0, E)
    keys = tl.load(tree_k + tree + node[None, :] * E + e[:, None])
    score = tl.dot(query, keys, input_precision="ieee") * scale
    word = tl.minimum(node // 32, word_count - 1)  # nodes are padded beyond the last word
    bits = tl.load(words + line[:, None] + word[None, :])
    visible = ((bits >> (node % 32)[None, :]) & 1) == 1
    visible = visible & (node < 32 * word_count)[None, :] & mine
    values = tl.load(tree_v + tree + node[:, None] * E + e[None, :])
    return add_keys(top, total, sums, score, visible, values)


@triton.jit
def add_segment(top, total, sums, query, k, v, cache, low, high, seen_from, E: tl.constexpr,
                size: tl.constexpr, start: tl.constexpr, block: tl.constexpr, scale: tl.constexpr,
                has_window: tl.constexpr):
    """Adds the positions [low, high) of this segment; its last block ends where it does."""
    e = tl.arange(0, E)
    begin = tl.minimum(tl.maximum(low - start, 0), size) // block
    end = (tl.minimum(tl.maximum(high - start, 0), size) + block - 1) // block
    for index in range(begin, end):
        within = tl.minimum(index * block, size - block) + tl.arange(0, block)
        keys = tl.load(k + cache + e[:, None] * size + within[None, :])
        score = tl.dot(query, keys, input_precision="ieee") * scale
        place = start + within
        visible = ((within >= index * block) & (place >= low) & (place < high))[None, :]
        if has_window:
            visible = visible & (place[None, :] >= seen_from[:, None])
        values = tl.load(v + cache + within[:, None] * E + e[None, :])
        top, total, sums = add_keys(top, total, sums, score, visible, values)
    return top, total, sums


@triton.jit
def attend(q, words, first, live, owner, lows, highs, begins, counts, slot, tree_k, tree_v, k, v,
           out, out_top, out_total, out_sums,
           heads: tl.constexpr, queries: tl.constexpr, E: tl.constexpr,
           nodes: tl.constexpr, word_count: tl.constexpr, size: tl.constexpr, start: tl.constexpr,
           block: tl.constexpr, tile: tl.constexpr, scale: tl.constexpr, has_tree: tl.constexpr,
           has_window: tl.constexpr, by_row: tl.constexpr, direct: tl.constexpr):
    """One tile of queries to one head, over one share of one segment that begins at `start`.

    q [B, G, Q, E], words [B, Q, C], first [B, Q], live [B + 1, Q / tile], owner, lows and highs
    [S], begins, counts and slot [B], tree_k and tree_v [B, G, nodes, E], k [slots, G, E, size],
    v [slots, G, size, E]. If `direct`, a row of one share writes out [B, G, Q, E]; what else is
    found goes to out_sums [S, G, Q, E] with out_top and out_total [S, G, Q], or to the row's place
    in [B, ...] if there is one share a row (`by_row`). `block` is what fits into this segment.
    """
    tiles: tl.constexpr = queries // tile
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    share = tl.program_id(1)
    row = tl.load(owner + share)
    if tl.load(live + row * tiles + part) == 0:
        return
    at, e = part * tile + tl.arange(0, tile), tl.arange(0, E)
    group = (row * heads + head).to(tl.int64)
    query = tl.load(q + (group * queries + at)[:, None] * E + e[None, :])
    top, total = tl.full((tile,), FLOOR, tl.float32), tl.zeros((tile,), tl.float32)
    sums = tl.zeros((tile, E), tl.float32)
    if has_tree:
        mine = tl.load(begins + row) == share
        top, total, sums = add_tree(top, total, sums, query, words, tree_k, tree_v,
                                    group * nodes * E, (row * queries + at) * word_count, mine,
                                    E, nodes, word_count, scale)
    seen_from = tl.load(first + row * queries + at)
    cache = (tl.load(slot + row) * heads + head).to(tl.int64) * E * size
    top, total, sums = add_segment(top, total, sums, query, k, v, cache, tl.load(lows + share),
                                   tl.load(highs + share), seen_from, E, size, start, block, scale,
                                   has_window)
    place = row if by_row else share
    to = (place * heads + head).to(tl.int64) * queries + at
    if direct:
        if tl.load(counts + row) == 1:
            write(out, group * queries + at, total, sums, E)
        else:
            write_part(out_top, out_total, out_sums, to, top, total, sums, E)
    else:
        write_part(out_top, out_total, out_sums, to, top, total, sums, E)


@triton.jit
def write(out, to, total, sums, E: tl.constexpr):
    """A finished result, at lines `to` of E numbers."""
    e = tl.arange(0, E)
    tl.store(out + to[:, None] * E + e[None, :], (sums / total[:, None]).to(out.dtype.element_ty))


@triton.jit
def write_part(out_top, out_total, out_sums, to, top, total, sums, E: tl.constexpr):
    """A partial result, at lines `to`."""
    e = tl.arange(0, E)
    tl.store(out_top + to, top)
    tl.store(out_total + to, total)
    tl.store(out_sums + to[:, None] * E + e[None, :], sums)


@triton.jit
def join(begins, counts, live, top, total, sums, old, out, out_top, out_total, out_sums,
         heads: tl.constexpr, queries: tl.constexpr, E: tl.constexpr, tile: tl.constexpr,
         shares: tl.constexpr, launches: tl.constexpr, whole: tl.constexpr, least: tl.constexpr,
         few: tl.constexpr, some: tl.constexpr):
    """Joins the shares of one row, left by all launches, for `few` queries to one head.

    top and total [launches * S, G, Q], sums [launches * S, G, Q, E], S = `shares`, `some` of which
    are read at a time. If `whole`, out [B, G, Q, E] is written, else a partial result; rows of
    fewer than `least` shares are left as they are in `old`, which is the memory of `out`.
    """
    lines: tl.constexpr = queries // few
    head, line, row = tl.program_id(0) // lines, tl.program_id(0) % lines, tl.program_id(1)
    count = tl.load(counts + row)
    if (tl.load(live + row * (queries // tile) + line * few // tile) == 0) | (count < least):
        return
    at, e, number = line * few + tl.arange(0, few), tl.arange(0, E), tl.arange(0, some)
    high, weight = tl.full((few,), FLOOR, tl.float32), tl.zeros((few,), tl.float32)
    value = tl.zeros((few, E), tl.float32)
    begin = tl.load(begins + row)
    for launch in range(launches):
        for first in range(0, count, some):
            mine = first + number < count
            share = launch * shares + begin + first + number
            to = (share * heads + head).to(tl.int64)[:, None] * queries + at[None, :]
            one = tl.load(top + to, mask=mine[:, None], other=FLOOR)
            higher = tl.maximum(high, tl.max(one, 0))
            theirs, mine_now = tl.exp(one - higher[None, :]), tl.exp(high - higher)
            more = tl.load(total + to, mask=mine[:, None], other=0.0) * theirs
            weight = weight * mine_now + tl.sum(more, 0)
            read = tl.load(sums + to[:, :, None] * E + e[None, None, :],
                           mask=mine[:, None, None], other=0.0)
            value = value * mine_now[:, None] + tl.sum(read * theirs[:, :, None], 0)
            high = higher
    to = (row * heads + head).to(tl.int64) * queries + at
    if whole:
        write(out, to, weight, value, E)
    else:
        write_part(out_top, out_total, out_sums, to, high, weight, value, E)
