"""--run and --step, for scripts that read a run's weights instead of writing a run.

Such a script says `flags.adopt_module_key_flags(run_flags)`, so that its --help lists them.
"""

from pathlib import Path

from absl import flags

from specrl_jax.actor import Actor, open_actor, run_config
from specrl_jax.config import Config, ConfigError, as_dict, build

RUN = flags.DEFINE_string("run", None, "working directory of a run: its config, which --config.* "
                          "may override, and its weights; without it, the model at "
                          "--config.model.path")
STEP = flags.DEFINE_integer("step", None, "with --run, the weights after this many steps; 0 is the "
                            "initial ones (default: the newest checkpoint)", lower_bound=0)


def resolve(config: Config, flag_values: flags.FlagValues = flags.FLAGS) -> tuple[Config, Actor]:
    """The config and the model that the command line asks for.

    Args:
      config: of --config and its overrides.

    Raises:
      ConfigError: the flags contradict each other, or there is no such run or model.
    """
    if flag_values.workdir is not None:
        raise ConfigError(f"--workdir={flag_values.workdir}: this script writes no run; name the "
                          f"run to read with --run=DIR")
    if flag_values.run is None:
        return config, open_actor(config, step=flag_values.step)
    if flag_values["config"].present:
        raise ConfigError(f"--run={flag_values.run}: brings its own config; drop --config and "
                          f"override fields with --config.FIELD=VALUE")
    run = Path(flag_values.run)
    config = override(run_config(run), flag_values["config"].override_values)
    return config, open_actor(config, run, flag_values.step)


def override(config: Config, values: dict[str, object]) -> Config:
    """`config` with other values at dotted paths.

    Raises:
      ConfigError: the values cannot work together.
    """
    nested = as_dict(config)
    for path, value in values.items():
        *above, name = path.split(".")
        node = nested
        for part in above:
            node = node[part]
        node[name] = value
    return build(Config, nested)
