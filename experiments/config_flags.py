"""Command-line flags that every experiment shares: a preset, its fields, and the workdir.

    python experiments/train.py --config=tiny --config.seed=1 --workdir=runs/x

A script ends with `config_flags.run(main)`, where `main(config, workdir)` gets the frozen `Config`.
A script's own flags are plain absl flags, defined at its top.

ml_collections overrides fields by assignment, which frozen dataclasses refuse. So it works on a
mutable twin of the preset's config, and `Config` is built from the twin after all overrides. Bad
input ends in one line on stderr and exit status 2.
"""

import contextlib
import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from interrupt import until_stopped
from ml_collections import config_flags as ml_config_flags
from ml_collections.config_flags import tuple_parser

from specrl_jax.config import Config, ConfigError, build, load_config, override
from specrl_jax.runtime.paths import local_path

DEFAULT_PRESET = "smollm2"
HELP_FLAGS = ("h", "help", "helpshort", "helpfull", "?")
EXIT_BAD_INPUT = 2

# Without this, --help would list the flags of this file as the script's own.
flags.disclaim_key_flags()


def run(main: Callable[[Config, Path], Any]) -> None:
    """Parses `sys.argv`, calls `main(config, workdir)` and exits with what it returns.

    `ConfigError` and flag errors, of `main` too, print `error: ...` on stderr and exit with 2.
    """
    with one_line_errors():
        if _asks_for_help(sys.argv):
            print_help(sys.argv)
            sys.exit()
        define(sys.argv)
    app.run(lambda argv: until_stopped(functools.partial(_call, main, argv)), flags_parser=_parse)


def define(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines --config and --workdir.

    Args:
      argv: the whole command line, whose overrides are checked.
      flag_values: where to define the flags.

    Raises:
      ConfigError: an override names no field, or its value has the wrong type.
      flags.Error: an override that comes before --config.
    """
    check_overrides(argv)
    ml_config_flags.DEFINE_config_dataclass(
        "config", mutable(load_config(DEFAULT_PRESET)), "preset: a name or a .py file",
        flag_values=flag_values, sys_argv=list(argv),
        parse_fn=lambda name: mutable(load_config(name)))
    flag_values["config"].default_as_str = DEFAULT_PRESET
    flags.DEFINE_string("workdir", None, "directory of the run's output (default: runs/NAME, with "
                        "NAME from --config.name)", flag_values=flag_values)


def parsed(flag_values: flags.FlagValues = flags.FLAGS) -> tuple[Config, Path]:
    """Returns the frozen config and the workdir; call it after the flags are parsed.

    With --run of run_flags.py, the overrides apply to the run's config.

    Raises:
      ConfigError: the values cannot work together, or there is no such run.
    """
    if "run" in flag_values and flag_values.run is not None:
        from specrl_jax.model.source import run_config

        flag: Any = flag_values["config"]
        config = override(run_config(local_path("--run", flag_values.run)), flag.override_values)
    else:
        config = build(Config, flag_values.config)
    return config, local_path("--workdir", flag_values.workdir or Path("runs") / config.name)


def mutable(config: Any) -> Any:
    """Returns a mutable twin of a frozen dataclass, with twins of its sections."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return _twin(type(config))(**{
        name: mutable(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()})


def check_overrides(argv: Sequence[str]) -> None:
    """Checks the name and the type of each `--config.field=value` of a command line.

    Raises:
      ConfigError: names the field, the value and the way out.
    """
    for argument, following in _with_next(argv):
        match = re.fullmatch(r"--?(?:no)?config\.([^=]*)(?:=(.*))?", argument, re.DOTALL)
        if match:
            path, value = match.groups()
            hint = _hint(path, following if value is None else value)
            if hint is not bool and value is None:
                value = following
            if value is not None:
                _check_type(path, value, hint)


def print_help(argv: Sequence[str]) -> None:
    """Prints the script's docstring, its flags, and every field of the chosen preset."""
    define(argv[:1])
    if "run" in flags.FLAGS:  # the script reads a run and refuses --workdir
        del flags.FLAGS.workdir
    table = field_table(chosen_preset(argv))
    app.usage(shorthelp="helpfull" not in _flag_names(argv), writeto_stdout=True)
    print(table)


