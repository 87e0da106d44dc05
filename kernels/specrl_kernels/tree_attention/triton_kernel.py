"""The Triton program of tree attention; imported only where jax-triton is (see triton.py)."""

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
def add_tree(top, total, sums, query, words, tree_k, tree_v, tree, line, split,
             E: tl.constexpr, nodes: tl.constexpr, word_count: tl.constexpr, scale: tl.constexpr):
    """Adds the tree's own keys, in the first split alone; `line` is the queries' first word."""
    node, e = tl.arange(0, nodes), tl.arange(0, E)
    keys = tl.load(tree_k + tree + node[None, :] * E + e[:, None])
    score = tl.dot(query, keys, input_precision="ieee") * scale
    word = tl.minimum(node // 32, word_count - 1)  # nodes are padded beyond the last word
    bits = tl.load(words + line[:, None] + word[None, :])
    visible = ((bits >> (node % 32)[None, :]) & 1) == 1
    visible = visible & (node < 32 * word_count)[None, :] & (split == 0)
    values = tl.load(tree_v + tree + node[:, None] * E + e[None, :])
    return add_keys(top, total, sums, score, visible, values)


@triton.jit
def share(length, lowest, split, whole_block: tl.constexpr, splits: tl.constexpr):
    """gpu.share: the places [low, high) of a row that a split reads."""
    begin = lowest // whole_block * whole_block
    blocks = (tl.maximum(length - begin, 0) + whole_block - 1) // whole_block
    size = (blocks + splits - 1) // splits * whole_block
    low = tl.minimum(begin + split * size, length)
    return low, tl.minimum(low + size, length)


@triton.jit
def add_segment(top, total, sums, query, k, v, cache, low, high, seen_from, E: tl.constexpr,
                size: tl.constexpr, start: tl.constexpr, block: tl.constexpr, scale: tl.constexpr,
                has_window: tl.constexpr):
    """Adds the places [low, high) that lie in this segment; its last block ends where it does."""
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
def attend(q, words, first, live, length, oldest, slot, tree_k, tree_v, k, v,
           out_top, out_total, out,
           rows: tl.constexpr, heads: tl.constexpr, queries: tl.constexpr, E: tl.constexpr,
           nodes: tl.constexpr, word_count: tl.constexpr, size: tl.constexpr, start: tl.constexpr,
           block: tl.constexpr, whole_block: tl.constexpr, tile: tl.constexpr,
           splits: tl.constexpr, scale: tl.constexpr, has_tree: tl.constexpr,
           has_window: tl.constexpr, whole: tl.constexpr):
    """One tile of queries to one head, over one share of one segment that begins at `start`.

    q [B, G, Q, E], words [B, Q, C], first [B, Q], live [B, Q / tile], length, oldest and slot [B],
    tree_k and tree_v [B, G, nodes, E], k [slots, G, E, size], v [slots, G, size, E]; out is
    [B, G, Q, E] if `whole`, else [splits, B, G, Q, E] with out_top and out_total [splits, B, G, Q].
    Shares are counted in blocks of `whole_block`; `block` is what fits into this segment.
    """
    tiles: tl.constexpr = queries // tile
    head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, split = tl.program_id(1), tl.program_id(2)
    if tl.load(live + row * tiles + part) == 0:
        return
    at, e = part * tile + tl.arange(0, tile), tl.arange(0, E)
    group = (row * heads + head).to(tl.int64)
    query = tl.load(q + (group * queries + at)[:, None] * E + e[None, :])
    top, total = tl.full((tile,), FLOOR, tl.float32), tl.zeros((tile,), tl.float32)
    sums = tl.zeros((tile, E), tl.float32)
    if has_tree:
        top, total, sums = add_tree(top, total, sums, query, words, tree_k, tree_v,
                                    group * nodes * E, (row * queries + at) * word_count, split,
                                    E, nodes, word_count, scale)
    low, high = share(tl.load(length + row), tl.load(oldest + row), split, whole_block, splits)
    seen_from = tl.load(first + row * queries + at)
    cache = (tl.load(slot + row) * heads + head).to(tl.int64) * E * size
    top, total, sums = add_segment(top, total, sums, query, k, v, cache, low, high, seen_from,
                                   E, size, start, block, scale, has_window)
    if whole:
        target = out + (group * queries + at)[:, None] * E + e[None, :]
        tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty))
    else:
        to = (split * rows * heads + group) * queries + at
        tl.store(out_top + to, top)
        tl.store(out_total + to, total)
        tl.store(out + to[:, None] * E + e[None, :], sums)
