"""The parts of the tree-attention kernels: ancestry bits, work lists, and what is left undone."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels.tree_attention import (
    ancestry,
    gpu,
    packing,
    pallas,
    pallas_triton,
    tree_attention,
    work_list,
)
from specrl_kernels.tree_attention.operands import Operands
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


def test_no_live_row_is_no_work() -> None:
    dead = jnp.zeros(6, bool)
    assert int(work_list.make(*(jnp.asarray(x) for x in (LENGTH, LOW)), dead,
                              jnp.asarray(SLOT), SIZES, 128).count) == 0


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


def test_one_long_row_of_many_is_spread_over_many_programs() -> None:
    """256 rows of Qwen2.5-7B's 4 heads: who is live decides, not how many rows there are."""
    config = dataclasses.asdict(gpu.heuristic(
        jax.ShapeDtypeStruct((256, 4, 56, 128), jnp.bfloat16), 32768))
    alone = shares([32768] * 256, [row == 77 for row in range(256)], **config)
    assert alone.keys() == {77} and 4 * len(alone[77]) >= 3 * gpu.PROGRAMS // 4
    sizes = [high - low for low, high in alone[77]]
    assert sum(sizes) == 32768 and max(sizes) <= 32768 // len(sizes) + 64
    among = shares([32768] + [64] * 255, [True] * 256, **config)
    assert len(among[0]) > 60 and all(among[row] == [(0, 64)] for row in range(1, 256))
    equal = shares([4096] * 256, [True] * 256, **config)
    assert all(each == [(0, 4096)] for each in equal.values())


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


@pytest.mark.parametrize("kernel,splits", [
    (pallas, 1), (pallas_triton, 1), pytest.param(pallas_triton, 3, marks=pytest.mark.full)])
def test_dead_tiles_are_not_computed(kernel: object, splits: int) -> None:
    """What a kernel never writes is NaN under interpretation."""
    case = make(lengths=(9, 30, 4), nodes=16, parent=[[0] * 16] * 3)
    alive = ~((np.asarray(case["row"]) == 1)
              | ((np.asarray(case["row"]) == 2) & (np.asarray(case["node"]) >= 8)))
    operands = Operands(**case | {name: case[name][alive] for name in ("q", "row", "node")})
    rows = packing.unpack(operands, 2, None)
    tree = (packing.by_head(case["tree_k"], 16), packing.by_head(case["tree_v"], 16))
    config = kernel.Config(block=128 if kernel is pallas else 16, tile=16, splits=splits)
    context = operands.context
    if kernel is pallas:
        context = pallas._transposed(context)
    out = kernel._attend(rows, tree, context, config=config, scale=0.25, interpret=True, whole=True)
    computed = ~np.isnan(np.asarray(out)).all((1, 3))
    np.testing.assert_array_equal(computed, [[True] * 32, [False] * 32, [True] * 16 + [False] * 16])


def test_shared_prefix_is_read_by_one_program_for_its_group(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of 4 rows with 8 queries each: a program for each group."""
    case, grids = make(lengths=[9] * 8, nodes=2, groups=1, repeats=4, prefix=(33, 40),
                       members=[[0, 2, 4, 6], [1, 3, 5, 7]]), []
    real = pallas_triton.triton_call
    monkeypatch.setattr(pallas_triton, "triton_call", lambda kernel, name, grid, *args, **options: (
        grids.append(grid), real(kernel, name, grid, *args, **options))[1])
    jax.eval_shape(lambda: tree_attention(
        **case, scale=1.0, implementation="pallas_triton", interpret=True,
        config={"block": 16, "tile": 16}))
    assert grids == [(1, 8), (1, 2)]  # (heads and tiles, shares): the rows' own context, prefixes


@pytest.mark.parametrize("layer", [None, 1])
def test_cost_is_what_filled_caches_of_one_layer_take(
        layer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA schedules a TPU's kernel by it. Queries and nodes are padded to 16."""
    rows, groups, size, slots, costs = 3, 2, 64, 768, []
    case = make(lengths=[9] * rows, nodes=4, size=size, segments=(256, 512), dtype="bfloat16")
    if layer is not None:
        case |= {name: [jnp.stack([x] * 4, 1) for x in case[name]]
                 for name in ("cache_k", "cache_v")}
    monkeypatch.setattr(pallas.pl, "pallas_call", lambda *args, out_shape, cost_estimate, **_: (
        costs.append(cost_estimate), lambda *args: [jnp.zeros(o.shape, o.dtype) for o in out_shape]
        )[1])
    tree_attention(**case, layer=layer, scale=1.0, implementation="pallas", platform="tpu")
    [cost] = costs
    keys = slots + 16
    assert cost.flops == 2 * cost.transcendentals * 2 * size == 4 * rows * groups * 16 * size * keys
    caches = rows * 2 * groups * size * slots * 2
    own = rows * (2 * groups * 16 * size * 2 + 2 * groups * 16 * size * 2 + 16 * 2 * 4)
    assert cost.bytes_accessed == caches + own
