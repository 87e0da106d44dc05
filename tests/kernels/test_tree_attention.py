"""The contract of tree attention, run against every implementation that there is for this device.

On a CPU kernels are interpreted; experiments/bench.py contract runs the same cases on a GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.tree_attention import Prefix, tree_attention
from specrl_kernels.tree_attention.api import IMPLEMENTATIONS
from tree_attention_cases import INTERPRET, KERNELS, assert_near, call, make, need_devices, oracle

# Small blocks, so that a context of a few hundred tokens has several.
CONFIGS = {"pallas": {"block": 128, "tile": 64},
           "pallas_triton": {"block": 16, "tile": 16, "least": 1},
           "triton": {"block": 16, "tile": 16, "least": 1}, "xla": {"chunk": 16, "in_place": 0}}
NAMES = [name for name in IMPLEMENTATIONS if name in (*KERNELS, "machine", "xla", "reference")]
# What these may refuse, and why; all others do everything.
PARTIAL = {"machine": ("needs a cpu", "needs a 64-bit CPU", "llvmlite", "fused multiply-add",
                       "a shared prefix or a window", "float32 only", "multiples of 16 only"),
           "triton": ("jax-triton",)}  # is not there, or too old for this JAX
full = pytest.mark.full
each = pytest.mark.parametrize("implementation", NAMES)
each_dtype = pytest.mark.parametrize("dtype", [
    "float32", pytest.param("bfloat16", marks=full)])
each_kernel = pytest.mark.parametrize("implementation", KERNELS)

CASES = {
    "one node": dict(nodes=1, lengths=(5, 0), slots=3),
    "every length": dict(lengths=(0, 1, 15, 16, 17, 127, 128, 129, 256), nodes=3, groups=1,
                         cache=256),
    "an odd cache": dict(lengths=(3, 200, 129, 193), cache=200, nodes=2, groups=1),
    "slots permuted": dict(lengths=(4, 0, 9), slots=5, nodes=3),
    "some nodes packed": dict(lengths=(4, 0, 9), nodes=9, repeats=4, packed=5),
    "full width": dict(lengths=(20, 3), nodes=64, groups=1),
    "segments": dict(lengths=(0, 63, 64, 65, 130, 330), nodes=2, groups=1,
                     segments=(64, 64, 192, 24), slots=6),
    "seven queries a head": dict(repeats=7, lengths=(3, 20), nodes=3),
}
TREES = {"a chain of 33": dict(nodes=33, parent=[[0, *range(32)]]),
         "a star of 9": dict(nodes=9, parent=[[0] * 9]),
         "a comb": dict(nodes=7, parent=[[0, 0, 0, 2, 2, 4, 4]])}


@contextlib.contextmanager
def attempted(implementation: str) -> Iterator[None]:
    """What an implementation is not made for is skipped, with its reason."""
    try:
        yield
    except Unsupported as reason:
        if not any(known in str(reason) for known in PARTIAL.get(implementation, ())):
            raise
        pytest.skip(f"{implementation}: {reason}")


def attempt(case: Any, implementation: str, window: int | None, config: Any) -> np.ndarray:
    """The case by an implementation, or a skipped test."""
    with attempted(implementation):
        return call(case, implementation, window, config)


def configured(case: Any, implementation: str, window: int | None = None, **other: int
               ) -> np.ndarray:
    """The case in small blocks and with `other` settings, where there are any."""
    config = CONFIGS.get(implementation)
    return attempt(case, implementation, window, None if config is None else config | other)


@each
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=full) for name in TREES)])
def test_equals_the_oracle(name: str, implementation: str) -> None:
    case = make(**(CASES | TREES)[name])
    assert_near(configured(case, implementation), oracle(case), case)


@pytest.mark.parametrize("way,window", [
    ({"abreast": 1, "chunk": 48}, 7), ({"in_place": 512}, None),
    *(pytest.param(way, window, marks=full) for way, window in (
        ({"abreast": 1}, None), ({"in_place": 512}, 7), ({"chunk": 48}, 7)))], ids=str)
def test_every_way_in_which_xla_reads_a_cache(way: dict[str, int], window: int | None) -> None:
    for case in (base(slots=None), make(**SHARED)):
        assert_near(configured(case, "xla", window, **way), oracle(case, window), case)


@each
@pytest.mark.parametrize("name", ["segments", pytest.param("every length", marks=full)])
def test_half_precision(name: str, implementation: str) -> None:
    case = make(**CASES[name], dtype="bfloat16")
    assert_near(configured(case, implementation), oracle(case), case)


# (key-value heads, query heads of each, head size, dtype): every ratio once, every size in both.
HEADS = [(2, 7, 64, "bfloat16"), (4, 1, 128, "float32"), (1, 8, 256, "bfloat16"),
         (3, 3, 64, "float32"), (2, 6, 128, "bfloat16"), (1, 2, 256, "float32"),
         (1, 5, 64, "float32"), (2, 4, 128, "bfloat16")]


@full
@each
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_size_group_ratio_and_dtype(heads: tuple[int, int, int, str],
                                               implementation: str) -> None:
    """With the heuristic's blocks; every second case has a window."""
    groups, repeats, size, dtype = heads
    case = make(lengths=(0, 130, 700), nodes=4, groups=groups, repeats=repeats, size=size,
                segments=(512, 256), slots=4, dtype=dtype)
    window = 40 if HEADS.index(heads) % 4 in (1, 2) and implementation != "machine" else None
    assert_near(attempt(case, implementation, window, None), oracle(case, window), case)


