"""The perturbed argmax for GPUs: a Triton program that jax-triton calls, one of it a block.

It cannot be lowered without JAX's CUDA plugin, nor traced by JAX 0.12 with 0.4.1.
"""

from collections.abc import Sequence
from typing import Any

import jax

from specrl_kernels.dispatch import Unsupported
from specrl_kernels.gumbel_argmax import gpu
from specrl_kernels.gumbel_argmax.drawn import Drawn
from specrl_kernels.triton_call import Launch, program_call

NAME = "triton"
PROGRAMS = "specrl_kernels.gumbel_argmax.triton_kernel"


def gumbel_argmax_triton(*args: Any, **options: Any) -> Drawn:
    """See `api.gumbel_argmax`."""
    if options["target"].interpret:
        raise Unsupported("a Triton program has no interpretation in JAX: it needs a GPU")
    return gpu.gumbel_argmax(_race, NAME, *args, **options)


def _race(inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct], *, size: int, count: int,
          truncated: bool, config: gpu.Config, interpret: bool) -> Sequence[jax.Array]:
    width, vocab = inputs[0].shape
    constants = dict(width=width, vocab=vocab, lanes=outputs[0].shape[2], size=size, count=count,
                     truncated=truncated)
    launch = Launch(PROGRAMS, "race", inputs, outputs, outputs[0].shape[:2], constants)
    return program_call(launch, config.warps, 1)
