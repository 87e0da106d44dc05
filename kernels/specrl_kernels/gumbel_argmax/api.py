"""The signature of the perturbed argmax; selects an implementation."""

from collections.abc import Mapping

import jax

from specrl_kernels import dispatch
from specrl_kernels.dispatch import anywhere
from specrl_kernels.gumbel_argmax import validate
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold
from specrl_kernels.gumbel_argmax.reference import gumbel_argmax_reference
from specrl_kernels.gumbel_argmax.xla import gumbel_argmax_xla

IMPLEMENTATIONS = {
    "xla": gumbel_argmax_xla,
    "reference": anywhere(gumbel_argmax_reference),
}
"""In the order in which they are tried."""


def gumbel_argmax(
    logits: jax.Array,  # f[W, V]
    temperature: jax.Array,  # f32[W]; 0 is argmax without noise
    key: jax.Array,  # u32[W, 2] of each position's row
    position: jax.Array,  # i32[W] index of the token being drawn
    threshold: Threshold | None = None,  # what truncation keeps; None keeps all
    *,
    count: int = 1,
    axis: str | None = None,
    implementation: str | None = None,
    platform: str | None = None,
    config: Mapping[str, int] | None = None,
    checked: bool = False,
) -> Drawn:
    """Draws the `count` tokens of highest logp[v] + G[v] at each position, with log-probabilities.

    `G` is `noise.gumbel(key, position, v)`, made inside and never stored: its integer bits are the
    same everywhere, the Gumbels equal to rounding. The first token is a draw from the distribution
    that temperature and threshold leave (the Gumbel-max trick), all of them a draw without
    replacement (Kool et al., arXiv 1903.06059). Ties go to the lower id.

    Args:
      count: K, tokens returned.
      axis: the mesh axis that splits the vocabulary. `logits` are then this device's part, inside a
        `jax.shard_map` over it; the result is that of the whole vocabulary, on every device. What
        travels is a few numbers a position.
      implementation: one of IMPLEMENTATIONS; None takes the first that can.
      platform: "cpu", "gpu" or "tpu": if not that of the mesh in scope, see
        `dispatch.traced_for`.
      config: settings of the named implementation; None takes the platform's.
      checked: checks values too, which works outside of jit only.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, or, if `checked`,
        values out of their range.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    args = (logits, temperature, key, position, threshold)
    validate.check_static(*args, count=count)
    if checked:
        validate.check_values(*args)
    target = dispatch.target(implementation, platform, config=config)
    return dispatch.choose(IMPLEMENTATIONS, implementation)(*args, count=count, axis=axis,
                                                            target=target)
