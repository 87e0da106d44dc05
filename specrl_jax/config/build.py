"""Configs from and to nested dicts, with every field's name and type checked."""

import dataclasses
import functools
import operator
import typing
from collections.abc import Mapping
from typing import Any

from specrl_jax.config.fields import check
from specrl_jax.config.renamed import check_current
from specrl_jax.config.sections import Config


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a config as a nested plain dict, as config.json holds it."""
    return dataclasses.asdict(config)


def build(cls: Any, values: Any, prefix: str = "") -> Any:
    """Returns the frozen dataclass `cls` made from a nested dict or an object with the same fields.
    Raises ConfigError if a field is unknown, renamed or reserved, or a value has the wrong type."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        values = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}
    for name, value in values.items():
        check_current(prefix + name, value)
        check(name in fields, prefix + name, value, f"no such field of {cls.__name__}; "
              f"it has {', '.join(fields)}")
    return cls(**{name: _coerce(hints[name], prefix + name, value)
                  for name, value in values.items()})


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns `config` with other values at dotted paths. Raises ConfigError if a path names no
    field, or the values cannot work together."""
    nested = as_dict(config)
    for path, value in values.items():
        check_current(path, value)
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