@each
@pytest.mark.parametrize("window,tree", [
    (2, "short"), *(pytest.param(*case, marks=full) for case in (
        (1, "short"), (5, "short"), (150, "short"), (34, "of two words")))])
def test_window_hides_older_tokens(window: int, tree: str, implementation: str) -> None:
    case = make(lengths=(0, 3, 18, 170), nodes=5, groups=1, cache=170, parent=[[0, 0, 1, 2, 0]] * 4)
    if tree != "short":
        case = make(lengths=(3,), nodes=40, groups=1, repeats=1, parent=[[0, *range(39)]])
    assert_near(configured(case, implementation, window), oracle(case, window), case)


# Most of what follows changes values only, so each implementation compiles it once.
BASE = dict(lengths=(0, 7, 16, 140), nodes=6, slots=6, segments=(96, 64))


def base(**other: Any) -> dict[str, Any]:
    """Four rows with the same tree; its paths are 0-1-2-4 and 0-1-3-5."""
    return make(**BASE | other, parent=[[0, 0, 1, 1, 2, 3]] * 4)


def keep(case: dict[str, Any], nodes: list[tuple[int, int]]) -> dict[str, Any]:
    """Packs these (row, node) alone; the first of them fills the rest."""
    where = {(int(r), int(n)): i for i, (r, n) in enumerate(zip(case["row"], case["node"],
                                                                strict=True))}
    at = [where[node] for node in nodes]
    at = np.asarray(at + at[:1] * (len(where) - len(at)))
    return case | {name: case[name][at] for name in ("q", "row", "node")}


@each
@each_dtype
def test_garbage_beyond_length_and_in_other_slots_is_inert(dtype: str, implementation: str
                                                           ) -> None:
    case = base(dtype=dtype)
    clean = configured(case, implementation)
    seen = np.zeros((6, 160), bool)
    for b, slot in enumerate(np.asarray(case["slot"])):
        seen[slot, : int(case["length"][b])] = True
    parts = np.split(seen, [96], 1)
    for garbage in (1e6, -3.0, 0.0):
        dirty = case | {
            "cache_k": [jnp.where(s[:, None, None, :], k, garbage)
                        for s, k in zip(parts, case["cache_k"], strict=True)],
            "cache_v": [jnp.where(s[:, None, :, None], v, garbage)
                        for s, v in zip(parts, case["cache_v"], strict=True)]}
        np.testing.assert_array_equal(configured(dirty, implementation), clean)


@each
@each_dtype
def test_garbage_in_dead_nodes_and_rows_is_inert(dtype: str, implementation: str) -> None:
    live = [(0, 0), (0, 1), (3, 0), (3, 1), (3, 3)]  # rows 1 and 2 are dead, and nodes 2, 4, 5
    case = keep(base(dtype=dtype), live)
    clean = configured(case, implementation)
    assert_near(clean, oracle(case), case)
    dead = np.ones((4, 6), bool)
    dead[tuple(np.asarray(live).T)] = False
    dirty = {name: jnp.where(dead[..., None, None], 1e6, case[name])
             for name in ("tree_k", "tree_v")}
    dirty["cache_v"] = [v.at[case["slot"][1:3]].set(-1e6) for v in case["cache_v"]]
    dirty["length"] = case["length"].at[1].set(0)
    np.testing.assert_array_equal(configured(case | dirty, implementation), clean)


