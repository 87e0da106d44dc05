"""--run and --step, for scripts that read a run's weights instead of writing a run.

Such a script calls `flags.adopt_module_key_flags(run_flags)`, so that its --help lists the flags.
`config_flags` then reads the config from --run and leaves --workdir out of the help.
"""

from typing import Any

from absl import flags

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.io.places import local_path
from specrl_jax.io.progress import say
from specrl_jax.model.source import Actor, fit_mesh, open_actor

RUN = flags.DEFINE_string("run", None, "working directory of a run: its config, which --config.* "
                          "may override, and its weights; without it, the model at "
                          "--config.model.path")
STEP = flags.DEFINE_integer("step", None, "with --run, the weights after this many steps; 0 is the "
                            "initial ones (default: the newest checkpoint)", lower_bound=0)


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
    sharding.all_devices()
    if flag_values.run is None:
        return config, open_actor(config, step=flag_values.step)
    if flag_values["config"].present:
        raise ConfigError(f"--run={flag_values.run}: brings its own config; drop --config and "
                          f"override fields with --config.FIELD=VALUE")
    config_flag: Any = flag_values["config"]
    if not any(field.startswith("mesh.") for field in config_flag.override_values):
        config = fit_mesh(config, say)
    return config, open_actor(config, local_path("--run", flag_values.run), flag_values.step)


def given(flag: str, field: str, flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """Returns a flag's value, or its config field's if only that one was given."""
    config: Any = flag_values["config"]
    overrides = config.override_values
    if field in overrides and not flag_values[flag].present:
        return overrides[field]
    return flag_values[flag].value
