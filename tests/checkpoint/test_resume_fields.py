"""A working directory is that of the run that is resumed, or it is refused and left alone."""

import dataclasses
import json

import pytest

from specrl_jax.checkpoint import resume
from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.runtime import processes
from specrl_jax.runtime.workdir import (
    CONFIG,
    METRICS,
    REPORT,
    SAMPLES,
    flat,
    make_workdir,
    write_config,
)


def changed(**values):
    config = as_dict(Config())
    for name, value in values.items():
        section, _, field = name.rpartition("__")
        (config[section] if section else config)[field] = value
    return config


def snapshot(workdir):
    return {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


@pytest.mark.parametrize("change, words", [
    ({"seed": 7}, "seed = 7, but the run in .* was started with 0: restore .* another workdir"),
    ({"learner__learning_rate": 0.5}, "learner.learning_rate = 0.5, .* started with 1e-05:"),
    ({"added": 1}, r"added = 1, .* started with \(absent\): go on with the version that"),
    ({"seed": 7, "group_size": 4}, r"group_size = 4, .* with 8 \(seed also changed\)"),
])
def test_another_configuration_is_refused_and_nothing_touched(tmp_path, change, words):
    write_config(tmp_path, changed())
    (tmp_path / METRICS).touch()
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=words):
        resume.check_config(tmp_path, changed(**change))
    assert snapshot(tmp_path) == before


def test_fields_that_change_no_result_may_differ(tmp_path):
    write_config(tmp_path, changed())
    free = changed(steps=99, checkpoint_every=1, checkpoint_keep=5, name="x",
                   reward__workers=2, rollout__stop=("x",), eval__every=3, eval__split="dev",
                   track__to=("jsonl",), mesh__fallback=("1x1x1",))
    assert resume.check_config(tmp_path, free) == {}
    resume.check_config(tmp_path, changed())
    resume.check_config(tmp_path / "new", changed())
    assert not (tmp_path / "new").exists()


def test_processes_of_one_run_must_have_one_config(monkeypatch):
    """Each would go on by its own seed or steps, on other data or waiting for ever."""
    resume.check_same(changed())
    for value, error in (({"model__path": "/elsewhere", "data__data_dir": "x"}, None),
                         ({"seed": 1}, "seed = 0: process 1 has 1; give all processes the same"),
                         ({"reward__terms": ("a",)}, r"reward.terms = \['exact'\]: process 1 has")):
        other = {name: json.loads(json.dumps(x)) for name, x in flat(changed(**value)).items()}
        monkeypatch.setattr(processes, "share", lambda name, mine, other=other: [mine, other])
        if error is None:
            resume.check_same(changed())
        else:
            with pytest.raises(ConfigError, match=error):
                resume.check_same(changed())


def test_reward_that_stopped_a_run_may_count_on_resume(tmp_path):
    """No answer has counted by on_failure = stop; by a number some may have."""
    write_config(tmp_path, changed())
    assert resume.check_config(tmp_path, changed(reward__on_failure="0")) == {}
    write_config(tmp_path, changed(reward__on_failure="0"))
    for value in ("1", "stop"):
        with pytest.raises(ConfigError, match=f'reward.on_failure = "{value}", but the run in'):
            resume.check_config(tmp_path, changed(reward__on_failure=value), resume.EQUAL)


def test_workdirs_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/run", "file/a/b"):
        for ask in (lambda to: resume.check_config(to, changed()), make_workdir):
            with pytest.raises(ConfigError, match=f"workdir = .*/{place}.: .*/file is not a dir"):
                ask(tmp_path / place)
    for name in (SAMPLES, REPORT, resume.DATA, CONFIG):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"workdir = .*: {name} is a directory there; choose"):
            resume.check_config(tmp_path / name, changed())
    with pytest.raises(ConfigError, match="/proc is not a directory that can be written"):
        resume.check_config("/proc/run", changed())


@pytest.mark.parametrize("text, words", [
    ("{", "config.json is not JSON"), ("[]", "config.json does not hold an object"),
    ("{}", "config.json: a run of version 0.2.0 or older, .* export.py of 0.2.0,"),
    ('{"format": 9}', "config.json: format 9, but this version reads format 2; use the version"),
    (None, "config.json is missing although metrics.jsonl is there"),
])
def test_an_unreadable_config_is_refused(tmp_path, text, words):
    (tmp_path / METRICS).touch()
    if text is not None:
        (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=words):
        resume.check_config(tmp_path, changed())


