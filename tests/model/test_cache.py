"""A cache holds what was written to it, in whatever layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_arch
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from specrl_jax.model import cache
from specrl_jax.model.cache import SegmentedKV
from specrl_jax.model.transformer import Packing

ARCH = tiny_arch()  # 2 layers, 2 heads of 4
L, B, G, E, D = 2, 3, 2, 4, 3
each = pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_kv(platform: str, slots: int = 150, seed: int = 0) -> Any:
    leaves, tree = jax.tree.flatten(cache.shapes(platform, ARCH, B, slots, jnp.float32))
    return tree.unflatten([jnp.asarray(normal(seed + i, *a.shape)) for i, a in enumerate(leaves)])


def plain(kv: Any) -> np.ndarray:
    """f[2, L, B, S, G, E] keys and values."""
    if isinstance(kv, SegmentedKV):
        k, v = (np.stack([np.concatenate(layer[i], 3 - i) for layer in kv.layers]) for i in (0, 1))
        return np.stack([np.moveaxis(k, 4, 2), np.moveaxis(v, 3, 2)])
    k, v = np.asarray(kv.k), np.asarray(kv.v)
    lies = (np.moveaxis(k, 4, 2), np.moveaxis(v, 4 if kv.transposed else 3, 2))
    return np.stack(lies).swapaxes(1, 2)


@each
@pytest.mark.parametrize("count", [(0, 0, 0), (1, 1, 1), (4, 0, 2), (2, 3, 4)])
def test_append_writes_the_committed_path(platform: str, count: tuple[int, ...]) -> None:
    kv, new = random_kv(platform), normal(9, D + 1, L, 2, G, E, B)
    before, length = plain(kv), [0, 62, 150 - D - 1]
    got = plain(jax.jit(lambda kv, new: kv.append(new, jnp.asarray(length), jnp.asarray(count)))(
        kv, new))
    for b in range(B):
        end = length[b] + count[b]
        np.testing.assert_array_equal(got[:, :, b, : length[b]], before[:, :, b, : length[b]])
        np.testing.assert_array_equal(got[:, :, b, length[b] : end], np.moveaxis(
            new[: count[b], ..., b], (0, 1, 2), (2, 1, 0)))
        assert np.isfinite(got[:, :, b, end:]).all()


@each
def test_append_keeps_what_is_not_committed_out(platform: str) -> None:
    kv, new, count = random_kv(platform), normal(9, D + 1, L, 2, G, E, B), jnp.asarray([2, 0, 4])
    left_out = np.arange(D + 1)[:, None] >= np.asarray(count)[None]
    dirty = np.where(left_out[:, None, None, None, None], np.nan, new)
    clean, other = (kv.append(jnp.asarray(x), jnp.asarray([0, 5, 60]), count) for x in (new, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, other)


def fresh(form: str, prompts: int, width: int) -> tuple[Any, np.ndarray]:
    """Prompts' keys and values as a list of layers or stacked, and f[2, L, p, P', G, E]."""
    kv = normal(5, 2, L, G, E, prompts, width)
    wanted = np.moveaxis(kv, (4, 5), (2, 3))
    k, v = jnp.asarray(kv[0]), jnp.asarray(kv[1])
    return ((k, v) if form == "stacked" else list(zip(k, v, strict=True))), wanted


@each
@pytest.mark.parametrize("form", ["list", "stacked"])
def test_fill_writes_prompts_to_the_rows_that_ask(platform: str, form: str) -> None:
    kv, (new, wanted) = random_kv(platform), fresh(form, prompts=2, width=70)
    before, source = plain(kv), [1, -1, 0]
    got = plain(jax.jit(lambda kv, new: kv.fill(jnp.asarray(source), new))(kv, new))
    for b, at in enumerate(source):
        want = before[:, :, b].copy()
        if at >= 0:
            want[:, :, :70] = wanted[:, :, at]
        np.testing.assert_array_equal(got[:, :, b], want)


@each
def test_copy_and_select_move_whole_rows(platform: str) -> None:
    kv = random_kv(platform)
    before = plain(kv)
    got = plain(jax.jit(lambda kv: kv.copy(jnp.asarray([-1, 0, -1]), 70))(kv))
    want = before.copy()
    want[:, :, 1, :70] = before[:, :, 0, :70]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(plain(kv.select(jnp.asarray([2, 0]))), before[:, :, [2, 0]])


@each
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_attention_reads_the_layer_and_its_tree(platform: str, implementation: str | None) -> None:
    """Two nodes a row, the second below the first."""
    kv, q, new = random_kv(platform), normal(1, G, 2, E, 2 * B), normal(2, 2, G, E, 2 * B)
    index = np.arange(2 * B, dtype=np.int32)
    packing = Packing(row=jnp.asarray(index // 2), node=jnp.asarray(index % 2),
                      place=jnp.asarray(index.reshape(B, 2)), parent=jnp.zeros((B, 2), jnp.int32))
    length = [0, 64, 131]
    attend = kv.reader(ARCH, packing, jnp.asarray(length), implementation)
    for layer in range(L):
        at = layer if platform == "cpu" else jnp.int32(layer)  # a scan's index is an array
        got = attend(at, jnp.asarray(q), jnp.asarray(new[0]), jnp.asarray(new[1]))
        for w in range(2 * B):
            b, mine = w // 2, [2 * (w // 2), w][: 1 + w % 2]
            keys, values = (np.concatenate([old[: length[b]], np.moveaxis(own[..., mine], 2, 0)])
                            for old, own in zip(plain(kv)[:, layer, b], new, strict=True))
            for g in range(G):
                score = np.einsum("re,te->rt", q[g, ..., w], keys[:, g]) * E**-0.5
                weight = np.exp(score - score.max(1, keepdims=True))
                want = (weight / weight.sum(1, keepdims=True)) @ values[:, g]
                np.testing.assert_allclose(got[g, ..., w], want, rtol=0, atol=1e-5)


def primitives(jaxpr: Any) -> list[str]:
    """The primitives of a jaxpr and of those inside, except of kernels."""
    actual = []
    for equation in jaxpr.eqns:
        actual.append(equation.primitive.name)
        if actual[-1] == "pallas_call":
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=has_equations):
            actual += primitives(getattr(value, "jaxpr", value)) if has_equations(value) else []
    return actual


def has_equations(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_attention_of_an_accelerator_has_no_branch(platform: str, implementation: str | None
                                                   ) -> None:
    """Traced where there is no such device; unasked it is a kernel, by the mesh alone."""
    arch = tiny_arch(num_heads=2, head_dim=16)
    kv = cache.shapes(platform, arch, B, 600, jnp.bfloat16)
    index = np.arange(B, dtype=np.int32)
    packing = Packing(row=jnp.asarray(index), node=jnp.asarray(index * 0),
                      place=jnp.asarray(index[:, None]), parent=jnp.zeros((B, 1), jnp.int32))

    def attend(kv: Any, q: Any, k: Any, v: Any, length: Any, layer: Any) -> Any:
        return kv.reader(arch, packing, length, implementation)(layer, q, k, v)

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((2, 1, 16, B), (2, 16, B)))
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B,), ())]
    device = AbstractDevice(f"some {platform}", 1, platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        actual = primitives(jax.make_jaxpr(attend)(kv, q, k, k, *numbers).jaxpr)
    assert not {"while", "cond", "ffi_call"} & set(actual)
    assert ("pallas_call" in actual) == (implementation is None)
