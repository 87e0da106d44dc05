"""The signature of the draw from an output head; selects an implementation."""

from collections.abc import Mapping

import jax

from specrl_kernels import dispatch
from specrl_kernels.dispatch import Interpret, kernel
from specrl_kernels.gumbel_argmax import Drawn
from specrl_kernels.head_argmax.xla import head_argmax_xla

IMPLEMENTATIONS = {"pallas": kernel("head_argmax", "pallas", "tpu"),
                   "pallas_triton": kernel("head_argmax", "pallas_triton", "gpu"),
                   "xla": head_argmax_xla}
"""In the order in which they are tried."""


def head_argmax(
    hidden: jax.Array,  # f[F, W]
    head: jax.Array,  # f[V, F]
    temperature: jax.Array,  # f32[W]; 0 is argmax without noise
    key: jax.Array,  # u32[W, 2] of each position's row
    position: jax.Array,  # i32[W] index of the token being drawn
    *,
    axis: str | None = None,
    implementation: str | None = None,
    interpret: Interpret = False,
    platform: str | None = None,
    config: Mapping[str, int] | None = None,
) -> Drawn:
    """Returns `gumbel_argmax` of the float32 logits head @ hidden, without truncation; K is 1.

    Tokens equal those of `gumbel_argmax` but for near ties, because sums of the product and of
    exponentials may have another order. Equal scores at temperature 0 give the lower id.

    Args:
      axis: the mesh axis that splits the vocabulary. `head` is then this device's part, inside a
        `jax.shard_map` over it, and the result is that of the whole vocabulary, on every device.
      implementation: one of IMPLEMENTATIONS; None takes the first that can.
      interpret: as in `tree_attention`.
      platform: "cpu", "gpu" or "tpu": if not that of the mesh in scope, see
        `dispatch.traced_for`.
      config: settings of the named implementation; None takes its heuristic.

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    width = hidden.shape[1]
    shapes = {"head": (head.shape[1:], hidden.shape[:1]),
              "temperature": (temperature.shape, (width,)),
              "key": (key.shape, (width, 2)), "position": (position.shape, (width,))}
    for name, (shape, wanted) in shapes.items():
        if shape != wanted:
            raise ValueError(f"{name}: {shape} should be {wanted}, as hidden is {hidden.shape}")
    target = dispatch.target(implementation, platform, interpret, config)
    return dispatch.choose(IMPLEMENTATIONS, implementation)(
        hidden, head, temperature, key, position, axis=axis, target=target)
