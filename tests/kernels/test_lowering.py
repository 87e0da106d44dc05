"""Kernels lower for the devices that this machine lacks, at every shape that the README declares.

Lowering stops where the device's compiler begins: it shows that a kernel is expressible, that its
blocks fit the tiling of a TPU, and that Triton IR comes out; not that it runs, nor how fast.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.head_argmax import head_argmax
from specrl_kernels.tree_attention import Prefix, tree_attention

# (query heads, key-value heads, head size)
MODELS = {
    "Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128), "Qwen2.5-7B": (28, 4, 128),
    "SmolLM2-135M": (9, 3, 64), "SmolLM2-1.7B": (32, 32, 64), "Gemma-2-2B": (8, 4, 256)}
# (rows, nodes, slots of the segments)
SHAPES = {
    "one row, one node": (1, 1, (512,)), "one long row": (1, 8, (32768,)),
    "a batch": (64, 8, (4096,)), "wide trees": (8, 64, (4096,)), "short": (256, 4, (512,)),
    "segments": (16, 8, (64, 64, 64, 64, 128, 192, 256, 192)), "ragged": (16, 8, (1088,))}
TARGETS = {"pallas": ("tpu", "tpu_custom_call"), "pallas_triton": ("cuda", "__gpu$xla.gpu.triton")}
CALLS = {"pallas": 1, "pallas_triton": 2, "triton": 2}  # of attention; on GPUs one joins shares


def jax_tritons_plugin() -> Any:
    """The part of JAX's CUDA plugin that jax-triton lowers with; None if either is missing."""
    try:
        from jax_triton import triton_lib
    except ImportError:
        return None
    plugin = triton_lib.triton_kernel_call_lib
    return plugin if hasattr(plugin, "get_compute_capability") else None


if jax_tritons_plugin() is not None and jax.__version_info__ < (0, 12):
    TARGETS["triton"] = ("cuda", "triton_kernel_call")
each = pytest.mark.parametrize("implementation", TARGETS)


def arguments(model: str, shape: str, dtype: Any) -> dict[str, Any]:
    """Abstract inputs of `tree_attention`."""
    (h, g, e), (b, n, sizes), w = MODELS[model], SHAPES[shape], SHAPES[shape][0] * SHAPES[shape][1]
    f = lambda *dims: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    i = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)  # noqa: E731
    return {"q": f(w, h, e), "row": i(w), "node": i(w), "tree_k": f(b, n, g, e),
            "tree_v": f(b, n, g, e), "parent": i(b, n), "length": i(b), "slot": i(b),
            "cache_k": [f(b, g, e, s) for s in sizes], "cache_v": [f(b, g, s, e) for s in sizes]}


@contextlib.contextmanager
def no_device(implementation: str) -> Iterator[None]:
    """A mesh that says which GPU is meant: JAX 0.11 and later lower Triton for no other.

    jax-triton does not look at it but asks the CUDA plugin, which has no device to ask.
    """
    if TARGETS[implementation][0] != "cuda":
        yield
        return
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_abstract_mesh(AbstractMesh((), (), abstract_device=device)))
        if implementation == "triton":
            stack.enter_context(mock.patch.object(
                jax_tritons_plugin(), "get_compute_capability", lambda device: 90))
        yield


def lower(implementation: str, args: dict[str, Any], **options: Any) -> str:
    """The exported module of `tree_attention`."""
    return exported(implementation, tree_attention, args, scale=0.1, **options)


def exported(implementation: str, function: Any, args: dict[str, Any], **options: Any) -> str:
    """A call's exported module; Triton's custom call has no promise to stay."""
    platform, target = TARGETS[implementation]
    call = jax.jit(lambda a: function(
        **a, implementation=implementation, platform="gpu" if platform == "cuda" else platform,
        **options))
    with no_device(implementation):
        module = jax.export.export(call, platforms=[platform], disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(target + version)
            for version in ("", "_ffi")])(args)  # jax-triton 0.4 calls its target _ffi
    return module.mlir_module()


def declared() -> list[Any]:
    """(model, shape, dtype): every one; the fast tests take some, in either dtype by turns."""
    actual = []
    for (m, model), (s, shape), (d, dtype) in itertools.product(
            enumerate(MODELS), enumerate(SHAPES), enumerate((jnp.bfloat16, jnp.float32))):
        fast = (model == "Qwen2.5-7B" or shape == "one row, one node") and (m + s) % 2 == d
        actual.append(pytest.param(model, shape, dtype, marks=[] if fast else [pytest.mark.full],
                                   id=f"{model}-{shape}-{dtype.__name__}"))
    return actual


@each
@pytest.mark.parametrize("model,shape,dtype", declared())
def test_every_declared_shape_lowers(model: str, shape: str, dtype: Any, implementation: str
                                     ) -> None:
    text = lower(implementation, arguments(model, shape, dtype))
    assert TARGETS[implementation][1] in text


@each
@pytest.mark.parametrize("options", [{"window": 1024}, {"config": {"splits": 2}}], ids=str)
def test_windows_and_splits_lower(options: dict[str, Any], implementation: str) -> None:
    args = arguments("Qwen2.5-7B", "a batch", jnp.bfloat16)
    assert lower(implementation, args, **options).count("custom_call @" + TARGETS[
        implementation][1]) == CALLS[implementation]


@each
def test_shared_prefix_lowers_to_a_second_call(implementation: str) -> None:
    args = arguments("Qwen2.5-1.5B", "a batch", jnp.bfloat16)
    f, i = jnp.bfloat16, jnp.int32
    args["prefix"] = Prefix(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((8, 2, 128, 1024), f), ((8, 2, 1024, 128), f), ((8,), i), ((8, 8), i))))
    text = lower(implementation, args)
    assert text.count("custom_call @" + TARGETS[implementation][1]) == 2 * CALLS[implementation]


def test_too_many_segments_for_vmem_are_refused() -> None:
    args = arguments("SmolLM2-1.7B", "a batch", jnp.float32)
    size = [128] * 64
    args |= {name: [jax.ShapeDtypeStruct((64, 32, *((64, s) if name == "cache_k" else (s, 64))),
                                         jnp.float32) for s in size]
             for name in ("cache_k", "cache_v")}
    with pytest.raises(Unsupported, match="64 segments .* do not fit into VMEM"):
        lower("pallas", args)


@pytest.mark.parametrize("features,vocab,width,dtype", [
    (896, 151936, 16, jnp.bfloat16), (3584, 75968, 128, jnp.bfloat16), (640, 49152, 1, jnp.float32),
    (1536, 2047, 130, jnp.float32)])
def test_draw_from_a_head_lowers(features: int, vocab: int, width: int, dtype: Any) -> None:
    """For a TPU `test_compiled_for_tpu.py` compiles it."""
    of, implementation = jax.ShapeDtypeStruct, "pallas_triton"
    text = exported(implementation, head_argmax, {
        "hidden": of((features, width), dtype), "head": of((vocab, features), dtype),
        "temperature": of((width,), jnp.float32), "key": of((width, 2), jnp.uint32),
        "position": of((width,), jnp.int32)})
    assert text.count("custom_call @" + TARGETS[implementation][1]) == 1
