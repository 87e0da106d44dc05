"""The cached forward over trees equals the plain one over each node's path."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_arch, tiny_params
from specrl_kernels.dispatch import Device

from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture, RopeScaling
from specrl_jax.model.cache import SegmentedKV
from specrl_jax.model.transformer import Packing
from specrl_jax.structs import Cache

FORWARD = jax.jit(transformer.forward, static_argnums=0)
KINDS = {
    "llama": {},
    "llama3": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16), "tied": False, "head_dim": 8},
    "qwen2": {"qkv_bias": True, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True, "num_kv_heads": 4},
}


@functools.partial(jax.jit, static_argnums=0)
def tree_logits(arch: Architecture, params: Any, cache: Cache, tokens: Any, position: Any,
                packing: Packing) -> Any:
    hidden, fresh, _ = transformer.tree_forward(arch, params, cache, tokens, position, packing)
    return transformer.logits(arch, params, hidden).T, fresh


def cache_of(arch: Architecture, params: Any, tokens: np.ndarray, length: np.ndarray,
             slots: int = 16, garbage: float = 7.0) -> Cache:
    """A cache that holds the first `length` of each row, and garbage behind; run as a chain."""
    batch, width = tokens.shape
    shape = (batch, arch.num_kv_heads, arch.head_dim, slots)
    empty = Cache(kv=SegmentedKV([([jnp.full(shape, garbage)],
                                   [jnp.full(shape, garbage).swapaxes(2, 3)])
                                  for _ in range(arch.num_layers)]),
                  length=jnp.zeros(batch, jnp.int32))
    chain = np.tile(np.maximum(np.arange(width, dtype=np.int32) - 1, 0), (batch, 1))
    position = jnp.asarray(np.tile(np.arange(width), batch))
    _, fresh = tree_logits(arch, params, empty, jnp.asarray(tokens.reshape(-1)), position,
                           pack_all(chain))
    seen = jnp.arange(slots)[None] < jnp.asarray(length)[:, None]
    room = ((0, 0), (0, 0), (0, 0), (0, slots - width))
    kv = []
    for pair in fresh:
        k, v = (jnp.pad(jnp.moveaxis(a.reshape(*a.shape[:2], batch, width), 2, 0), room)
                for a in pair)
        v = v.swapaxes(2, 3)
        kv.append(([jnp.where(seen[:, None, None, :], k, garbage)],
                   [jnp.where(seen[:, None, :, None], v, garbage)]))
    return Cache(kv=SegmentedKV(kv), length=jnp.asarray(length, jnp.int32))


def pack_all(parent: np.ndarray) -> Packing:
    batch, nodes = parent.shape
    index = np.arange(batch * nodes, dtype=np.int32)
    return Packing(row=jnp.asarray(index // nodes), node=jnp.asarray(index % nodes),
                   place=jnp.asarray(index.reshape(batch, nodes)), parent=jnp.asarray(parent))


def path_to(parent: np.ndarray, node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(int(parent[path[-1]]))
    return path[::-1]


@pytest.fixture(scope="module", params=[
    "llama", "qwen2", pytest.param("llama3", marks=pytest.mark.ci),
    pytest.param("qwen3", marks=pytest.mark.ci)])
def model(request: Any) -> tuple[Architecture, Any]:
    arch = tiny_arch(**KINDS[request.param])
    params = tiny_params(arch)
    if arch.qkv_bias:
        rng = np.random.default_rng(1)
        for layer in params["layers"]:
            layer["qkv_bias"] = jnp.asarray(rng.normal(size=layer["qkv_bias"].shape), jnp.float32)
    return arch, params


def test_every_node_equals_the_plain_forward_of_its_path(model: Any) -> None:
    arch, params = model
    rng = np.random.default_rng(0)
    length = np.asarray([0, 1, 7])
    parent = np.asarray([[0, 0, 0, 1, 1, 3], [0, 0, 1, 2, 3, 4], [0] * 6], np.int32)
    context, nodes = rng.integers(0, 24, (3, 8)), rng.integers(0, 24, parent.shape)
    depth = np.asarray([[len(path_to(p, n)) - 1 for n in range(6)] for p in parent])
    position = (length[:, None] + depth).reshape(-1)
    got, _ = tree_logits(arch, params, cache_of(arch, params, context, length),
                         jnp.asarray(nodes.reshape(-1)), jnp.asarray(position), pack_all(parent))
    whole, ends = np.zeros((18, 16), np.int32), []
    for i in range(18):
        b, path = i // 6, path_to(parent[i // 6], i % 6)
        said = [*context[b, : length[b]], *nodes[b, path]]
        whole[i, : len(said)] = said
        ends.append(len(said))
    want = np.asarray(FORWARD(arch, params, whole, jnp.asarray(ends)))
    want = want[np.arange(18), np.asarray(ends) - 1]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_prefill_and_decoding_equal_the_full_forward(model: Any) -> None:
    arch, params = model
    tokens, length = np.random.default_rng(2).integers(0, 24, (2, 12)), np.asarray([3, 5])
    want = np.asarray(FORWARD(arch, params, tokens, jnp.asarray([12, 12])))
    cache = cache_of(arch, params, tokens, length)
    packing = pack_all(np.zeros((2, 1), np.int32))
    for step in range(6):
        at = length + step
        got, fresh = tree_logits(arch, params, cache, jnp.asarray(tokens[[0, 1], at]),
                                 cache.length, packing)
        np.testing.assert_allclose(got, want[[0, 1], at], rtol=0, atol=1e-4)
        kv = []
        for ((k,), (v,)), (new_k, new_v) in zip(cache.kv.layers, fresh, strict=True):
            for b in range(2):
                k = k.at[b, :, :, at[b]].set(new_k[..., b])
                v = v.at[b, :, at[b]].set(new_v[..., b])
            kv.append(([k], [v]))
        cache = Cache(kv=SegmentedKV(kv), length=cache.length + 1)


def test_what_a_packing_leaves_out_changes_nothing(model: Any) -> None:
    arch, params = model
    rng = np.random.default_rng(3)
    parent = np.asarray([[0, 0, 1, 1], [0, 0, 0, 2]], np.int32)
    cache = cache_of(arch, params, rng.integers(0, 24, (2, 6)), np.asarray([4, 6]))
    nodes = rng.integers(0, 24, (2, 4))
    depth = np.asarray([[0, 1, 2, 2], [0, 1, 1, 2]])
    position = np.asarray([[4], [6]]) + depth
    full, _ = tree_logits(arch, params, cache, jnp.asarray(nodes.reshape(-1)),
                          jnp.asarray(position.reshape(-1)), pack_all(parent))
    row, node = np.asarray([0, 0, 0, 1, 1, 0]), np.asarray([0, 1, 3, 0, 2, 0])
    place = np.zeros((2, 4), np.int32)
    place[row[:5], node[:5]] = np.arange(5)
    packing = Packing(row=jnp.asarray(row), node=jnp.asarray(node), place=jnp.asarray(place),
                      parent=jnp.asarray(parent))
    some, _ = tree_logits(arch, params, cache, jnp.asarray(nodes[row, node]),
                          jnp.asarray(position[row, node]), packing)
    want = np.asarray(full).reshape(2, 4, -1)[row, node]
    np.testing.assert_allclose(some, want, rtol=0, atol=1e-4)


def test_padding_behind_a_row_changes_nothing(model: Any) -> None:
    arch, params = model
    tokens = np.random.default_rng(4).integers(0, 24, (2, 9))
    other = np.where(np.arange(9)[None] < np.asarray([[4], [9]]), tokens, 0)
    one, two = (np.asarray(FORWARD(arch, params, x, jnp.asarray([4, 9]))) for x in (tokens, other))
    np.testing.assert_array_equal(one[0, :4], two[0, :4])
    np.testing.assert_array_equal(one[1], two[1])


def test_what_a_tpus_attention_reads_is_what_others_read(
        model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, params = model
    rng = np.random.default_rng(0)
    x, position = rng.normal(size=(arch.hidden_size, 7)).astype(np.float32), jnp.arange(3, 10)
    layer = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype),
                         params["layers"][0])
    rotation = transformer.rotations(arch, position)
    expected = transformer.attention_inputs(arch, layer, x, rotation, decode=True)
    called: list[Any] = []
    real = transformer._split_in_lanes
    monkeypatch.setattr(transformer, "_split_in_lanes", lambda *args: (
        called.append(args), real(*args))[1])
    monkeypatch.setattr(transformer, "traced_for", lambda: Device("tpu", "TPU v5 lite"))
    actual = transformer.attention_inputs(arch, layer, x, rotation, decode=True)
    assert called and [a.shape for a in actual] == [a.shape for a in expected]
    for mine, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5)
