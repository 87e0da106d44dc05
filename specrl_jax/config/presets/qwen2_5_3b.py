"""Qwen2.5-3B-Instruct learns GSM8K by GRPO, with an EAGLE-3 drafter that learns with it.

Claim    none yet: not run on the targets below, whose values are arithmetic (docs/guides/pods.md)
Command  python experiments/train.py --config=qwen2_5_3b:v6e_4x4
Cost     not measured; experiments/plan.py predicts it
"""

from specrl_jax.config import Config
from specrl_jax.config.gsm8k_grpo import gsm8k_grpo, target

TARGETS = {
    "v6e_4x4": target((1, 8, 2), rows=16, micro_batch=1),
}


def get_config() -> Config:
    return gsm8k_grpo("qwen2_5_3b", "Qwen/Qwen2.5-3B-Instruct")
