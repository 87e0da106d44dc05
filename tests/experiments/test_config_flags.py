"""Presets, overrides, and bad input that ends in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from helpers import HANGS, ROOT, script_environment

from experiments import config_flags
from specrl_jax.config import Config, ConfigError, as_dict, load_config, preset_names
from specrl_jax.config.load import PRESETS

SCRIPT = f'''"""Says what it was asked to do."""
import sys
sys.path[:0] = [{str(ROOT / "experiments")!r}, {str(ROOT)!r}]
from absl import flags
import config_flags
from specrl_jax.config import ConfigError
LOUD = flags.DEFINE_bool("loud", False, "a flag of the script's own")
def main(config, workdir):
    if config.name == "bad":
        raise ConfigError("workdir = 'x': choose another")
    print(config.name, config.seed, workdir, LOUD.value)
config_flags.run(main)
'''


def parse(*arguments):
    """(config, workdir) of a command line, in this process."""
    argv, values = ["script.py", *arguments], flags.FlagValues()
    config_flags.define(argv, values)
    assert values(argv) == argv[:1]
    return config_flags.parsed(values)


@pytest.fixture
def script(tmp_path):
    """Runs the script from a directory that is not the repository's."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def call(*arguments):
        return subprocess.run([sys.executable, "script.py", *arguments], cwd=tmp_path,
                              capture_output=True, text=True, timeout=HANGS)

    return call


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_by_name_and_by_path(name, monkeypatch, tmp_path):
    config = load_config(name)
    assert config.name == name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((PRESETS / f"{name}.py").read_text())
    assert config == load_config("mine.py") == load_config(str(tmp_path / "mine.py"))


def test_no_override_is_the_default_preset():
    config, workdir = parse()
    assert type(config) is Config and config == load_config("smollm2")
    assert workdir == Path("runs/smollm2")


def test_overrides_of_every_type():
    config, workdir = parse(
        "--config=tiny", "--config.seed=7", "--config.name=mine",
        "--config.learner.learning_rate=1", "--config.learner.remat=none",
        "--config.rl.advantage=leave_one_out", "--config.rollout.top_p", "0.5",
        "--config.reward.terms=('exact','exact_only')", "--config.reward.weights=(1, 0.2)")
    want = as_dict(load_config("tiny"))
    want.update(seed=7, name="mine")
    want["learner"].update(learning_rate=1.0, remat="none")
    want["rl"].update(advantage="leave_one_out")
    want["rollout"].update(top_p=0.5)
    want["reward"].update(terms=("exact", "exact_only"), weights=(1.0, 0.2))
    assert as_dict(config) == want
    assert type(config.learner.learning_rate) is type(config.reward.weights[0]) is float
    assert workdir == Path("runs/mine")
    assert parse("--config=tiny", "--workdir=out")[1] == Path("out")


def test_one_parse_leaves_nothing_for_the_next():
    parse("--config=tiny", "--config.seed=7", "--config.rl.kl=0.5")
    assert parse("--config=tiny")[0] == load_config("tiny")


@pytest.mark.parametrize("argument, line", [
    ("--config.foo=1", "config.foo = '1': no field 'foo' in config; it has name, seed, steps"),
    ("--config.model=tiny", "config.model = 'tiny': is a section; set its fields, as in "
                            "--config.model.path=..."),
    ("--config.steps=abc", "config.steps = 'abc': must be of type int"),
    ("--config.learner.remat=maybe", "learner.remat = 'maybe': choose one of none, full, dots_"),
    ("--config.reward.weights=('a',)",
     "config.reward.weights = \"('a',)\": must be a quoted tuple of float values"),
    ("--config.steps=0", "steps = 0: must be at least 1"),
    ("--noconfig.learner.scaled", "config.learner.scaled = "),
])
def test_bad_overrides_name_field_value_and_way_out(argument, line):
    with pytest.raises(ConfigError) as caught:
        parse(argument)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("source, message", [
    ("x = 1", r"has no get_config\(\)"),
    ("a = 1\nb = c", r"name 'c' is not defined \(line 2\): correct"),
    ("x = \x00", "null bytes"),
    ("def get_config(): return 3", "returns a int"),
    ("from specrl_jax.config import Config\ndef get_config(): return Config(stepz=3)", "'stepz'"),
])
def test_bad_presets_say_what_is_wrong(source, message, tmp_path):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "bad.py"))
    with pytest.raises(flags.IllegalFlagValueError, match=message):
        parse(f"--config={tmp_path / 'bad.py'}")


def test_script_runs_from_anywhere(script):
    done = script("--config=tiny", "--config.seed=3", "--loud")
    assert (done.stdout, done.returncode) == ("tiny 3 runs/tiny True\n", 0), done.stderr
    assert script().stdout == "smollm2 0 runs/smollm2 False\n"


@pytest.mark.parametrize("arguments, line", [
    (["--config=nope"], "flag --config=nope: no preset 'nope': give one of math_jsonl, "),
    (["--config.steps=1", "--config=tiny"], "Found --config.steps=1 in argv before a value for"),
    (["--confg=tiny"], "Unknown command line flag 'confg'. Did you mean: config"),
    (["seed=1"], "unexpected argument 'seed=1': write fields as --config.FIELD=VALUE"),
    (["--config.name=bad"], "workdir = 'x': choose another"),
])
def test_script_ends_bad_input_with_one_line(script, arguments, line):
    done = script(*arguments)
    assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", config_flags.EXIT_BAD_INPUT)


@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help_lists_flags_and_fields_of_the_preset(script, flag):
    done = script("--config=tiny", "--config.seed=1", flag)
    assert done.returncode == 0, done.stderr
    for text in ("Says what it was asked to do.", "--workdir:", "--[no]loud:",
                 config_flags.field_table("tiny")):
        assert text in done.stdout
    assert ("--[no]logtostderr" in done.stdout) == (flag == "--helpfull")


def test_settings_of_jax_that_break_programs_are_undone_in_a_line() -> None:
    code = """
import sys
sys.path.insert(0, "experiments")
import config_flags
config_flags.settle_jax()
import jax.numpy as jnp
print(jnp.ones(1).dtype, (jnp.ones(1) + jnp.ones(1, "int32")).dtype)
"""
    environment = script_environment() | {
        "JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=HANGS)
    assert done.stdout == "float32 float32\n", done.stderr
    assert [line.split(" = ")[0] for line in done.stderr.splitlines()] == [
        "WARNING: JAX_ENABLE_X64", "WARNING: JAX_NUMPY_DTYPE_PROMOTION",
        "WARNING: JAX_DISABLE_JIT"]