def test_data_of_a_run_is_recorded_and_compared(tmp_path):
    resume.check_data(tmp_path, {"training": "a"})
    resume.check_data(tmp_path, {"training": "a"})
    with pytest.raises(ConfigError, match="the training examples are not those that the run in"):
        resume.check_data(tmp_path, {"training": "b"})
    for _ in range(2):  # such as held-out examples that the run had not at first
        resume.check_data(tmp_path, {"training": "a", "later": "c"})
    with pytest.raises(ConfigError, match="the later examples are not those that the run in"):
        resume.check_data(tmp_path, {"training": "a", "later": "d"})
    (tmp_path / resume.DATA).write_text("{")
    with pytest.raises(ConfigError, match="data.json is not JSON"):
        resume.check_data(tmp_path, {"training": "a"})


def test_other_rendering_of_the_same_examples_is_told(tmp_path):
    told: list[str] = []
    prompts = [f"<29 Nov> {i}\ud800" for i in range(5)]
    for _ in range(2):  # the first records, the second agrees
        resume.check_rendering(tmp_path, "training", prompts, told.append)
    assert told == []
    resume.check_rendering(tmp_path, "training", [*prompts[:3], "<30 Nov> 3", "<30 Nov> 4"],
                           told.append)
    day = json.loads((tmp_path / resume.DATA).read_text())["rendered training"]["on"]
    line, = told
    assert "first number 3: '<30 Nov> 3'" in line and f"data.date={day} restores them" in line


LAYOUT = {"learner__micro_batch": 8, "learner__optimizer_offload": True, "learner__remat": True,
          "learner__packing": "sequence", "mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
SPEED = {"rollout__batch_size": 8, "spec__drafter": "off", "spec__depth": 2, "draft__path": "x",
         "control__cost_table": "x", "control__policy": "off", "distill__when": "interval",
         "rollout__rounds_per_launch": 1, "rollout__min_batch": 1}
RENEWED = {"mesh__data": {"control"}, "spec__depth": {"control", "acceptance"},
           "spec__drafter": {"control", "acceptance", "drafter"}, "learner__micro_batch": set()}
REFUSED = {"seed": 7, "group_size": 4, "prompts_per_step": 4, "model__path": "x",
           "data__level": "x", "reward__terms": ("a",), "rl__kl": 0.1,
           "learner__learning_rate": 1.0,
           "rollout__temperature": 0.5, "rollout__max_new_tokens": 9, "spec__rule": "rejection",
           "model__dtype": "bfloat16", "model__numerics": "invariant"}


@pytest.mark.parametrize("field, value", [
    *LAYOUT.items(), *SPEED.items(), ("reward__seconds", 9.0)])
def test_fields_that_leave_tokens_equal_are_named(tmp_path, field, value):
    write_config(tmp_path, changed())
    actual = resume.check_config(tmp_path, changed(**{field: value}), resume.EQUAL)
    name = field.replace("__", ".")
    assert list(actual) == [name] and " (was " in actual[name]
    line = resume.describe_changes(actual)
    assert line.startswith(f"resuming with {name} = ")
    assert (resume.LIMIT if field == "reward__seconds" else "tokens stay equal") in line
    assert (resume.LOSS in line) == (field in LAYOUT)
    assert ("start anew: " in line) == bool(resume.renewed(actual))
    assert resume.renewed(actual) == RENEWED.get(field, resume.renewed(actual))
    with pytest.raises(ConfigError, match=name):  # as for the training of a drafter
        resume.check_config(tmp_path, changed(**{field: value}))


RULE = {"spec__rule": "rejection"}  # by which tokens depend on speculation


@pytest.mark.parametrize("started, change", [
    *(({}, {field: value}) for field, value in REFUSED.items()),
    *((RULE, {field: value}) for field, value in SPEED.items())])
def test_fields_that_change_tokens_are_refused(tmp_path, started, change):
    write_config(tmp_path, changed(**started))
    with pytest.raises(ConfigError, match=next(iter(change)).replace("__", ".")):
        resume.check_config(tmp_path, changed(**started, **change), resume.EQUAL)
    resume.check_config(tmp_path, changed(**started, **LAYOUT), resume.EQUAL)


def test_every_name_of_the_table_is_a_field():
    fields = {*flat(as_dict(Config())), *(f.name for f in dataclasses.fields(Config))}
    assert {*resume.FREE, *resume.EQUAL, resume.RULE} <= fields
    assert {name for sections in resume.RENEWED.values() for name in sections} <= fields
