"""The contract of tree attention, run against every implementation that this machine can run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.tree_attention import tree_attention

IMPLEMENTATIONS = ["xla", "reference"]
BLOCK = 8
CALL = jax.jit(tree_attention, static_argnames=("scale", "window", "implementation"))
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def oracle(case: dict[str, Any], window: int | None = None) -> np.ndarray:
    """Query by query and head by head in float64."""
    c = {name: np.asarray(x, np.float64 if np.asarray(x).dtype.kind == "f" else None)
         for name, x in case.items() if x is not None}
    heads, groups = c["q"].shape[1], c["tree_k"].shape[2]
    out = np.zeros_like(c["q"])
    for w, (b, node) in enumerate(zip(c["row"], c["node"], strict=True)):
        path = [int(node)]
        while path[-1] != 0:
            path.append(int(c["parent"][b, path[-1]]))
        path.reverse()
        slot, length = (c["slot"][b] if "slot" in c else b), int(c["length"][b])
        here = length + len(path) - 1
        for h in range(heads):
            g = h // (heads // groups)
            keys = [c["cache_k"][slot, g, :, s] for s in range(length)]
            keys += [c["tree_k"][b, i, g] for i in path]
            values = [c["cache_v"][slot, g, s] for s in range(length)]
            values += [c["tree_v"][b, i, g] for i in path]
            if window is not None:
                keys, values = (x[max(here - window + 1, 0):] for x in (keys, values))
            score = np.asarray(keys) @ c["q"][w, h] * 0.3
            weight = np.exp(score - score.max())
            out[w, h] = weight @ np.asarray(values) / weight.sum()
    return out


def make(lengths: Any = (5,), nodes: int = 4, groups: int = 2, repeats: int = 2, size: int = 4,
         cache: int = 4 * BLOCK, slots: int | None = None, packed: int | None = None, seed: int = 0,
         parent: Any = None) -> dict[str, Any]:
    """Random inputs; all nodes are packed, in any order, unless `packed` asks for fewer."""
    rng = np.random.default_rng(seed)
    b = len(lengths)
    normal = functools.partial(_normal, rng)
    if parent is None:
        parent = [[0] + [int(rng.integers(0, i)) for i in range(1, nodes)] for _ in range(b)]
    order = rng.permutation(b * nodes)[: packed or b * nodes]
    count = slots or b
    return {
        "q": normal(len(order), groups * repeats, size),
        "row": jnp.asarray(order // nodes, jnp.int32),
        "node": jnp.asarray(order % nodes, jnp.int32),
        "tree_k": normal(b, nodes, groups, size), "tree_v": normal(b, nodes, groups, size),
        "parent": jnp.asarray(parent, jnp.int32),
        "cache_k": normal(count, groups, size, cache),
        "cache_v": normal(count, groups, cache, size),
        "length": jnp.asarray(lengths, jnp.int32),
        "slot": None if slots is None else jnp.asarray(rng.permutation(slots)[:b], jnp.int32)}


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def call(case: dict[str, Any], implementation: str | None, window: int | None = None) -> np.ndarray:
    return np.asarray(CALL(**case, scale=0.3, window=window, implementation=implementation))


CASES = {
    "one node": dict(nodes=1),
    "one row, one node, nothing cached": dict(nodes=1, lengths=(0,)),
    "every length": dict(lengths=(0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK), nodes=3),
    "long cache": dict(lengths=(127, 128, 129, 300), nodes=3, cache=384),
    "an odd cache": dict(lengths=(3, 24, 17), cache=24),
    "multi-head": dict(repeats=1), "group of 3": dict(repeats=3), "group of 4": dict(repeats=4),
    "one key-value head": dict(groups=1, repeats=4),
    "slots permuted": dict(lengths=(4, 0, 9), slots=5, nodes=3),
    "some nodes packed": dict(lengths=(4, 0, 9), nodes=5, packed=6),
    "a deep chain": dict(nodes=9, parent=[[0, *range(8)]]),
    "a wide tree": dict(nodes=9, parent=[[0] * 9]),
}


@each
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, implementation: str) -> None:
    case = make(**CASES[name])
    np.testing.assert_allclose(call(case, implementation), oracle(case), rtol=0, atol=2e-6)


@each
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_hides_what_is_older(window: int, implementation: str) -> None:
    case = make(lengths=(0, 3, 11), nodes=5)
    np.testing.assert_allclose(
        call(case, implementation, window), oracle(case, window), rtol=0, atol=2e-6)


@each
def test_garbage_beyond_length_and_in_other_slots_is_inert(implementation: str) -> None:
    case = make(lengths=(0, 7, 8, 20), nodes=3, slots=6)
    clean = call(case, implementation)
    seen = np.zeros((6, 4 * BLOCK), bool)
    for b, slot in enumerate(np.asarray(case["slot"])):
        seen[slot, : int(case["length"][b])] = True
    for garbage in (1e6, -3.0, 0.0):
        dirty = case | {
            "cache_k": jnp.where(seen[:, None, None, :], case["cache_k"], garbage),
            "cache_v": jnp.where(seen[:, None, :, None], case["cache_v"], garbage)}
        np.testing.assert_array_equal(call(dirty, implementation), clean)


@each
@pytest.mark.parametrize("sizes", [(16, 16), (1, 30, 1), (8, 8, 4, 12)])
def test_a_cache_in_segments_is_the_whole_cache(sizes: tuple[int, ...], implementation: str
                                                ) -> None:
    case = make(lengths=(0, 1, 16, 20), nodes=3, slots=6)
    cut = np.cumsum(sizes)[:-1]
    split = case | {"cache_k": jnp.split(case["cache_k"], cut, 3),
                    "cache_v": jnp.split(case["cache_v"], cut, 2)}
    for window in (None, 3):
        np.testing.assert_allclose(call(split, implementation, window), oracle(case, window),
                                   rtol=0, atol=2e-6)


def test_a_segment_that_no_context_reaches_is_not_read() -> None:
    case = make(lengths=(0, 7), nodes=3)
    split = case | {"cache_k": jnp.split(case["cache_k"], [8], 3),
                    "cache_v": jnp.split(case["cache_v"], [8], 2)}
    clean = call(split, "xla")
    split["cache_v"][1] = jnp.full_like(split["cache_v"][1], jnp.nan)
    np.testing.assert_array_equal(call(split, "xla"), clean)


@each
def test_nodes_off_the_path_are_inert(implementation: str) -> None:
    parent = np.asarray([[0, 0, 0, 1, 2, 3]])  # node 5 sees 0, 1, 3 and itself
    case = make(nodes=6, parent=parent)
    at = int(np.flatnonzero(np.asarray(case["node"]) == 5)[0])
    clean = call(case, implementation)[at]
    others = np.isin(np.arange(6), [2, 4])[None, :, None, None]
    dirty = case | {name: jnp.where(others, 50.0, case[name]) for name in ("tree_k", "tree_v")}
    np.testing.assert_array_equal(call(dirty, implementation)[at], clean)


@each
def test_a_chain_is_causal_attention(implementation: str) -> None:
    n = 6
    case = make(lengths=(5,), nodes=n, parent=[[0, *range(n - 1)]])
    order = np.argsort(np.asarray(case["node"]))
    chain = call(case, implementation)[order]
    # The same tokens, cached up to each of them: one node over a longer prefix.
    keys = np.concatenate([np.asarray(case["cache_k"])[..., :5],
                           np.asarray(case["tree_k"]).transpose(0, 2, 3, 1)], -1)
    values = np.concatenate([np.asarray(case["cache_v"])[:, :, :5],
                             np.asarray(case["tree_v"]).transpose(0, 2, 1, 3)], 2)
    for i in range(n):
        one = case | {
            "q": case["q"][order[i]][None], "row": jnp.zeros(1, jnp.int32),
            "node": jnp.zeros(1, jnp.int32), "parent": jnp.zeros((1, 1), jnp.int32),
            "tree_k": case["tree_k"][:, i : i + 1], "tree_v": case["tree_v"][:, i : i + 1],
            "cache_k": jnp.asarray(keys), "cache_v": jnp.asarray(values),
            "length": jnp.asarray([5 + i])}
        np.testing.assert_allclose(chain[i], call(one, implementation)[0], rtol=0, atol=2e-6)


@each
def test_permuting_siblings_permutes_outputs(implementation: str) -> None:
    # Two subtrees below the root: (1, 3) and (2, 4); swapped by 1 <-> 2, 3 <-> 4.
    swap = np.asarray([0, 2, 1, 4, 3])
    case = make(nodes=5, parent=[[0, 0, 0, 1, 2]])
    other = case | {"tree_k": case["tree_k"][:, swap], "tree_v": case["tree_v"][:, swap],
                    "node": jnp.asarray(swap)[case["node"]]}
    np.testing.assert_allclose(
        call(other, implementation), call(case, implementation), rtol=0, atol=2e-6)


def test_implementations_agree_in_half_precision() -> None:
    case = make(lengths=(3, 20), nodes=4)
    half = {name: x.astype(jnp.bfloat16) if x is not None and x.dtype == jnp.float32 else x
            for name, x in case.items()}
    one, other = (call(half, name) for name in IMPLEMENTATIONS)
    assert one.dtype == other.dtype == jnp.bfloat16
    np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=0.03)


def test_without_a_name_the_first_that_can_is_taken() -> None:
    case = make()
    np.testing.assert_array_equal(call(case, None), call(case, IMPLEMENTATIONS[0]))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*xla.*reference"):
        call(make(), "fast")


@each
def test_a_named_one_that_cannot_raises(implementation: str) -> None:
    with pytest.raises(Unsupported, match="prefix"):
        tree_attention(**make(), prefix=1, scale=1.0, implementation=implementation)


def test_if_none_can_all_reasons_are_told() -> None:
    with pytest.raises(ExceptionGroup) as found:
        tree_attention(**make(), prefix=1, scale=1.0)
    reasons = [str(reason) for reason in found.value.exceptions]
    assert [r.split(":")[0] for r in reasons] == ["machine", *IMPLEMENTATIONS]
    assert all("prefix" in r for r in reasons)


@pytest.mark.parametrize("name,wrong", [
    ("row", jnp.zeros(3, jnp.int32)), ("node", jnp.zeros(9, jnp.int32)),
    ("parent", jnp.zeros((1, 5), jnp.int32)), ("length", jnp.zeros(2, jnp.int32)),
    ("cache_v", jnp.zeros((1, 2, 4, 32))), ("cache_k", jnp.zeros((1, 3, 4, 32))),
    ("q", jnp.zeros((4, 3, 4))), ("slot", jnp.zeros(2, jnp.int32)),
    ("tree_v", jnp.zeros((1, 4, 2, 5)))])
def test_shapes_that_do_not_fit_are_refused_by_name(name: str, wrong: Any) -> None:
    told = {"cache_k": "cache_v|cache_k", "q": "q's heads"}.get(name, name)
    with pytest.raises(ValueError, match=told):
        tree_attention(**(make() | {name: wrong}), scale=1.0)


def test_more_cache_rows_than_rows_need_slots() -> None:
    case = make(lengths=(1, 2), slots=4)
    with pytest.raises(ValueError, match="pass slot"):
        tree_attention(**(case | {"slot": None}), scale=1.0)
