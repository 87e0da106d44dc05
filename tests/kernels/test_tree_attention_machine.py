"""Tree attention as machine code: right, and bits that depend on a node's own past alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_attention_cases as cases
from kernel_tolerances import TOLERANCE
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.machine_code import runtime
from specrl_kernels.tree_attention import tree_attention
from specrl_kernels.tree_attention.api import refusals
from tree_attention_cases import assert_near, call, oracle

HEADS = {"groups of 3": (9, 3, 64), "alone": (2, 2, 16), "groups of 7": (14, 2, 128),
         "wide": (4, 2, 128), "widest": (2, 1, 256)}
SEGMENTS = {"one": (64,), "short": (16,), "several": (64, 16, 48)}


def make(heads, segments, lengths, nodes, **other):
    """Every node is packed; heads are (query heads, key-value heads, head size)."""
    h, g, e = heads
    return cases.make(lengths, nodes, g, h // g, e, segments=segments, **other)


def run(case):
    return call(case, "machine")


@pytest.mark.parametrize(("heads", "segments", "nodes"), [
    *((heads, "several", 5) for heads in HEADS), ("groups of 3", "short", 1),
    ("groups of 3", "one", 17)])
def test_machine_code_equals_the_oracle(heads, segments, nodes):
    total = sum(SEGMENTS[segments])
    case = make(HEADS[heads], SEGMENTS[segments], [0, 1, 15, 16, total - 1, total], nodes)
    assert_near(run(case), oracle(case), case)


def test_scores_far_apart_equal_the_oracle():
    case = make(HEADS["alone"], (16,), [9, 16], 3)
    case["q"] = case["q"] * 60  # and with it the rounding of the scores
    near = 15 * TOLERANCE["tree_attention", "float32"]
    np.testing.assert_allclose(run(case), oracle(case), rtol=0, atol=near)


def commit(case, path):
    """The case after the nodes of `path` were committed: the next node alone is left."""
    length, last = int(case["length"][0]), path[-1]
    keys, values = (np.concatenate(case[name], axis) for name, axis in
                    (("cache_k", 3), ("cache_v", 2)))
    for i, node in enumerate(path[:-1]):
        keys[0, :, :, length + i] = case["tree_k"][0, node]
        values[0, :, length + i] = case["tree_v"][0, node]
    cut = np.cumsum([k.shape[3] for k in case["cache_k"]])[:-1]
    packed = int(np.flatnonzero(np.asarray(case["node"]) == last)[0])
    return {"q": case["q"][packed:packed + 1], "row": case["row"][:1] * 0,
            "node": case["node"][:1] * 0,
            "tree_k": case["tree_k"][:, last:last + 1], "tree_v": case["tree_v"][:, last:last + 1],
            "parent": jnp.zeros((1, 1), jnp.int32),
            "cache_k": tuple(map(jnp.asarray, np.split(keys, cut, 3))),
            "cache_v": tuple(map(jnp.asarray, np.split(values, cut, 2))),
            "length": case["length"] + len(path) - 1}, packed


@pytest.mark.parametrize("length", [0, 1, 14, 16, 61, 63, 64, 70])
def test_ancestor_once_committed_counts_the_same(length):
    parent = [[0, 0, 1, 1, 3, 4, 2]]
    case = make(HEADS["groups of 3"], (64, 16, 16), [length], 7, parent=parent)
    whole = run(case)
    for path in ([0], [0, 1], [0, 1, 2], [0, 1, 3, 4, 5], [0, 1, 2, 6]):
        after, packed = commit(case, path)
        assert np.array_equal(run(after)[0], whole[packed])


def test_bits_do_not_depend_on_other_rows_segments_or_order():
    heads, lengths = HEADS["groups of 3"], [33, 0, 64, 7]
    case = make(heads, (64, 64), lengths, 6)
    want = run(case)
    order = np.random.default_rng(1).permutation(24)
    mixed = case | {name: case[name][order] for name in ("q", "row", "node")}
    assert np.array_equal(run(mixed), want[order])
    whole = case | {"cache_k": (jnp.concatenate(case["cache_k"], 3),),
                    "cache_v": (jnp.concatenate(case["cache_v"], 2),)}
    assert np.array_equal(run(whole), want)
    for b in range(4):
        alone = {name: jax.tree.map(lambda a, b=b: a[b:b + 1], case[name])
                 for name in ("tree_k", "tree_v", "parent", "cache_k", "cache_v", "length")}
        mine = np.asarray(case["row"]) == b
        alone |= {"q": case["q"][mine], "row": case["row"][mine] * 0, "node": case["node"][mine]}
        assert np.array_equal(run(alone), want[mine])


@pytest.mark.parametrize(("change", "options", "why"), [
    (dict(heads=(2, 1, 24)), {}, "E = 24"),
    (dict(segments=(64, 20)), {}, "segments = \\(64, 20\\)"), ({}, {"window": 4}, "window"),
    ({"dtype": "bfloat16"}, {}, "float32 only")])
def test_unsupported_call_is_refused_and_left_to_xla(change, options, why):
    case = make(**(dict(heads=(2, 1, 16), segments=(64,), lengths=[3], nodes=2) | change))
    with pytest.raises(Unsupported, match=why):
        tree_attention(**case, scale=0.3, implementation="machine", **options)
    assert np.array_equal(tree_attention(**case, scale=0.3, **options),
                          tree_attention(**case, scale=0.3, implementation="xla", **options))


@pytest.mark.parametrize(("features", "why"), [
    ({"avx2": True, "fma": True}, None), ({"avx": True}, "needs a CPU with fused multiply-add")])
def test_cpu_without_fma_takes_xla(features, why, monkeypatch):
    llvm = pytest.importorskip("llvmlite.binding")
    if not llvm.get_default_triple().startswith("x86_64"):
        pytest.skip("names features of x86 CPUs, and this one is another")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(features))
    monkeypatch.setattr(runtime, "compiled", runtime.compiled.__wrapped__)
    actual = refusals(**make((3, 1, 16), (48,), [3, 9], 2))
    assert actual["machine"] == why and actual["xla"] is None
    if why:
        assert next(name for name, reason in actual.items() if reason is None) == "xla"


@pytest.mark.parametrize(("heads", "nodes", "taken"), [
    ((9, 3, 64), 16, "machine"), ((28, 4, 128), 8, "machine"), ((8, 4, 256), 3, "machine"),
    ((8, 4, 256), 4, "xla"), ((32, 32, 64), 2, "machine"), ((32, 32, 64), 4, "xla")])
def test_unnamed_call_takes_the_faster_implementation(heads, nodes, taken):
    case = make(heads, (64,), [3, 9], nodes)
    actual = refusals(**case)
    assert next(name for name, reason in actual.items() if reason is None) == taken
    if taken == "xla":
        assert actual["machine"].startswith(f"xla is faster at {nodes} nodes a row")
    # Rows without packed nodes count: few nodes of a wide tree are few.
    few = case | {name: case[name][:2] for name in ("q", "row", "node")}
    assert refusals(**few)["machine"] is None


@pytest.mark.parametrize(("name", "value", "least"), [
    ("length", -5, 0), ("length", 100_000, 16), ("slot", 2**28, 1), ("slot", -(2**28), 0),
    ("parent", 2, 2), ("parent", 10**6, 2),  # a node that is its own parent ends, too
    ("parent", -7, 0), ("row", 2**28, 1), ("node", -(2**28), 0)])
def test_index_beyond_its_array_is_clipped(name, value, least):
    case = make((2, 1, 16), (16,), [16, 5], 3) | {"slot": jnp.arange(2, dtype=jnp.int32)}
    at = (-1,) if name != "parent" else (-1, -1)
    wild, tame = (case | {name: case[name].at[at].set(index)} for index in (value, least))
    assert np.array_equal(run(wild), run(tame))
