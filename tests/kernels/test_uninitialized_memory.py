"""TPU kernels where memory that nobody wrote to holds NaN, as Pallas' TPU interpreter simulates.

The interpreter also finds races, of DMAs; no kernel has any of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from specrl_kernels.tree_attention import tree_attention
from tree_attention_cases import INTERPRET, assert_near, make, oracle

pytestmark = pytest.mark.skipif(not INTERPRET, reason="a simulation, on CPUs only")
POISON = pltpu.InterpretParams(uninitialized_memory="nan")
SHAPES = {
    "ragged rows": dict(lengths=(0, 5, 129), nodes=3, groups=1, cache=200),
    "dead nodes": dict(lengths=(4, 0, 9), nodes=9, repeats=4, packed=5),
    "permuted slots": dict(lengths=(4, 150), slots=4, nodes=2, cache=256),
    "segments": dict(lengths=(63, 130, 300), nodes=2, groups=1, segments=(64, 64, 192)),
    "heads of 128": dict(lengths=(20, 140), nodes=4, groups=1, size=128, cache=256),
    "half precision": dict(lengths=(3, 140), nodes=8, cache=256, dtype="bfloat16")}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_reads_only_what_was_written(name: str) -> None:
    case = make(**SHAPES[name])
    actual = tree_attention(**case, scale=case["q"].shape[2] ** -0.5, implementation="pallas",
                            interpret=POISON, config={"block": 128, "tile": 64})
    assert_near(np.asarray(actual, np.float32), oracle(case), case)


def test_memory_that_is_read_before_it_is_written_is_noticed() -> None:
    """What the tests above rely on."""
    def kernel(out: Any, scratch: Any) -> None:
        out[...] = scratch[...]

    actual = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
                            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)], interpret=POISON)()
    assert np.isnan(actual).all()
