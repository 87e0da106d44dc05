"""Losses and gradients equal those of TRL's GRPO trainer, on the same tensors (`peers` extra)."""

import collections
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.config import RLConfig
from specrl_jax.rl import losses
from specrl_jax.rl.losses import CORRECTIONS

pytestmark = pytest.mark.full
B, T = 5, 7
RNG = np.random.default_rng(0)
LENGTHS = np.array([7, 1, 4, 6, 3])
MASK = np.arange(T) < LENGTHS[:, None]
LOGPROB = -RNG.gamma(2.0, 1.0, (B, T)).astype(np.float32)
OLD, REFERENCE = (LOGPROB + RNG.normal(size=(B, T)).astype(np.float32) * scale
                  for scale in (0.4, 0.7))
ENTROPY = np.ones((B, T), np.float32)
ADVANTAGE = np.array([1.5, -0.7, 0.3, -2.0, 0.9], np.float32)


def ours(rl: RLConfig) -> tuple[float, np.ndarray]:
    def one(logprob: Any, old: Any, reference: Any, advantage: Any, mask: Any) -> Any:
        terms, _ = losses.sequence_terms(
            loss=losses.LOSSES.resolve(rl.loss), correction=CORRECTIONS.resolve("none"),
            logprobs=losses.SequenceLogprobs(logprob, old, old, reference if rl.kl else None),
            advantage=advantage, mask=mask, rl=rl)
        weights = losses.token_weights(
            mask=mask, normalize=rl.normalize, total_tokens=float(MASK.sum()),
            total_sequences=float(B), max_new_tokens=T)
        return (weights * terms).sum()

    def total(logprob: Any) -> Any:
        return jax.vmap(one)(logprob, OLD, REFERENCE, ADVANTAGE, MASK).sum()

    value, slopes = jax.value_and_grad(total)(jnp.asarray(LOGPROB))
    return float(value), np.asarray(slopes)


def theirs(**options: Any) -> tuple[float, np.ndarray]:
    """TRL's loss, computed in evaluation mode, in which it divides by no accumulation steps."""
    torch = pytest.importorskip("torch", reason="peers are not installed")
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="peers are not installed")
    logprob = torch.tensor(LOGPROB, requires_grad=True)
    args = SimpleNamespace(delta=options.pop("delta", None), use_bias_correction_kl=False)
    stub = SimpleNamespace(**dict(
        args=args, importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0.0,
        max_completion_length=T, use_vllm=False, top_entropy_quantile=1.0, aux_loss_enabled=False,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=False, tools=None,
        model=SimpleNamespace(training=False), _metrics=collections.defaultdict(
            lambda: collections.defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, torch.tensor(ENTROPY), None)
    ) | options)
    ids = torch.zeros(B, T, dtype=torch.long)
    loss = trainer.GRPOTrainer._compute_loss(stub, None, {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": torch.tensor(MASK.astype(np.int64)),
        "advantages": torch.tensor(ADVANTAGE), "old_per_token_logps": torch.tensor(OLD),
        "ref_per_token_logps": torch.tensor(REFERENCE),
        "num_items_in_batch": torch.tensor(float(MASK.sum()))})
    loss.backward()
    return loss.item(), logprob.grad.numpy()


@pytest.mark.parametrize("rl, options", [
    (dict(normalize="sequence"), dict(loss_type="grpo")),
    (dict(normalize="sequence", kl=0.3), dict(loss_type="grpo", beta=0.3)),
    (dict(normalize="constant"), dict(loss_type="dr_grpo")),
    (dict(normalize="token", clip_high=0.28), dict(loss_type="dapo", epsilon_high=0.28)),
    # TRL's bound of cispo is the ratio's, and it has none below.
    (dict(normalize="token", loss="cispo", clip_low=1.0, clip_high=0.5),
     dict(loss_type="cispo", epsilon_high=1.5)),
    (dict(normalize="sequence", loss="gspo", clip_low=0.05, clip_high=0.05),
     dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.05,
          epsilon_high=0.05)),
], ids=["grpo", "kl", "dr_grpo", "dapo", "cispo", "sequence_ratio"])
def test_loss_and_gradient_are_those_of_trl(rl: dict[str, Any], options: dict[str, Any]) -> None:
    value, slopes = ours(RLConfig(**rl))
    want, want_slopes = theirs(**options)
    assert value == pytest.approx(want, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(slopes, want_slopes, rtol=1e-5, atol=1e-6)
    assert np.count_nonzero(slopes) > 5 and not slopes[~MASK].any()