@pytest.mark.parametrize("implementation", ["machine", *KERNELS])
def test_cache_of_dead_rows_is_not_read(implementation: str) -> None:
    case = keep(base(), [(0, 0), (1, 5)])
    clean = configured(case, implementation)
    dirty = case | {"cache_v": [v.at[case["slot"][3]].set(jnp.nan) for v in case["cache_v"]]}
    np.testing.assert_array_equal(configured(dirty, implementation), clean)


@pytest.mark.parametrize("implementation", ["machine", "xla", *KERNELS])
def test_segment_beyond_all_contexts_is_not_read(implementation: str) -> None:
    case = base(lengths=(0, 7, 16, 96))
    clean = configured(case, implementation)
    nothing = {name: [case[name][0], jnp.full_like(case[name][1], jnp.nan)]
               for name in ("cache_k", "cache_v")}
    np.testing.assert_array_equal(configured(case | nothing, implementation), clean)


@pytest.mark.parametrize("slots", [4, None])
def test_xla_reads_of_each_row_what_it_sees_and_copies_one_chunk(slots: int | None) -> None:
    """Row 3 alone reaches beyond 16; with a window of 20 it does not see positions below 112."""
    case = keep(base(slots=slots), [(0, 0), (1, 5), (3, 1)])  # row 2 is dead
    clean = configured(case, "xla", 20)
    slot = range(4) if slots is None else np.asarray(case["slot"])
    seen = np.zeros((4, 160), bool)
    seen[slot[1], :16], seen[slot[3], 112:144] = True, True
    parts = np.split(seen, [96], 1)
    dirty = case | {"cache_v": [jnp.where(s[:, None, :, None], v, jnp.nan)
                                for s, v in zip(parts, case["cache_v"], strict=True)]}
    np.testing.assert_array_equal(configured(dirty, "xla", 20), clean)


@pytest.mark.skipif(not INTERPRET, reason="elsewhere rows run abreast, and so do their chunks")
@pytest.mark.parametrize("through_slot", [True, pytest.param(False, marks=full)])
def test_xla_holds_no_copy_of_the_cache(through_slot: bool) -> None:
    """64 rows of SmolLM2's heads: a cache of 4096 slots is 384 MiB, and a chunk of a row 0.4."""
    b, n, h, g, e, s = 64, 1, 9, 3, 64, 4096
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    i = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    case = {"q": f(b * n, h, e), "row": i(b * n), "node": i(b * n), "tree_k": f(b, n, g, e),
            "tree_v": f(b, n, g, e), "parent": i(b, n), "cache_k": f(b, g, e, s),
            "cache_v": f(b, g, s, e), "length": i(b), "slot": i(b) if through_slot else None}
    compiled = jax.jit(lambda case: tree_attention(
        **case, scale=1.0, implementation="xla")).lower(case).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 << 20


@each
def test_nodes_off_the_path_are_inert(implementation: str) -> None:
    case = base()
    at = np.flatnonzero(np.asarray(case["node"]) == 5)  # sees 0, 1, 3 and itself
    clean = configured(case, implementation)[at]
    others = np.isin(np.arange(6), [2, 4])[None, :, None, None]
    dirty = case | {name: jnp.where(others, 50.0, case[name]) for name in ("tree_k", "tree_v")}
    np.testing.assert_array_equal(configured(dirty, implementation)[at], clean)


@each
def test_bitwise_repeatable(implementation: str) -> None:
    case = base()
    first = configured(case, implementation)
    again = {name: jax.tree.map(jnp.copy, x) for name, x in case.items()}
    np.testing.assert_array_equal(configured(again, implementation), first)


SHARED = dict(lengths=(0, 5, 20, 3, 9), nodes=3, groups=1, slots=6, prefix=(33, 40, 0),
              members=[[3, 0, -1], [1, -1, -1], [4, -1, -1]])


@each
@each_dtype
def test_garbage_beyond_a_shared_prefix_is_inert(dtype: str, implementation: str) -> None:
    case = make(**SHARED, dtype=dtype)
    assert_near(configured(case, implementation, 7), oracle(case, 7), case)
    inside = np.arange(40)[None] < np.asarray(case["prefix"].length)[:, None]
    dirty = case["prefix"]._replace(
        k=jnp.where(inside[:, None, None], case["prefix"].k, 1e6),
        v=jnp.where(inside[:, None, :, None], case["prefix"].v, -1e6))
    np.testing.assert_array_equal(configured(case | {"prefix": dirty}, implementation, 7),
                                  configured(case, implementation, 7))


