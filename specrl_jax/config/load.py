"""Configs by preset, from nested dicts and with overrides; every name and type is checked."""

import dataclasses
import functools
import importlib.util
import operator
import re
import traceback
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrl_jax.config.fields import ConfigError, check
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.config.sections import Config

PRESETS = Path(__file__).resolve().parent / "presets"


def preset_names() -> list[str]:
    """Returns the names of the presets that the package ships."""
    return sorted(path.stem for path in PRESETS.glob("*.py") if path.stem != "__init__")


def preset_targets(preset: str) -> list[str]:
    """Returns the targets for which a preset has a mesh and batches. Raises as `load_config`."""
    return list(_targets(_module(preset)))


def load_config(preset: str, **overrides: Any) -> Config:
    """Returns the config of a preset, with other values at dotted paths.

        load_config("tiny", seed=1, rl__kl=0.1)
        load_config("my_preset.py", **{"rl.kl": 0.1})
        load_config("qwen2_5_7b:v6e_4x4")

    Args:
      preset: a name in `preset_names()`, or the path of a Python file that defines `get_config()`.
        A colon may follow, and a comma list of one of the preset's targets and one algorithm.
      overrides: values by dotted path; two underscores stand for a dot.

    Raises:
      ConfigError: there is no such preset, target, algorithm or field, `get_config` is missing or
        returns something else, or the values cannot work.
    """
    name, colon, chosen = preset.partition(":")
    module = _module(name)
    try:
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:  # TypeError for an unknown field; what a user's file raises else
        raise ConfigError(f"preset {preset!r}: {_raised(error)}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of preset {preset!r} returns a {type(config).__name__}: "
                          "return a specrl_jax.Config")
    values = _chosen(preset, chosen, _targets(module)) if colon else {}
    return override(config, values | {name.replace("__", "."): x for name, x in overrides.items()})


def _module(preset: str) -> Any:
    """Returns the module of a preset, which has `get_config`."""
    named = re.fullmatch(r"\w+", preset) and preset != "__init__"
    path = PRESETS / f"{preset}.py" if named else Path(preset)
    if not path.is_file():
        raise ConfigError(f"no preset {preset!r}: give one of {', '.join(preset_names())}, "
                          "or the path of a .py file")
    spec = importlib.util.spec_from_file_location("preset", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"preset {preset!r}: {path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"preset {preset!r}: {_raised(error)}: correct {path}") from error
    if not hasattr(module, "get_config"):
        raise ConfigError(f"preset {preset!r} has no get_config(): define it in {path}")
    return module


def _raised(error: Exception) -> str:
    """Returns in one line what a preset's file raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    line = "" if isinstance(error, SyntaxError) else f" (line {frames[-1].lineno})"
    return f"{' '.join(str(error).split()) or type(error).__name__}{line}"


def _targets(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns a preset's table of targets: name -> values at dotted paths."""
    return getattr(module, "TARGETS", {})


def _chosen(preset: str, chosen: str, targets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values at dotted paths of what follows a preset's colon."""
    kinds: dict[str, Mapping[str, Any]] = {"target": targets, "algorithm": ALGORITHMS}
    values, taken = {}, set()
    for given in chosen.split(","):
        name = given.replace(":", "_")  # v6e:4x4, as compilers name it
        kind = next((kind for kind, known in kinds.items() if name in known), None)
        if kind is None:
            there = [f"{kind}s {', '.join(known)}" for kind, known in kinds.items() if known]
            raise ConfigError(f"preset {preset!r}: no target or algorithm {given!r}: choose from "
                              f"its {'; '.join(there)}")
        if kind in taken:
            raise ConfigError(f"preset {preset!r}: {given!r} is another {kind}: name one")
        taken.add(kind)
        values |= kinds[kind][name]
    return values


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a config as a nested plain dict, as config.json holds it."""
    return dataclasses.asdict(config)


def build(cls: Any, values: Any, prefix: str = "") -> Any:
    """Returns the frozen dataclass `cls` made from a nested dict or an object with the same fields.
    Raises ConfigError if a field is unknown, or a value has the wrong type."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    check(isinstance(values, dict) or dataclasses.is_dataclass(values), prefix[:-1] or "config",
          values, "must be an object with fields")
    if not isinstance(values, dict):
        values = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}
    for name, value in values.items():
        check(name in fields, prefix + name, value, f"no such field of {cls.__name__}; "
              f"it has {', '.join(fields)}")
    return cls(**{name: _coerce(hints[name], prefix + name, value)
                  for name, value in values.items()})


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns `config` with other values at dotted paths. Raises ConfigError if a path names no
    field, or the values cannot work together."""
    nested = as_dict(config)
    for path, value in values.items():
        *above, name = path.split(".")
        try:
            section = functools.reduce(operator.getitem, above, nested)
        except (KeyError, TypeError):
            section = {}
        check(isinstance(section, dict) and name in section, path, value, "no such field")
        section[name] = value
    return build(Config, nested)


def _coerce(hint: Any, name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{name}.")
    if typing.get_origin(hint) is tuple:
        check(isinstance(value, tuple | list), name, value, "must be a tuple")
        return tuple(_coerce(typing.get_args(hint)[0], name, v) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    check(type(value) is hint, name, value, f"must be of type {hint.__name__}")
    return value
