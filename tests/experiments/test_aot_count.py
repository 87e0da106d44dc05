"""The counter of FLOPs and bytes: against XLA's where XLA counts, and where it does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from specrl_kernels.tree_attention import tree_attention

from experiments.aot import count


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def both(function: Callable[..., Any], *args: Any) -> tuple[count.Work, dict[str, float]]:
    """(what is counted, XLA's cost analysis)."""
    traced = jax.jit(function).trace(*args)
    return count.work(traced), traced.lower().compile().cost_analysis()


def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.1
    weight = jax.nn.softmax(jnp.where(mask[None, None], score, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weight, v)


def norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * weight[None]


HEAD = of(2, 128, 4, 64)
PROGRAMS = {
    "a product": (lambda a, b: a @ b, of(256, 512), of(512, 1024)),
    "an MLP": (mlp, of(64, 256), of(256, 1024), of(256, 1024), of(1024, 256)),
    "attention": (attention, HEAD, HEAD, HEAD, of(128, 128, dtype=bool)),
    "a norm": (norm, of(512, 512), of(512)),
    "logits": (lambda x, w: jax.nn.logsumexp(x @ w, -1), of(64, 256), of(256, 8192)),
    "a gradient": (jax.grad(lambda w, x: (jax.nn.relu(x @ w) @ w.T).sum()), of(256, 512),
                   of(64, 256)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_count_without_loops_and_kernels_is_close_to_xlas(name: str) -> None:
    """A CPU's XLA runs a softmax in several passes, and leaves out what a gradient need not."""
    found, xla = both(*PROGRAMS[name])
    assert found.flops == pytest.approx(xla["flops"], rel=0.01 if name != "a gradient" else 0.35)
    least = {"attention": 0.4, "a norm": 0.6, "logits": 0.6}.get(name, 0.95)
    assert least < found.moved / xla["bytes accessed"] < 1.2


def test_products_in_bfloat16_read_half() -> None:
    half, whole = (count.work(jax.jit(lambda a, b: a @ b).trace(
        of(128, 256, dtype=dtype), of(256, 512, dtype=dtype))) for dtype in (
            jnp.bfloat16, jnp.float32))
    assert half.moved == whole.moved / 2 == 2 * (128 * 256 + 256 * 512 + 128 * 512)


def test_cast_operand_is_read_as_what_lies_in_memory() -> None:
    found = count.work(jax.jit(lambda a, b: a @ b.astype(jnp.float32)).trace(
        of(8, 256), of(256, 512, dtype=jnp.bfloat16)))
    assert found.moved == 4 * 8 * 256 + 2 * 256 * 512 + 4 * 8 * 512


def test_gather_from_a_transposed_array_reads_what_it_picks() -> None:
    """A compiler gives the view a layout; only what is computed is stored before it is picked."""
    view, made = (count.work(jax.jit(lambda a, i, f=f: jnp.take_along_axis(f(a).T, i, 0)).trace(
        of(64, 4096), of(1, 64, dtype=jnp.int32))).moved for f in (lambda a: a, jnp.exp))
    assert view < 8192 < 2 * 4 * 64 * 4096 < made


def test_optimizer_reads_and_writes_each_array_once() -> None:
    optimizer, params = optax.adamw(1e-3), of(1000, 1000)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = count.work(jax.jit(update).trace(
        params, jax.eval_shape(optimizer.init, params), params))
    assert found.moved == pytest.approx(7 * 4e6, rel=1e-3)  # reads p m v g, writes p m v


def test_scan_counts_its_body_as_often_as_it_runs() -> None:
    def scanned(x: Any, stacked: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]

    one = 2 * 8 * 128 * 128
    found, xla = both(scanned, of(8, 128), of(16, 128, 128))
    assert found.flops == 16 * one > 2 * xla["flops"]
    assert found.moved == 16 * 4 * (128 * 128 + 2 * 8 * 128)


@pytest.mark.parametrize("rounds", [1, 5])
def test_while_counts_the_stated_rounds(rounds: int) -> None:
    def loop(x: Any, w: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, x: x @ w, x)

    traced = jax.jit(loop).trace(of(8, 128), of(128, 128), of(dtype=jnp.int32))
    assert count.work(traced, rounds).flops == pytest.approx(rounds * 2 * 8 * 128 * 128, rel=1e-4)


def test_loop_with_literal_bounds_counts_them() -> None:
    traced = jax.jit(lambda x, w: jax.lax.while_loop(
        lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]).trace(
            of(8, 128), of(128, 128))
    assert count.work(traced).flops == pytest.approx(7 * 2 * 8 * 128 * 128, rel=1e-3)


def test_largest_branch_counts() -> None:
    def choose(which: Any, x: Any, w: Any) -> Any:
        return jax.lax.switch(which, [lambda: x, lambda: x @ w, lambda: (x @ w) @ w])

    found = count.work(jax.jit(choose).trace(of(dtype=jnp.int32), of(8, 128), of(128, 128)))
    assert found.flops == pytest.approx(2 * 2 * 8 * 128 * 128, rel=1e-3)


def test_update_in_place_moves_what_changes() -> None:
    def write(cache: Any, new: Any, at: Any) -> Any:
        return jax.lax.dynamic_update_slice(cache, new, (at, 0))

    found = count.work(jax.jit(write).trace(of(4096, 256), of(1, 256), of(dtype=jnp.int32)))
    assert found.moved == 2 * 4 * 256


def test_shard_map_counts_every_part_of_the_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:4])
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"),
                           axis_names={"a"}, check_vma=False)
    found = count.work(jax.jit(mapped).trace(of(8, 128), of(128, 128)))
    assert found.flops == 2 * 8 * 128 * 128
    assert found.moved == 4 * (2 * 8 * 128 + 2 * 128 * 128)  # each part reads the weights


@pytest.mark.parametrize("implementation,platform,config", [
    ("pallas", "tpu", None), ("pallas_triton", "gpu", {"splits": 1}),
    ("pallas_triton", "gpu", {"splits": 4})])
def test_kernel_counts_by_its_estimate(
        implementation: str, platform: str, config: dict[str, int] | None) -> None:
    """On a GPU, the context of a row may be divided among programs that a second kernel joins."""
    rows, nodes, heads, size, slots = 2, 4, 4, 64, 512
    half = lambda *shape: of(*shape, dtype=jnp.bfloat16)  # noqa: E731
    ints = lambda *shape: of(*shape, dtype=jnp.int32)  # noqa: E731
    traced = jax.jit(lambda *a: tree_attention(
        *a, scale=0.1, implementation=implementation, platform=platform, config=config)).trace(
            half(rows * nodes, heads, size), ints(rows * nodes), ints(rows * nodes),
            half(rows, nodes, heads, size), half(rows, nodes, heads, size), ints(rows, nodes),
            half(rows, heads, size, slots), half(rows, heads, slots, size), ints(rows))
    found = count.work(traced)
    least = 2 * 2 * rows * heads * size * slots
    assert found.flops > 2 * nodes * least / 2
    copied = 0 if config else least  # the values, which the TPU kernel reads transposed
    assert least + copied < found.moved < 1.4 * least + copied


def test_program_of_jax_triton_is_refused() -> None:
    program = core.Primitive("triton_kernel_call")
    program.def_abstract_eval(lambda x: x)
    with pytest.raises(count.NotCounted, match="an environment without jax-triton"):
        count.work(jax.jit(program.bind).trace(of(8)))
