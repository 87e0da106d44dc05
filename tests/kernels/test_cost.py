"""Cost estimates of kernels against the blocks that their index maps visit."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from specrl_kernels.tree_attention import tree_attention


def visited(call: Callable[[], Any]) -> list[tuple[pl.CostEstimate, int]]:
    """(estimate, bytes of the blocks that its grid moves) of each kernel of a call.

    The kernels do not run. A block is moved where its index differs from that of the step before.
    """
    found = []

    def record(kernel: Any, *, out_shape: Any, cost_estimate: pl.CostEstimate, grid: Any = None,
               in_specs: Any = None, out_specs: Any = None, grid_spec: Any = None, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            grids, ins, outs, scalars = grid, in_specs, out_specs, 0
            if grid_spec is not None:
                grids, ins, outs = grid_spec.grid, grid_spec.in_specs, grid_spec.out_specs
                scalars = grid_spec.num_scalar_prefetch
            prefetched = [np.asarray(a) for a in args[:scalars]]
            steps = list(itertools.product(*(range(int(n)) for n in grids)))
            dtypes = [a.dtype for a in (*args[scalars:], *out_shape)]
            moved = sum(
                moves(spec, steps, prefetched) * int(np.prod(spec.block_shape)) * dtype.itemsize
                for spec, dtype in zip((*ins, *outs), dtypes, strict=True))
            found.append((cost_estimate, moved))
            return [jnp.zeros(o.shape, o.dtype) for o in out_shape]

        return run

    with mock.patch.object(pl, "pallas_call", record):
        call()
    return found


def moves(spec: pl.BlockSpec, steps: list[tuple[int, ...]], scalars: list[np.ndarray]) -> int:
    """How often the block that a spec names changes along the grid."""
    at = [tuple(int(i) for i in spec.index_map(*step, *scalars)) for step in steps]
    return sum(i == 0 or at[i] != at[i - 1] for i in range(len(at)))


def attention(rows: int, nodes: int, head: int, slots: tuple[int, ...],
              layers: tuple[int, ...] = (), **options: Any) -> Any:
    g, r = 2, 3
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    at = jnp.arange(rows * nodes)
    return tree_attention(
        draw(rows * nodes, g * r, head), at // nodes, at % nodes, draw(rows, nodes, g, head),
        draw(rows, nodes, g, head), jnp.zeros((rows, nodes), jnp.int32),
        [draw(rows, *layers, g, head, s) for s in slots],
        [draw(rows, *layers, g, s, head) for s in slots],
        jnp.full(rows, sum(slots)), scale=0.1, implementation="pallas", platform="tpu", **options)


@pytest.mark.parametrize("rows,nodes,head,slots", [
    (2, 1, 64, (512,)), (3, 8, 128, (256, 256)), (2, 8, 64, (1024,))])
def test_attention_estimate_is_what_blocks_move(
        rows: int, nodes: int, head: int, slots: tuple[int, ...]) -> None:
    (estimate, moved), = visited(lambda: attention(rows, nodes, head, slots))
    assert estimate.bytes_accessed == pytest.approx(moved, rel=0.03)
    context = 2 * rows * 2 * head * 2 * sum(slots)
    assert estimate.bytes_accessed > context
    queries = -(-3 * nodes // 16) * 16
    keys = sum(slots) + -(-nodes // 16) * 16
    assert estimate.flops == 4 * rows * 2 * queries * head * keys


def test_attention_estimate_is_of_one_layer() -> None:
    (alone, _), = visited(lambda: attention(2, 1, 64, (512,)))
    (one_of_four, _), = visited(lambda: attention(2, 1, 64, (512,), layers=(4,), layer=1))
    assert one_of_four == alone
