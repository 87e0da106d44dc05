"""Static options: frozen dataclasses, validated at construction. `Config` describes a whole run."""

from specrl_jax.config.drafting import (
    DRAFTERS,
    LOSSES,
    DistillConfig,
    DistillOptions,
    DraftConfig,
)
from specrl_jax.config.fields import ConfigError, at_least, check, option, section
from specrl_jax.config.load import (
    as_dict,
    build,
    load_config,
    override,
    preset_names,
    preset_targets,
)
from specrl_jax.config.registry import Registry
from specrl_jax.config.sections import (
    Config,
    ControlConfig,
    LearnerConfig,
    MeshConfig,
    ModelSource,
    RLConfig,
    RolloutConfig,
    SpecOptions,
)
from specrl_jax.config.tasks import DataConfig, EvalConfig, RewardConfig, TrackConfig

__all__ = [
    "DRAFTERS", "LOSSES", "Config", "ConfigError", "ControlConfig", "DataConfig",
    "DistillConfig", "DistillOptions", "DraftConfig", "EvalConfig", "LearnerConfig", "MeshConfig",
    "ModelSource", "RLConfig", "Registry", "RewardConfig", "RolloutConfig", "SpecOptions",
    "TrackConfig", "as_dict", "at_least", "build", "check", "load_config", "option", "override",
    "preset_names", "preset_targets", "section",
]
