"""The parts of the tree-attention kernels: ancestry bits, work lists and shares."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels.tree_attention import ancestry, gpu, work_list


def path(parent: np.ndarray, node: int) -> list[int]:
    """The node, its parent, and so on to the root."""
    nodes = [node]
    while nodes[-1] != 0:
        nodes.append(int(parent[nodes[-1]]))
    return nodes


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 33])
def test_bits_are_the_paths(nodes: int, window: int | None) -> None:
    rng = np.random.default_rng(nodes)
    parent = np.asarray([[7, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, nodes))]
                         for _ in range(3)])  # the root's is ignored
    words = np.asarray(ancestry.visible_bits(jnp.asarray(parent, jnp.int32), window))
    assert words.shape == (3, nodes, -(-nodes // 32)) and words.dtype == np.int32
    depth = np.asarray(ancestry.depth(jnp.asarray(parent, jnp.int32)))
    for b in range(3):
        for i in range(nodes):
            seen = [j for j in range(nodes) if words[b, i, j // 32] >> j % 32 & 1]
            assert seen == sorted(path(parent[b], i)[:window])
            assert depth[b, i] == len(path(parent[b], i)) - 1


LENGTH, LOW = [0, 5, 640, 300, 700, 129], [0, 0, 0, 257, 0, 0]
LIVE, SLOT = [True, True, False, True, True, True], [3, 1, 4, 5, 0, 2]
SIZES = (128, 384, 200)


def blocks(row: int) -> Iterator[tuple[int, int]]:
    """(segment, block of 128 in it) of what a row reads."""
    start = 0
    for segment, size in enumerate(SIZES):
        for block in range(-(-size // 128)):
            begin, end = start + block * 128, start + min((block + 1) * 128, size)
            if begin < LENGTH[row] and end > LOW[row] - LOW[row] % 128:
                yield segment, block
        start += size


def test_work_list_holds_exactly_what_live_rows_see() -> None:
    work = work_list.make(*(jnp.asarray(x) for x in (LENGTH, LOW, LIVE, SLOT)), SIZES, 128)
    nothing = (-1, work_list.NOTHING)
    wanted = [(row, *where) for row in range(6) if LIVE[row]
              for where in (list(blocks(row)) or [nothing])]
    assert int(work.count) == len(wanted) == 1 + 1 + 1 + 6 + 2
    assert work.steps.shape == (work_list.most_steps(6, SIZES, 128),)
    firsts = [0, 1, 4, 0]
    steps = [(int(code) >> 16, int(code) & 0xFFFF) for code in work.steps[: len(wanted)]]
    assert steps == [(row, firsts[segment] + block) for row, segment, block in wanted]
    for segment, codes in enumerate(work.fetch):
        own = [(SLOT[row], block) for row, at, block in wanted if at == segment]
        fetched = [(int(code) >> 16, int(code) & 0xFFFF) for code in codes]
        changes = [f for f, before in zip(fetched, [None, *fetched], strict=False) if f != before]
        assert changes == own  # each block once, in order
        for (_, at, block), (_, actual) in zip(wanted, fetched, strict=False):
            assert at != segment or block == actual


DIVIDE = jax.jit(gpu.divide, static_argnums=3)


def shares(length: list[int], live: list[bool], oldest: list[int] | None = None, **config: int
           ) -> dict[int, list[tuple[int, int]]]:
    """The positions that each program of a GPU reads, by row; rows come in order."""
    chosen = gpu.Config(**({"block": 64} | config))
    actual = DIVIDE(jnp.asarray(length), jnp.asarray(oldest or [0] * len(length)),
                    jnp.asarray(live), chosen)
    assert actual.row.shape == (len(length) + chosen.splits - 1,)
    by_row: dict[int, list[tuple[int, int]]] = {}
    for row, low, high in zip(*map(np.asarray, actual[:3]), strict=True):
        if row < len(length):
            by_row.setdefault(int(row), []).append((int(low), int(high)))
    for row in range(len(length)):
        assert len(by_row.get(row, [])) == actual.count[row]
        assert actual.first[row] == sum(len(by_row.get(other, [])) for other in range(row))
    assert list(by_row) == sorted(by_row)
    return by_row


@pytest.mark.parametrize("splits,least", [(1, 1), (3, 4), (128, 1)])
def test_shares_are_what_live_rows_see_once_and_in_order(splits: int, least: int) -> None:
    rng = np.random.default_rng(splits)
    for _ in range(20):
        length = [int(x) for x in rng.integers(0, 2000, 9)]
        oldest = [int(x * rng.random()) for x in length]
        live = [bool(x) for x in rng.random(9) < 0.6]
        actual = shares(length, live, oldest, splits=splits, least=least)
        assert actual.keys() == {row for row in range(9) if live[row]}
        blocks = [max(0, -(-length[row] // 64) - oldest[row] // 64) for row in actual]
        most = max(least, -(-sum(blocks) // splits)) if splits > 1 else 32
        for (row, here), size in zip(actual.items(), blocks, strict=True):
            assert len(here) == max(1, -(-size // most))
            assert here[0][0] == min(oldest[row] // 64 * 64, length[row])
            assert here[-1][1] == length[row]
            assert all(a[1] == b[0] for a, b in zip(here, here[1:], strict=False))
            assert all(low < high <= low + 64 * most for low, high in here) or len(here) == 1
