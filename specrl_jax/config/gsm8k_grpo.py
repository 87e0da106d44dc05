"""What the presets of published models share: GRPO on GSM8K with an EAGLE-3 drafter."""

from typing import Any

from specrl_jax.config.load import build
from specrl_jax.config.sections import Config

PROMPTS, GROUP = 64, 8
LEARNED = 8  # responses that the drafter learns from in a step, at least one a data shard


def gsm8k_grpo(name: str, model: str, temperature: float = 0.6) -> Config:
    """Returns the config for one device.

    Responses, temperatures and the drafter's loss are those of ReSpec (arXiv:2510.26475, table 2,
    section 4.3); it does not give prompts, groups and rates.

    Args:
      name: of the run.
      model: model.path.
    """
    return build(Config, dict(
        name=name,
        steps=200,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        model={"path": model, "dtype": "bfloat16"},
        data={"name": "gsm8k", "system": "Please reason step by step, and put your final answer "
                                         "within \\boxed{}."},
        reward={"terms": ("exact",)},
        spec={"drafter": "eagle", "depth": 4, "branch": 2, "nodes": 8, "max_depth": 4,
              "max_branch": 2, "max_nodes": 8, "max_packed": 128},
        draft={"vocab": 32000},
        rollout={"batch_size": 16, "max_prompt_tokens": 512, "max_new_tokens": 8192,
                 "temperature": temperature},
        learner={"learning_rate": 1e-6, "micro_batch": 1, "packing": "sequence", "remat": "full"},
        distill={"when": "interval", "loss": "reward_weighted_kl", "sequences": LEARNED,
                 "batch": LEARNED, "micro_batch": 1, "updates": 1, "learning_rate": 5e-5,
                 "megabytes": 65536},
    ))


def target(mesh: tuple[int, int, int], rows: int, micro_batch: int, remat: str = "full"
           ) -> dict[str, Any]:
    """Returns a preset's values at dotted paths for one target.

    Args:
      mesh: devices along data, fsdp and tensor.
      rows: sequences generated at once, of one data shard.
      micro_batch: sequences of one forward and backward pass, of one data shard.
      remat: see learner.remat.
    """
    data, fsdp, tensor = mesh
    shards = data * fsdp
    learned = -(-LEARNED // shards) * shards
    return {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor,
            "rollout.batch_size": rows * shards, "learner.micro_batch": micro_batch * shards,
            "learner.remat": remat, "distill.sequences": learned, "distill.batch": learned,
            "distill.micro_batch": shards}
