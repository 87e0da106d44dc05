"""Qwen2.5-1.5B-Instruct learns MATH-like problems from JSON lines, judged by `latex`.

Each line has a "problem" and its "answer", in LaTeX as in MATH, NuminaMath or DeepScaleR.

Claim    none yet: it has not run; prompts, groups and rates are those of qwen2_5_1_5b
Command  python experiments/train.py --config=math_jsonl --config.data.path='math/train*.jsonl' \\
             --config.eval.path=math/test.jsonl
Cost     not measured
"""

from specrl_jax.config import Config, override
from specrl_jax.config.gsm8k_grpo import gsm8k_grpo, target

TARGETS = {
    "v6e_4x4": target((2, 8, 1), rows=16, micro_batch=1),
}


def get_config() -> Config:
    return override(gsm8k_grpo("math_jsonl", "Qwen/Qwen2.5-1.5B-Instruct"), {
        "data.name": "jsonl", "data.path": "math/train.jsonl", "data.question_field": "problem",
        "data.long_prompts": "drop", "reward.terms": ("latex",),
        "eval.every": 20, "eval.path": "math/test.jsonl"})
