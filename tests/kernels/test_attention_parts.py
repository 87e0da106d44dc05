"""The parts of the tree-attention kernels: ancestry bits, work lists, and what is left undone."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels.tree_attention import ancestry, packing, pallas, pallas_triton, work_list
from tree_attention_cases import make


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
    parent = np.asarray([[0, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, nodes))]
                         for _ in range(3)])
    words = np.asarray(ancestry.visible_bits(jnp.asarray(parent, jnp.int32), window))
    assert words.shape == (3, nodes, -(-nodes // 32)) and words.dtype == np.int32
    depth = np.asarray(ancestry.depth(jnp.asarray(parent, jnp.int32)))
    for b in range(3):
        for i in range(nodes):
            seen = [j for j in range(nodes) if words[b, i, j // 32] >> j % 32 & 1]
            assert seen == sorted(path(parent[b], i)[:window])
            assert depth[b, i] == len(path(parent[b], i)) - 1


def test_the_roots_parent_is_ignored() -> None:
    parent = jnp.asarray([[7, 0, 1]], jnp.int32)
    np.testing.assert_array_equal(ancestry.visible_bits(parent)[0, :, 0], [1, 3, 7])


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


def test_the_work_list_is_what_live_rows_see_and_nothing_else() -> None:
    work = work_list.make(*(jnp.asarray(x) for x in (LENGTH, LOW, LIVE, SLOT)), SIZES, 128)
    nothing = (-1, work_list.NOTHING)
    wanted = [(row, *where) for row in range(6) if LIVE[row]
              for where in (list(blocks(row)) or [nothing])]
    assert int(work.count) == len(wanted) == 1 + 1 + 1 + 6 + 2
    assert work.steps.shape == (work_list.places(6, SIZES, 128),)
    firsts = [0, 1, 4, 0]
    steps = [(int(code) >> 16, int(code) & 0xFFFF) for code in work.steps[: len(wanted)]]
    assert steps == [(row, firsts[segment] + block) for row, segment, block in wanted]
    for segment, codes in enumerate(work.fetch):
        own = [(SLOT[row], block) for row, at, block in wanted if at == segment]
        fetched = [(int(code) >> 16, int(code) & 0xFFFF) for code in codes]
        changes = [f for f, before in zip(fetched, [None, *fetched], strict=False) if f != before]
        assert changes == own  # each block once, in order
        for (_, at, block), (_, found) in zip(wanted, fetched, strict=False):
            assert at != segment or block == found


def test_no_live_row_is_no_work() -> None:
    dead = jnp.zeros(6, bool)
    assert int(work_list.make(*(jnp.asarray(x) for x in (LENGTH, LOW)), dead,
                              jnp.asarray(SLOT), SIZES, 128).count) == 0


@pytest.mark.parametrize("kernel", [pallas, pallas_triton])
def test_dead_tiles_are_not_computed(kernel: object) -> None:
    """What a kernel never writes is NaN under interpretation."""
    case = make(lengths=(9, 30, 4), nodes=16, parent=[[0] * 16] * 3)
    alive = ~((np.asarray(case["row"]) == 1)
              | ((np.asarray(case["row"]) == 2) & (np.asarray(case["node"]) >= 8)))
    rows = packing.unpack(*(case[name][alive] for name in ("q", "row", "node")), case["parent"],
                          2, case["length"], None)
    tree = (packing.by_head(case["tree_k"], 16), packing.by_head(case["tree_v"], 16))
    config = kernel.Config(block=128 if kernel is pallas else 16, tile=16)
    out = kernel._attend(rows, tree, case["cache_k"], case["cache_v"], case["length"],
                         jnp.arange(3), config=config, scale=0.25, interpret=True, whole=True)
    computed = ~np.isnan(np.asarray(out)).all((1, 3))
    np.testing.assert_array_equal(computed, [[True] * 32, [False] * 32, [True] * 16 + [False] * 16])
