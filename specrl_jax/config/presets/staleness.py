"""A 12-layer random actor that RL moves fast, and an EAGLE head that was trained for its start.

Claim    drafts accepted at the end: 0.47 with a frozen head, 0.89 with one that learns (5 seeds)
Command  python experiments/bench.py staleness --config=staleness
Cost     about 2 minutes an arm on 2 CPU cores
"""

from specrl_jax.config import Config, build


def get_config() -> Config:
    return build(Config, dict(
        name="staleness",
        steps=40,
        prompts_per_step=2,
        group_size=4,
        checkpoint_every=10,
        model={"path": "random:deep", "numerics": "invariant"},
        data={"level": "add2", "examples": 32},
        reward={"terms": ("digit_fraction",)},
        spec={"drafter": "eagle", "depth": 3, "branch": 1, "nodes": 4, "max_depth": 3,
              "max_branch": 1, "max_nodes": 4, "history_past": 0},
        control={"policy": "fixed", "min_survival": 0.0},
        rollout={"batch_size": 1, "min_batch": 1, "max_prompt_tokens": 40, "max_new_tokens": 96,
                 "temperature": 0.5},
        learner={"learning_rate": 3e-6, "micro_batch": 8},
        # Half of a step's responses: training on all of them would cost what speculation saves.
        distill={"loss": "lk", "sequences": 4, "batch": 4, "micro_batch": 4, "updates": 1,
                 "unroll": 3, "learning_rate": 1e-3},
    ))
