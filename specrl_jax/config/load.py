"""Configs by name: the presets that the package ships, and files that define `get_config`."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from specrl_jax.config.build import override
from specrl_jax.config.fields import ConfigError
from specrl_jax.config.sections import Config

PRESETS = Path(__file__).resolve().parent / "presets"


def preset_names() -> list[str]:
    """Returns the names of the presets that the package ships."""
    return sorted(path.stem for path in PRESETS.glob("*.py") if path.stem != "__init__")


def load_config(preset: str, **overrides: Any) -> Config:
    """Returns the config of a preset, with other values at dotted paths.

        load_config("tiny", seed=1, rl__kl=0.1)
        load_config("my_preset.py", **{"rl.kl": 0.1})

    Args:
      preset: a name in `preset_names()`, or the path of a Python file that defines `get_config()`.
      overrides: values by dotted path; two underscores stand for a dot.

    Raises:
      ConfigError: there is no such preset or field, `get_config` is missing or returns something
        else, or the values cannot work.
    """
    path = _find(preset)
    spec = importlib.util.spec_from_file_location("preset", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"preset {preset!r}: {path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ConfigError(f"preset {preset!r}: {error}: correct {path}") from error
    if not hasattr(module, "get_config"):
        raise ConfigError(f"preset {preset!r} has no get_config(): define it in {path}")
    try:
        config = module.get_config()
    except TypeError as error:  # a dataclass raises it for an unknown field
        raise ConfigError(f"preset {preset!r}: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of preset {preset!r} returns a {type(config).__name__}: "
                          "return a specrl_jax.Config")
    return override(config, {name.replace("__", "."): x for name, x in overrides.items()})


def _find(preset: str) -> Path:
    named = re.fullmatch(r"\w+", preset) and preset != "__init__"
    path = PRESETS / f"{preset}.py" if named else Path(preset)
    if not path.is_file():
        raise ConfigError(f"no preset {preset!r}: give one of {', '.join(preset_names())}, "
                          "or the path of a .py file")
    return path