@each_kernel
@pytest.mark.parametrize("splits,window", [
    (3, None), *(pytest.param(s, w, marks=full) for s in (2, 5) for w in (None, 140))])
def test_split_equals_unsplit(splits: int, window: int | None, implementation: str) -> None:
    case = keep(base(lengths=(0, 1, 160, 129)), [(0, 0), (0, 2), (1, 1), (2, 5), (3, 4)])
    split = configured(case, implementation, window, splits=splits)
    assert_near(split, configured(case, implementation, window), case)
    assert_near(split, oracle(case, window), case)


@each_kernel
@each_dtype
def test_split_equals_unsplit_with_a_shared_prefix(dtype: str, implementation: str) -> None:
    case = make(**SHARED, dtype=dtype)
    assert_near(configured(case, implementation, splits=3), oracle(case), case)


@each
def test_sharded_over_rows_and_heads(implementation: str) -> None:
    """Kernels do not partition: shard_map gives each device its rows and its heads."""
    need_devices(4)
    case = make(lengths=(4, 20, 9, 0), nodes=2, groups=2)
    order = np.lexsort((np.asarray(case["node"]), np.asarray(case["row"])))
    case |= {name: case[name][order] for name in ("q", "row", "node")}
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(q: Any, row: Any, node: Any, parent: Any, length: Any, *kv: Any) -> jax.Array:
        return tree_attention(q, row % 2, node, *kv[:2], parent, *kv[2:], length, scale=0.25,
                              implementation=implementation, interpret=INTERPRET)

    rows, tree, cache = P("rows"), P("rows", None, "heads"), P("rows", "heads")
    sharded = jax.shard_map(
        local, mesh=mesh, check_vma=False, out_specs=P("rows", "heads"),
        in_specs=(P("rows", "heads"), rows, rows, rows, rows, tree, tree, cache, cache))
    names = ("q", "row", "node", "parent", "length", "tree_k", "tree_v")
    with attempted(implementation):
        actual = jax.jit(sharded)(*(case[n] for n in names), case["cache_k"][0], case["cache_v"][0])
    assert_near(np.asarray(actual), oracle(case), case)


@pytest.mark.parametrize("way", [{"in_place": 0}, *(pytest.param(way, marks=full) for way in (
    {"in_place": 512}, {"in_place": 0, "abreast": 1}))], ids=str)
def test_xla_is_checked_by_shard_map(way: dict[str, int]) -> None:
    """What a loop carries has to vary over the mesh as its inputs do, prefixes included."""
    need_devices(2)
    case = make(lengths=(4, 9), nodes=2, groups=2, prefix=(33,), members=[[1, 0]])
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2],
                         axis_types=(jax.sharding.AxisType.Auto,))
    tree, heads = P(None, None, "heads"), P(None, "heads")
    specs = {name: heads for name in ("q", "cache_k", "cache_v")} | {
        "tree_k": tree, "tree_v": tree, "prefix": Prefix(heads, heads, P(), P())}
    sharded = jax.shard_map(
        lambda c: tree_attention(**c, scale=0.25, implementation="xla", config=way), mesh=mesh,
        in_specs=({name: specs.get(name, P()) for name in case},), out_specs=heads)
    assert_near(np.asarray(jax.jit(sharded)(case)), oracle(case), case)


simulated = pytest.mark.skipif(not INTERPRET, reason="a simulation of a TPU, on CPUs only")
POISON = pltpu.InterpretParams(uninitialized_memory="nan")  # which finds races of DMAs, too


@simulated
@pytest.mark.parametrize("sizes", [
    dict(lengths=(4, 0, 9), slots=5, nodes=9, repeats=4, packed=5),
    dict(lengths=(63, 130, 300), nodes=2, groups=1, segments=(64, 64, 192)),
    dict(lengths=(3, 140), nodes=8, cache=256, dtype="bfloat16")], ids=range(3))
def test_attention_reads_only_what_was_written(sizes: dict[str, Any]) -> None:
    case = make(**sizes)
    actual = tree_attention(**case, scale=case["q"].shape[2] ** -0.5, implementation="pallas",
                            interpret=POISON, config=CONFIGS["pallas"])
    assert_near(np.asarray(actual, np.float32), oracle(case), case)


@simulated
def test_memory_that_is_read_before_it_is_written_is_noticed() -> None:
    """What the test above relies on."""
    def kernel(out: Any, scratch: Any) -> None:
        out[...] = scratch[...]

    actual = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
                            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)], interpret=POISON)()
    assert np.isnan(actual).all()
