"""The Triton program of the perturbed argmax; imported only where jax-triton is (see triton.py)."""

# Triton is no dependency: a type checker finds the module beside this one in its place.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e30)  # as in block.py, and what follows
NOBODY = tl.constexpr(2**31 - 1)
TINY = tl.constexpr(1e-36)  # as in drawn.py
INF = tl.constexpr(float("inf"))


@triton.jit
def finalize(h):
    """noise.finalize of u32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def exponential(first, second, ids):
    """noise.exponential_of(noise.element_bits(...)) for i32 words and tokens i32[T].

    log1p(x) is log(w) x / (w - 1) with w = 1 + x rounded, whose error cancels (Kahan; Goldberg
    1991, theorem 4): Triton has no log1p but the device library's, which is not interpreted.
    """
    first, second = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    word = finalize(finalize(ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 + second) ^ first)
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    w = 1.0 - u
    below = w < 1.0
    return tl.where(below, -tl.log(w) * (u / tl.where(below, 1.0 - w, 1.0)), u)


@triton.jit
def race(logits, floats, integers, out, tokens, width: tl.constexpr, vocab: tl.constexpr,
         lanes: tl.constexpr, size: tl.constexpr, count: tl.constexpr, truncated: tl.constexpr):
    """One block of the vocabulary at one position; block.race says what is found.

    logits [W, V], floats and integers [W, 4] (block.Positions), out and tokens [blocks, W, lanes].
    """
    block, position = tl.program_id(0), tl.program_id(1)
    ids = tl.minimum(block * size, vocab - size) + tl.arange(0, size)
    inside = ids >= block * size
    line = position.to(tl.int64) * vocab
    scale, greedy = tl.load(floats + position * 4), tl.load(floats + position * 4 + 1) > 0
    score = tl.load(logits + line + ids).to(tl.float32) * scale
    score = tl.where(inside, score, -INF)
    top = tl.maximum(tl.max(score, 0), FLOOR)
    mass = tl.exp(score - top)
    ids += tl.load(integers + position * 4 + 3)
    noise = exponential(tl.load(integers + position * 4), tl.load(integers + position * 4 + 1), ids)
    if count > 1:
        there = score > -INF
        normal = mass > TINY
        rank = tl.log(noise / tl.where(normal, mass, 1.0)) - tl.where(normal, 0.0, score - top)
    else:
        there = mass > 0
        rank = noise / tl.where(there, mass, 1.0)
    rank = tl.where(greedy, -score, tl.where(there, rank, INF))
    kept = inside
    if truncated:
        edge, last = tl.load(floats + position * 4 + 2), tl.load(integers + position * 4 + 2)
        kept = kept & ((score > edge) | ((score == edge) & (ids <= last)))
    rank = tl.where(kept, rank, INF)
    to = (block * width + position) * lanes
    tl.store(out + to, top)
    tl.store(out + to + 1, tl.sum(mass, 0))
    for i in tl.static_range(count):
        best = tl.min(rank, 0)
        token = tl.min(tl.where(rank == best, ids, NOBODY), 0)
        own = ids == token
        tl.store(out + to + 2 + i, best)
        tl.store(out + to + 2 + count + i, tl.max(tl.where(own, score, -INF), 0))
        tl.store(tokens + to + i, token)
        rank = tl.where(own, INF, rank)
