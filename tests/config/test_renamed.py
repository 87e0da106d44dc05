"""Old names of config fields and metrics are refused with the new ones."""

import json

import pytest

from specrl_jax.checkpoint.resume import check_config
from specrl_jax.config import Config, ConfigError, as_dict, build, load_config
from specrl_jax.config.renamed import RENAMED, RENAMED_REWARDS
from specrl_jax.metrics import names as metric_names
from specrl_jax.metrics.names import METRICS, RENAMED_METRICS
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model.source import run_config
from specrl_jax.rewards.reward import REWARDS
from specrl_jax.rollout.sampler import Sampler


def leaves(values, above=""):
    for name, value in values.items():
        yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]


FIELDS = set(leaves(as_dict(Config())))


@pytest.mark.parametrize("old", RENAMED)
def test_renamed_field_is_gone_and_its_new_name_exists(old):
    new, _, hint = RENAMED[old].partition("; ")
    assert old not in FIELDS
    assert new in FIELDS or not new and hint


def test_renamed_rewards_name_registered_ones():
    assert set(RENAMED_REWARDS.values()) <= set(REWARDS) and not set(RENAMED_REWARDS) & set(REWARDS)


@pytest.mark.parametrize("values, line", [
    ({"learner": {"kl": 0.1}}, "learner.kl = 0.1: renamed; use rl.kl"),
    ({"learner": {"scale_advantage": False}}, "learner.scale_advantage = False: renamed; use "
     "rl.advantage (True is 'group', False is 'group_mean')"),
])
def test_build_refuses_old_fields(values, line):
    with pytest.raises(ConfigError) as error:
        build(Config, values)
    assert str(error.value) == line


def test_load_config_refuses_old_and_unknown_fields():
    assert load_config("tiny", rl__kl=0.1, seed=3).rl.kl == 0.1
    assert load_config("tiny", **{"rl.kl": 0.1}) == load_config("tiny", rl__kl=0.1)
    with pytest.raises(ConfigError, match="^spec.steps = 2: renamed; use spec.depth$"):
        load_config("tiny", spec__steps=2)
    with pytest.raises(ConfigError, match="^spec.depths = 2: no such field$"):
        load_config("tiny", spec__depths=2)


def test_old_value_is_refused_with_the_new_one():
    with pytest.raises(ConfigError, match=r"^distill.when = 'every_k': renamed; use interval"):
        load_config("tiny", distill__when="every_k")


def test_preset_with_an_old_argument_names_the_new_field(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from specrl_jax.config import Config, SpecOptions\n"
        "def get_config(): return Config(spec=SpecOptions(steps=2))\n")
    with pytest.raises(ConfigError, match=r"'steps' \(line 2\); spec.steps is now spec.depth$"):
        load_config(str(tmp_path / "mine.py"))


def test_run_of_an_older_version_is_named_with_its_directory(tmp_path):
    stored = as_dict(Config())
    stored["spec"]["steps"] = 4
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="an older version started this run .*spec.depth"):
        run_config(tmp_path)


@pytest.mark.parametrize("changes, message", [
    ({"model__family": "nope"}, "model.family = 'nope': choose one of llama"),
    ({"control__policy": "nope", "spec__drafter": "off"}, "control.policy = 'nope': choose one of"),
    ({"spec__drafter": "nope", "control__policy": "off"}, "spec.drafter = 'nope': choose one of"),
    ({"draft__parts": ("eagle", "nope")}, "draft.parts = 'nope': choose one of"),
    ({"control__policy": "builtins:print"}, "control.policy = .*: must make a Controller"),
    ({"spec__drafter": "builtins:print"}, "spec.drafter = .*: must make a DrafterPart")])
def test_unknown_extension_is_refused_even_if_unused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Sampler.from_config(load_config("tiny", **changes), prompts=1)


def test_workdir_of_an_older_version_is_refused_in_one_line(tmp_path):
    stored = as_dict(Config())
    stored["learner"]["kl"] = 0.0
    del stored["rl"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError) as error:
        check_config(tmp_path, as_dict(Config()))
    assert str(error.value) == (
        f"workdir = {tmp_path}: an older version started this run (learner.kl is now rl.kl); go on "
        "with that version, or choose another workdir")


@pytest.mark.parametrize("old", RENAMED_METRICS)
def test_renamed_metric_is_gone_and_its_new_name_exists(old):
    assert old not in {metric.name for metric in METRICS}
    new, _, hint = RENAMED_METRICS[old].partition("; ")
    assert metric_names.find(new) or not new and hint


def test_asking_for_an_old_metric_names_the_new_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time/speculation_net": 1.5}\n')
    row = read_metrics(tmp_path)[0]
    assert row["time/speculation_net"] == 1.5 and row.get("time/step", 2) == 2
    for ask in (row.get, row.__getitem__):
        with pytest.raises(ConfigError, match="'time/net': renamed; use 'time/speculation_net'$"):
            ask("time/net")
    with pytest.raises(KeyError):
        row["time/step"]


def test_metrics_are_told_apart_by_name():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert metric_names.find("reward/mean").name == "reward/mean"
    assert metric_names.find("reward/exact").name == "reward/*"
    assert metric_names.find("distill/alpha/2") and not metric_names.find("nothing")
    assert all(metric.help for metric in METRICS)
