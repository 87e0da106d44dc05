"""Reinforcement learning of language models with lossless speculative rollouts, in JAX.

    from pathlib import Path
    import specrl_jax

    config = specrl_jax.load_config("tiny", seed=1, rl__kl=0.1)
    specrl_jax.train(config, Path("runs/tiny"))

Names are imported on first use: reading a config needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrl_jax.config import Config, ConfigError, load_config
    from specrl_jax.control.protocol import Controller, make_spec
    from specrl_jax.control.registry import CONTROLLERS
    from specrl_jax.data.datasets import DATASETS
    from specrl_jax.data.prompts import PromptBatch
    from specrl_jax.distill.offline import DrafterTraining, train_drafter
    from specrl_jax.draft.protocol import Drafter
    from specrl_jax.draft.registry import DRAFTERS
    from specrl_jax.evaluation.evaluate import evaluate
    from specrl_jax.evaluation.generate import generate
    from specrl_jax.metrics.report import write_report
    from specrl_jax.metrics.run_files import read_metrics
    from specrl_jax.metrics.trackers import TRACKERS
    from specrl_jax.model.families import FAMILIES
    from specrl_jax.rewards.reward import REWARDS
    from specrl_jax.rl.advantage import ADVANTAGES
    from specrl_jax.rl.losses import CORRECTIONS, LOSSES
    from specrl_jax.rollout.sampler import Sampler
    from specrl_jax.training.run import train
    from specrl_jax.training.trainer import Trainer
    from specrl_jax.verify.protocol import Rule
    from specrl_jax.verify.registry import RULES

    register_advantage = ADVANTAGES.register
    register_controller = CONTROLLERS.register
    register_correction = CORRECTIONS.register
    register_dataset = DATASETS.register
    register_drafter = DRAFTERS.register
    register_family = FAMILIES.register
    register_loss = LOSSES.register
    register_reward = REWARDS.register
    register_rule = RULES.register
    register_tracker = TRACKERS.register

__all__ = [
    "Config", "ConfigError", "Controller", "Drafter", "DrafterTraining", "PromptBatch", "Rule",
    "Sampler", "Trainer", "evaluate", "generate", "load_config", "make_spec", "read_metrics",
    "register_advantage", "register_controller", "register_correction", "register_dataset",
    "register_drafter", "register_family", "register_loss", "register_reward", "register_rule",
    "register_tracker",
    "train", "train_drafter", "write_report",
]

_HOMES = {
    "Config": "config:Config",
    "ConfigError": "config:ConfigError",
    "Controller": "control.protocol:Controller",
    "Drafter": "draft.protocol:Drafter",
    "DrafterTraining": "distill.offline:DrafterTraining",
    "PromptBatch": "data.prompts:PromptBatch",
    "Rule": "verify.protocol:Rule",
    "Sampler": "rollout.sampler:Sampler",
    "Trainer": "training.trainer:Trainer",
    "evaluate": "evaluation.evaluate:evaluate",
    "generate": "evaluation.generate:generate",
    "load_config": "config:load_config",
    "make_spec": "control.protocol:make_spec",
    "read_metrics": "metrics.run_files:read_metrics",
    "register_advantage": "rl.advantage:ADVANTAGES.register",
    "register_controller": "control.registry:CONTROLLERS.register",
    "register_correction": "rl.losses:CORRECTIONS.register",
    "register_dataset": "data.datasets:DATASETS.register",
    "register_drafter": "draft.registry:DRAFTERS.register",
    "register_family": "model.families:FAMILIES.register",
    "register_loss": "rl.losses:LOSSES.register",
    "register_reward": "rewards.reward:REWARDS.register",
    "register_rule": "verify.registry:RULES.register",
    "register_tracker": "metrics.trackers:TRACKERS.register",
    "train": "training.run:train",
    "train_drafter": "distill.offline:train_drafter",
    "write_report": "metrics.report:write_report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = _HOMES[name].partition(":")
    value: Any = importlib.import_module(f"{__name__}.{module}")
    for part in path.split("."):
        value = getattr(value, part)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
