"""Qwen3-8B learns GSM8K by GRPO, with an EAGLE-3 drafter that learns with it.

Claim    none yet: not run on the targets below, whose values are arithmetic (docs/guides/pods.md)
Command  python experiments/train.py --config=qwen3_8b:v5p_4x4x4
Cost     not measured; experiments/plan.py predicts it
"""

from specrl_jax.config import Config
from specrl_jax.config.gsm8k_grpo import gsm8k_grpo, target

TARGETS = {
    "v5p_4x4x4": target((4, 4, 4), rows=32, micro_batch=4),
}


def get_config() -> Config:
    return gsm8k_grpo("qwen3_8b", "Qwen/Qwen3-8B")
