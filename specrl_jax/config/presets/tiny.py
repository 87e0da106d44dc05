"""A tiny random byte-level model learns to answer in digits: every part of a run, at small sizes.

Claim    share of digits in the responses from 0.0 to 1.0 in 20 steps (seed 0)
Command  python experiments/train.py --config=tiny
Cost     half a minute on 2 CPU cores, most of it compilation

Sizes are multiples of 8, so the same run fits a mesh of 8 devices.
"""

from specrl_jax.config import Config, build


def get_config() -> Config:
    return build(Config, dict(
        name="tiny",
        steps=20,
        prompts_per_step=8,
        group_size=4,
        checkpoint_every=5,
        model={"path": "random:tiny"},
        data={"level": "add2", "examples": 16},
        reward={"terms": ("digit_fraction",)},
        spec={"drafter": "history"},
        rollout={
            "batch_size": 16,  # half of a step's 32 sequences: slots are refilled
            "max_prompt_tokens": 128,  # bytes of the chat text
            "max_new_tokens": 16,
        },
        learner={"learning_rate": 1e-3, "micro_batch": 32},
    ))
