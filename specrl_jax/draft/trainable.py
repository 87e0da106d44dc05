"""What a drafter gives so that `distill/` can train it, and what its loss is given.

A trainable drafter's weights are {"weights": the tree that learns, "vocab": i32[Vd] ascending token
ids that it knows}. It needs no change to `distill/`: `loss` is its own function, which may hand its
predictions to `targets.loss` for the losses of `distill.loss`.

Shapes: `b` sequences of a micro-batch, `S` columns of prompt and response, `T` response tokens,
`J` draft depths, `Vd` draft vocabulary, `F` model width, `A` tapped layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from flax import struct

from specrl_jax.structs import Array, DrafterParams, Metrics, PyTree


class DraftInputs(struct.PyTreeNode):
    """What a drafter may read of a micro-batch and of the actor."""

    tokens: Array  # i32[b, S] prompt and response, right-padded
    length: Array  # i32[b] of both; 0 pads
    first: Array  # i32[b] column of the first response token
    taps: Array  # f[A * F, b, S] the actor's outputs of the tapped layers
    embed: Array  # f[V, F] the actor's embedding
    head: Array  # f[Vd, F] the actor's output head, rows of the draft vocabulary
    window: int = struct.field(pytree_node=False)  # T

    def columns(self, offset: int) -> Array:
        """Returns i32[b, T], columns `offset` after each response token, clipped to 0..S-1."""
        return columns(self.first + offset, self.window, self.tokens.shape[1])

    def tokens_at(self, offset: int) -> Array:
        """Returns i32[b, T], the tokens of `columns(offset)`."""
        return jnp.take_along_axis(self.tokens, self.columns(offset), 1)


def columns(start: Array, count: int, total: int) -> Array:
    """Returns i32[b, count], columns from start i32[b] on, clipped to 0..total-1."""
    return jnp.clip(start[:, None] + jnp.arange(count)[None], 0, total - 1)


Outputs = Callable[[DrafterParams, DraftInputs, int], Sequence[Array]]
"""(params, inputs, J) -> J arrays [..., b, T]. Entry k of array j is what `logits` needs to predict
response token k + j, drafted at depth j by a row that has seen k response tokens."""

Logits = Callable[[DrafterParams, DraftInputs, Array], Array]
"""(params, inputs, some columns of an output [..., b, C]) -> f32[Vd, b, C]."""


class Targets(Protocol):
    """The actor's distribution at response tokens, see distill/teacher.py."""

    @property
    def depths(self) -> int:
        """J of distill.unroll."""
        ...

    def log_probs(self) -> Array:
        """Returns f32[Vd, b, T], whole in memory."""
        ...

    def loss(self, params: DrafterParams, outputs: Sequence[Array],
             logits: Callable[[DrafterParams, Array], Array]) -> tuple[Array, Metrics]:
        """Returns the loss that distill.loss names, computed in chunks of T, and its metrics."""
        ...


class TrainableDrafter(NamedTuple):
    """See the module's docstring; `from_predictions` makes one without a loss of its own.

    `loss` returns the micro-batch's share of a loss that sums over micro-batches, and sums over
    `targets`' valid positions: {"alpha": f32[J] acceptance rates, "chain": f32[] expected tokens of
    a chain}, as `targets.loss` does. `outputs` and `logits` let distill/ measure acceptance.
    `described` has a `model.architecture.Param` for each weight, by whose axes weights and moments
    are split over devices; None keeps them whole on each.
    """

    loss: Callable[[DrafterParams, DraftInputs, Targets], tuple[Array, Metrics]]
    vocab_size: int  # Vd
    taps: tuple[int, ...] = ()  # layers of the actor that it reads, 0-based
    outputs: Outputs | None = None
    logits: Logits | None = None
    described: PyTree = None


def from_predictions(outputs: Outputs, logits: Logits, vocab_size: int, taps: tuple[int, ...] = (),
                     described: PyTree = None) -> TrainableDrafter:
    """Returns a trainable drafter with the loss that distill.loss names."""
    def loss(params: DrafterParams, inputs: DraftInputs, targets: Targets) -> tuple[Array, Metrics]:
        return targets.loss(params, outputs(params, inputs, targets.depths),
                            lambda params, output: logits(params, inputs, output))

    return TrainableDrafter(loss, vocab_size, taps, outputs, logits, described)
