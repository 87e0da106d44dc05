"""Checks of the options of low-rank adapters, and the projections that may have one."""

from specrl_jax.config.fields import check

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_lora(rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """Raises ConfigError unless learner.lora_rank, lora_alpha and lora_targets go together."""
    unknown = [name for name in targets if name not in LORA_TARGETS]
    check(not unknown, "learner.lora_targets", targets,
          f"no projection is called {', '.join(unknown)}; choose from {', '.join(LORA_TARGETS)}")
    check(len(set(targets)) == len(targets) > 0, "learner.lora_targets", targets,
          "name at least one projection, and each once")
    check(rank > 0 or alpha == 0, "learner.lora_alpha", alpha,
          "scales adapters, and there are none: set learner.lora_rank, or leave it out")
