"""EAGLE-3 as `distill/` trains it: the training-time test of the paper (arXiv 2503.01840, 3.2)."""

import numpy as np

from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch, Params
from specrl_jax.draft.trainable import DraftInputs, TrainableDrafter, from_predictions
from specrl_jax.structs import Array

SMALL = 0.3


def trainable(arch: EagleArch) -> TrainableDrafter:
    """Returns what trains a head of `arch`; its outputs are the network's, f[F, b, T]."""
    def outputs(params: Params, inputs: DraftInputs, depths: int) -> list[Array]:
        features = eagle_model.project(params, inputs.taps)
        return eagle_model.unroll(arch, params, inputs.embed, features, inputs.tokens,
                                  inputs.length, inputs.columns(-2), depths)

    return from_predictions(outputs, lambda params, inputs, output: eagle_model.logits(
        arch, params, inputs.head, output), arch.draft_vocab, arch.taps)


def warm_start(arch: EagleArch, params: Params, actor: Params, head: Array, scale: np.ndarray
               ) -> Params:
    """Returns a head that starts from the actor, worth several epochs (experiments/LOG.md).

    The feature is the highest tap plus a little of all taps, near norm 1 a coordinate. The MLP is
    the actor's last one if it has that size; so are the output head and its norm. What is added to
    the feature and to the logits starts small: an untrained head must not be confident.

    Args:
      params: random.
      head: f[Vd, F] the actor's rows of the draft vocabulary.
      scale: f32[A] root mean square of each tap.
    """
    last, f = actor["layers"][-1], arch.actor.hidden_size
    fc = params["fc"].reshape(f, len(scale), f) / np.std(params["fc"])
    fc = fc * (SMALL / (scale[:, None] * (len(scale) * f) ** 0.5))
    fc[:, -1] += np.eye(f) / scale[-1]
    taken = {"fc": fc.reshape(f, -1), "final_norm": SMALL * actor["final_norm"]}
    if last["down"].shape == params["down"].shape:
        taken |= {"gate_up": last["gate_up"], "mlp_norm": last["mlp_norm"],
                  "down": SMALL * last["down"]}
    if arch.own_head:
        taken["head"] = head
    return params | {name: np.asarray(a, np.float32) for name, a in taken.items()}
