"""Presets: one file each, whose `get_config()` returns a `Config`; `load_config(NAME)` finds it."""

from typing import Any

from specrl_jax.config.build import build
from specrl_jax.config.sections import Config


def base(**values: Any) -> Config:
    """Returns the default config with other values: `base(steps=5, model={"path": "random:tiny"})`.

    Raises:
      ConfigError: a field is unknown, or a value cannot work.
    """
    return build(Config, values)
