"""Bad input of tree attention is refused by name, and refusals give reasons."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from specrl_kernels.dispatch import Unsupported
from specrl_kernels.tree_attention import Prefix, refusals, tree_attention
from specrl_kernels.tree_attention.api import IMPLEMENTATIONS
from tree_attention_cases import make

I32, BF16 = jnp.int32, jnp.bfloat16


def prefix(**other: Any) -> Prefix:
    """A good prefix of `make`'s one row, but for `other`."""
    return Prefix(**{"k": jnp.zeros((1, 2, 16, 8)), "v": jnp.zeros((1, 2, 8, 16)),
                     "length": jnp.zeros(1, I32), "rows": jnp.zeros((1, 1), I32)} | other)


@pytest.mark.parametrize("name,wrong,told", [
    ("row", jnp.zeros(3, I32), "row = "), ("parent", jnp.zeros((1, 5), I32), "parent = "),
    ("cache_v", jnp.zeros((1, 2, 4, 32)), "cache_v = "), ("cache_k", [], r"cache_k = \(\)"),
    ("cache_v", [jnp.zeros((1, 2, 32, 16))] * 2, "segments of cache_v = 2, expected 1"),
    ("q", jnp.zeros((4, 3, 16)), "q's heads"), ("q", jnp.zeros((4, 4)), "axes of q = 2"),
    ("slot", jnp.zeros(2, I32), "slot = "), ("tree_v", jnp.zeros((1, 4, 2, 5)), "tree_v = "),
    ("length", jnp.zeros(1), "length is float32, expected int32"),
    ("q", jnp.zeros((4, 4, 16), jnp.float16), "q is float16, expected float32 or bfloat16"),
    ("cache_v", [jnp.zeros((1, 2, 32, 16), BF16)], "cache_v is bfloat16, expected q's float32"),
    ("prefix", prefix(k=jnp.zeros((1, 3, 16, 8))), "prefix.k = "),
    ("prefix", prefix(rows=jnp.zeros((2, 1), I32)), "lines of prefix.rows = 2, expected 1"),
    ("prefix", prefix(rows=jnp.zeros((), I32)), "axes of prefix.rows = 0, expected 2"),
    ("prefix", prefix(rows=jnp.zeros((1, 0), I32)), "prefix.rows = .* expected no axis of 0"),
    ("q", jnp.zeros((0, 4, 16)), r"q = \(0, 4, 16\), expected no axis of 0"),
    ("cache_k", [jnp.zeros((1, 2, 16, 0))], "cache_k = .* slots in each segment"),
    ("window", 0, "window = 0, expected at least 1"),
    ("implementation", "fast", "'fast': choose one of pallas, .*xla, reference"),
    ("platform", "fpga", "'fpga': choose one of cpu, gpu, tpu"),
    ("config", {"block": 128}, "name the implementation"),
    ("checked", True, "checked = True inside of jit"),
    ("slot", None, "cache_k has 4 rows for 1 rows: pass slot")])
def test_shapes_that_do_not_fit_are_refused_while_tracing(name: str, wrong: Any, told: str) -> None:
    args = make(slots=4 if name == "slot" and wrong is None else None) | {name: wrong}
    options = {name: args.pop(name) for name in ("window", "implementation", "platform", "config",
                                                 "checked") if name in args}
    with pytest.raises(ValueError, match=told):
        jax.eval_shape(lambda args: tree_attention(**args, scale=1.0, **options), args)


@pytest.mark.parametrize("name,wrong,told", [
    ("length", jnp.asarray([33], I32), r"length\[0\] = 33, expected 0 to 32: the cache holds 32"),
    ("parent", jnp.asarray([[0, 0, 2, 1]], I32), r"parent\[0, 2\] = 2, expected 0 to 1"),
    ("row", jnp.asarray([0, 0, 1, 0], I32), r"row\[2\] = 1, expected 0 to 0"),
    ("node", jnp.asarray([0, 1, 2, 4], I32), r"node\[3\] = 4, expected 0 to 3"),
    ("slot", jnp.asarray([3], I32), r"slot\[0\] = 3, expected 0 to 0"),
    ("prefix", prefix(length=jnp.asarray([9], I32)), r"prefix.length\[0\] = 9, expected 0 to 8"),
    ("prefix", prefix(rows=jnp.asarray([[1]], I32)), r"prefix.rows\[0, 0\] = 1"),
    ("prefix", prefix(rows=jnp.asarray([[0, 0]], I32)), "row 0 stands twice")])
def test_values_out_of_range_are_named_if_checked(name: str, wrong: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tree_attention(**(make() | {name: wrong}), scale=1.0, checked=True)


def test_good_values_pass_the_check() -> None:
    case = make(lengths=(0, 32), slots=3, prefix=(40,), members=[[1, -1]])
    assert tree_attention(**case, scale=1.0, checked=True).shape == case["q"].shape


def test_more_cache_rows_than_a_code_can_name_are_refused() -> None:
    big = {name: [jax.ShapeDtypeStruct((32769, 2, *size), jnp.float32)]
           for name, size in (("cache_k", (16, 128)), ("cache_v", (128, 16)))}
    with pytest.raises(Unsupported, match="a cache of 32769: at most 32768"):
        jax.eval_shape(lambda c: tree_attention(**c, scale=1.0, implementation="pallas",
                                                interpret=True), make(slots=2) | big)


NAMED = [  # (implementation, shapes of the case, config, what the line must name)
    ("pallas", {}, {"block": 0}, "multiple of 128"), ("pallas", {}, {"tile": 8}, "of 16"),
    ("pallas", {}, {"blok": 128}, "blok = 128: choose some of block, tile, splits"),
    ("pallas_triton", {}, {"warps": 3}, "warps are a power"),
    ("pallas_triton", {}, {"stages": 0}, "stage"),
    ("pallas_triton", {}, {"block": 24}, "powers of two"),
    ("pallas_triton", {}, {"splits": 0}, "split"),
    ("pallas_triton", dict(size=24), None, "heads of 24"),
    ("pallas_triton", dict(segments=(32, 8)), None, "a segment of 8 slots"),
    ("xla", {}, {"chunk": 0}, "chunk is at least 1"), ("reference", {}, {"block": 1}, "takes none")]


@pytest.mark.parametrize("implementation,shapes,config,reason", NAMED)
def test_named_implementation_refuses_what_it_cannot_do(
        implementation: str, shapes: dict[str, Any], config: dict[str, int] | None, reason: str
        ) -> None:
    with pytest.raises(Unsupported, match=reason):
        jax.eval_shape(lambda case: tree_attention(
            **case, scale=1.0, implementation=implementation, interpret=True, config=config),
            make(**shapes))


@pytest.mark.parametrize("platform,kernel", [("tpu", "pallas"), ("gpu", "pallas_triton")])
def test_refusals_say_why_and_what_is_taken(platform: str, kernel: str) -> None:
    actual = refusals(**make(), platform=platform)
    assert list(actual) == list(IMPLEMENTATIONS)
    assert actual[kernel] is None
    assert actual["xla"] is None and actual["reference"] is None
    on_cpu = refusals(**make())
    assert on_cpu["pallas"].startswith("needs a tpu, this is a cpu")
    assert on_cpu["pallas_triton"].startswith("needs a gpu, this is a cpu")
