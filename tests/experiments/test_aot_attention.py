"""The counter of FLOPs and bytes on JAX's attention kernels, which carry no estimate."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from specrl_kernels import dispatch

from experiments.aot import count, findings
from experiments.aot.programs import model_of
from experiments.bench.planning.work import Model, update_work
from specrl_jax import sharding
from specrl_jax.config import load_config, override
from specrl_jax.model.flash import flash_attention
from specrl_jax.rl import programs as policy

BLOCK = {"tpu": 512, "gpu": 64}
PRODUCTS = {"forward": 2, "gradient": 2 + 4 + 3}  # of a block; keys and queries each score again
G, R, ROWS, TOKENS = 2, 2, 2, 1536


def inputs(head: int) -> list[jax.ShapeDtypeStruct]:
    half = lambda *s: jax.ShapeDtypeStruct((*s, head, ROWS, TOKENS), jnp.bfloat16)  # noqa: E731
    return [half(G, R), half(G), half(G), jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)]


def programs(platform: str) -> dict[str, Callable[..., Any]]:
    def forward(q: Any, k: Any, v: Any, segment: Any) -> Any:
        return flash_attention(platform, segment)(0, q, k, v)

    return {"forward": forward,
            "gradient": jax.grad(lambda *args: forward(*args).astype(jnp.float32).sum(), (0, 1, 2))}


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_attention_counts_products_of_visited_blocks(platform: str, which: str, head: int) -> None:
    """The softmax and what casts and sums around the kernel take is the rest."""
    found = count.work(jax.jit(programs(platform)[which]).trace(*inputs(head)))
    blocks = TOKENS // BLOCK[platform]
    pairs = G * R * ROWS * blocks * (blocks + 1) // 2 * BLOCK[platform] ** 2
    assert 1 < found.flops / (PRODUCTS[which] * 2 * head * pairs) < 1.07


@pytest.mark.ci
def test_splash_attention_moves_the_blocks_of_its_index_maps() -> None:
    """The kernel's own maps, called at each step; the counter knows only which axes they read. So
    the first block of keys, which stays for a second block of queries, counts twice."""
    moved = []

    def record(kernel: Any, *, grid_spec: Any, out_shape: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            scalars = [a if a is None else np.asarray(a)
                       for a in args[:grid_spec.num_scalar_prefetch]]
            steps = list(itertools.product(*map(range, grid_spec.grid)))
            specs = (*grid_spec.in_specs, *grid_spec.out_specs)
            arrays = (*args[grid_spec.num_scalar_prefetch:], *out_shape)
            moved.append(sum(
                changes(spec, steps, scalars) * array.dtype.itemsize
                * int(np.prod([n or 1 for n in spec.block_shape]))
                for spec, array in zip(specs, arrays, strict=True) if spec is not None))
            return [o if o is None else jnp.zeros(o.shape, o.dtype) for o in out_shape]

        return run

    real = [jnp.zeros(a.shape, a.dtype) for a in inputs(64)]
    with mock.patch.object(pl, "pallas_call", record), jax.disable_jit():
        programs("tpu")["gradient"](*real)
    kernels = kernels_of(jax.jit(programs("tpu")["gradient"]).trace(*inputs(64)).jaxpr.jaxpr)
    assert len(moved) == len(kernels) == 3
    for visited, eqn in zip(moved, kernels, strict=True):
        assert 1 <= count._causal(eqn).moved / (ROWS * visited) < 1.08


def changes(spec: pl.BlockSpec, steps: list[tuple[int, ...]], scalars: list[Any]) -> int:
    """How often the block that a spec names changes along the grid."""
    assert spec.index_map is not None
    at = [tuple(int(i) for i in spec.index_map(*step, *scalars)) for step in steps]
    return 1 + sum(a != b for a, b in itertools.pairwise(at))


def kernels_of(jaxpr: Any) -> list[Any]:
    """The kernels of a jaxpr and of what it calls."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.append(eqn)
        called = count._called(eqn)
        found += kernels_of(called.jaxpr) if called is not None else []
    return found


@pytest.mark.ci
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_update_counts_what_a_plan_says(
        platform: str, remat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head runs again in the backward pass, with remat or without."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 896, "num_hidden_layers": 2,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "max_position_embeddings": 16384}))
    config = override(load_config("tiny"), {
        "model.path": str(tmp_path), "model.dtype": "bfloat16", "learner.remat": remat,
        "rollout.max_prompt_tokens": 512, "rollout.max_new_tokens": 8192, "learner.micro_batch": 4,
        "learner.packing": "sequence"})
    device = dispatch.Device(platform, f"some {platform}")
    monkeypatch.setattr(dispatch, "traced_for", lambda: device)
    monkeypatch.setattr(sharding, "traced_device", lambda: device)
    monkeypatch.setattr(sharding, "platform", lambda mesh: platform)
    arch = model_of(config).arch
    update, = (p for p in policy.programs(config, arch, sharding.make_mesh(config.mesh))
               if p.name == "update")
    found = count.work(update.function.trace(*update.args), findings.loops_of(update))
    rows, row = config.sequences, 512 + 8192
    planned = update_work(Model(config, arch), rows * row, rows * row**2 / 2)
    assert 0.95 < found.flops / planned.flops < 1.10


def kernel(body: Callable[..., None], **options: Any) -> Any:
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    call = pl.pallas_call(body, out_shape=shape, grid=(4,), name="mine", **options)
    return jax.jit(call).trace(shape)


def test_kernel_without_branches_counts_by_its_body() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] @ x[...]

    assert count.work(kernel(body)) == count.Work(4 * 2 * 64**3, 2 * 4 * 64**2)


def test_kernel_with_unknown_branches_is_refused() -> None:
    def body(x: Any, out: Any) -> None:
        @pl.when(pl.program_id(0) > 1)
        def _() -> None:
            out[...] = x[...] @ x[...]

    with pytest.raises(count.NotCounted, match="kernel mine: it has no CostEstimate"):
        count.work(kernel(body))
    estimate = pl.CostEstimate(flops=5, transcendentals=0, bytes_accessed=7)
    assert count.work(kernel(body, cost_estimate=estimate)) == count.Work(5, 7)
