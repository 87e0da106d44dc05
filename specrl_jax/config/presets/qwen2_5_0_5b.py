"""Qwen2.5-0.5B-Instruct learns GSM8K by GRPO, with an EAGLE-3 drafter that learns with it.

Claim    none yet: not run on the targets below, whose values are arithmetic (docs/guides/pods.md)
Command  python experiments/train.py --config=qwen2_5_0_5b:v5e_2x2
Cost     not measured; experiments/plan.py predicts it
"""

from specrl_jax.config import Config
from specrl_jax.config.gsm8k_grpo import gsm8k_grpo, target

TARGETS = {
    "v5e_2x2": target((1, 4, 1), rows=16, micro_batch=1),
    "v5e_2x4": target((2, 4, 1), rows=16, micro_batch=1),
    "v5e_4x4": target((4, 4, 1), rows=16, micro_batch=1),
    "v6e_4x4": target((4, 4, 1), rows=32, micro_batch=2),
    "v5p_4x4x4": target((16, 4, 1), rows=8, micro_batch=4),
    "h100": target((1, 1, 1), rows=64, micro_batch=2),
    "h100_8": target((2, 4, 1), rows=64, micro_batch=2),
}


def get_config() -> Config:
    return gsm8k_grpo("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B-Instruct")
