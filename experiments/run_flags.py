"""--run and --step, for scripts that read a run's weights instead of writing a run.

Such a script calls `flags.adopt_module_key_flags(run_flags)`, so that its --help lists the flags.
`config_flags` then reads the config from --run and leaves --workdir out of the help.
"""

from typing import Any

from absl import flags

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import BEST
from specrl_jax.config import Config, ConfigError
from specrl_jax.model.source import Actor, fit_mesh, open_actor
from specrl_jax.runtime.paths import local_path
from specrl_jax.runtime.stderr import say

RUN = flags.DEFINE_string("run", None, "working directory of a run: its config, which --config.* "
                          "may override, and its weights; without it, the model at "
                          "--config.model.path")
STEP = flags.DEFINE_string("step", None, "with --run, the weights after this many steps; 0 is the "
                           "initial ones, best those of its best evaluation (default: the newest "
                           "checkpoint)")


def resolve(config: Config, flag_values: flags.FlagValues = flags.FLAGS) -> tuple[Config, Actor]:
    """Returns the config and the model that the command line names.

    Args:
      config: from `config_flags.parsed`: with --run, the run's with overrides.

    Raises:
      ConfigError: the flags contradict each other, or there is no such run or model.
    """
    if flag_values.workdir is not None:
        raise ConfigError(f"--workdir={flag_values.workdir}: this script writes no run; name the "
                          f"run to read with --run=DIR")
    step = _step(flag_values.step)
    sharding.all_devices()
    if flag_values.run is None:
        return config, open_actor(config, step=step)
    if flag_values["config"].present:
        raise ConfigError(f"--run={flag_values.run}: brings its own config; drop --config and "
                          f"override fields with --config.FIELD=VALUE")
    config_flag: Any = flag_values["config"]
    if not any(field.startswith("mesh.") for field in config_flag.override_values):
        config = fit_mesh(config, say)
    return config, open_actor(config, local_path("--run", flag_values.run), step)


def _step(text: str | None) -> int | str | None:
    """Returns what --step names."""
    if text is None or text == BEST:
        return text
    if not text.isdecimal():
        raise ConfigError(f"--step={text}: give a number of completed steps, or {BEST}")
    return int(text)


def given(flag: str, field: str, default: Any, flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """Returns a flag's value, or its config field's if only that one was given, or `default`."""
    if flag_values[flag].present:
        return flag_values[flag].value
    config: Any = flag_values["config"]
    return config.override_values.get(field, default)