def field_table(preset: str) -> str:
    """Returns a line for each field: the flag with the preset's value, and the field's help."""
    lines = [f"fields of --config={preset}:"]
    for path, value, text in _leaves(load_config(preset)):
        flag = f"  --config.{path}={_shell(value)}"
        lines.append(f"{flag:<48}  {text}")
    return "\n".join(lines)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Prints a bad flag or value in one line on stderr, and exits."""
    try:
        yield
    except (ConfigError, flags.Error) as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def _parse(argv: Sequence[str]) -> list[str]:
    with one_line_errors():
        rest = flags.FLAGS(list(argv))
        if len(rest) > 1:
            raise ConfigError(f"unexpected argument {rest[1]!r}: write fields as "
                              "--config.FIELD=VALUE; --help lists them")
        return rest


def _call(main: Callable[[Config, Path], Any], argv: Sequence[str]) -> Any:
    del argv  # _parse leaves the script's name only
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries' INFO lines hide the script's own
    with one_line_errors():
        settle_jax()
        return main(*parsed())


def settle_jax() -> None:
    """Undoes what the environment asks of JAX and no program here can do, with a line for each."""
    import jax

    for name, value in (("jax_enable_x64", False), ("jax_numpy_dtype_promotion", "standard"),
                        ("jax_disable_jit", False)):
        if (current := getattr(jax.config, name)) != value:
            print(f"WARNING: {name.upper()} = {current}: set to {value}, with which the programs "
                  f"were written", file=sys.stderr)
            jax.config.update(name, value)


@functools.cache
def _twin(cls: type) -> type:
    hints = typing.get_type_hints(cls)
    return dataclasses.make_dataclass(cls.__name__, [
        (f.name, _twin(hints[f.name]) if dataclasses.is_dataclass(hints[f.name]) else hints[f.name])
        for f in dataclasses.fields(cls)])


def _hint(path: str, value: str) -> type:
    """Returns the type of the field at a dotted path."""
    hint, above = Config, "config"
    for name in path.split("."):
        fields = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if name not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has none"
            raise ConfigError(f"config.{path} = {value!r}: no field {name!r} in {above}; {known}")
        hint, above = fields[name], f"{above}.{name}"
    if dataclasses.is_dataclass(hint):
        example = dataclasses.fields(hint)[0].name
        raise ConfigError(f"{above} = {value!r}: is a section; set its fields, as in "
                          f"--{above}.{example}=...")
    return hint


def _check_type(path: str, value: str, hint: type) -> None:
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0].__name__
        ok, wanted = _is_tuple_of(value, element), f"must be a quoted tuple of {element} values"
    else:
        ok, wanted = _parses(value, hint), f"must be of type {hint.__name__}"
    if not ok:
        raise ConfigError(f"config.{path} = {value!r}: {wanted}")


def _parses(value: str, hint: type) -> bool:
    parsers = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser(),
               str: flags.ArgumentParser()}
    try:
        parsers[hint].parse(value)
    except ValueError:
        return False
    return True


def _is_tuple_of(value: str, element: str) -> bool:
    """Returns whether every item has the type `element`; an int may stand for a float."""
    try:
        items = tuple_parser.TupleParser().parse(value)
    except ValueError:
        return False
    if value.startswith(("(", "[")) and items == (value,):
        return False  # names without quotes: the parser takes the whole text for one string
    allowed = {element, "int"} if element == "float" else {element}
    return {type(item).__name__ for item in items} <= allowed


def _leaves(config: Any, above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (dotted path, value, help) of every field that is not a section."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{above}{field.name}.")
        else:
            yield above + field.name, value, field.metadata["help"]


def _shell(value: Any) -> str:
    """Returns a value as it is written in a shell command."""
    text = str(value)
    return f'"{text}"' if re.search(r"[\s()]", text) else text


def _with_next(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each argument with the one after it, which may be its value."""
    return zip(argv[1:], [*argv[2:], ""], strict=False)


def _flag_names(argv: Sequence[str]) -> set[str]:
    return {re.sub(r"^--?|=.*$", "", a) for a in argv[1:] if a.startswith("-")}


def _asks_for_help(argv: Sequence[str]) -> bool:
    return not _flag_names(argv).isdisjoint(HELP_FLAGS)


def chosen_preset(argv: Sequence[str]) -> str:
    """Returns what --config names."""
    chosen = DEFAULT_PRESET
    for argument, following in _with_next(argv):
        match = re.fullmatch(r"--?config(?:=(.*))?", argument)
        if match:
            chosen = following if match[1] is None else match[1]
    return chosen
