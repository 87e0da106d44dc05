"""eval.py and generate.py as commands, and the flags they share."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from helpers import ROOT, script_environment

from experiments import config_flags, run_flags
from specrl_jax.config import ConfigError, SpecOptions, as_dict, override
from specrl_jax.evaluation import generate
from specrl_jax.model import source as actors
from specrl_jax.model.tiny import byte_tokenizer
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.runtime.workdir import write_config

TINY = ("--config.model.path=random:tiny", "--config.rollout.max_prompt_tokens=96")


def resolve(*arguments):
    """(config, actor) of a command line, in this process."""
    argv, values = ["script.py", *map(str, arguments)], flags.FlagValues()
    config_flags.define(argv, values)
    flags.DEFINE_string("run", None, "", flag_values=values)
    flags.DEFINE_string("step", None, "", flag_values=values)
    values(argv)
    return run_flags.resolve(config_flags.parsed(values)[0], values)


@pytest.fixture
def run(tmp_path, small):
    """A run without a checkpoint."""
    write_config(tmp_path, as_dict(small))
    return tmp_path


def test_run_brings_its_config_and_overrides_win(run, small):
    config, actor = resolve(f"--run={run}", "--step=0", "--config.spec.drafter=off",
                            "--config.reward.terms=('exact',)")
    assert (config.spec.drafter, config.reward.terms) == ("off", ("exact",))
    assert config.learner == small.learner and config.name == "small"
    assert (actor.run, actor.step, actor.name) == (run, 0, f"{run}, step 0")


def test_overrides_need_only_fit_the_runs_own_config(tmp_path, small):
    """20 nodes are too many for the default preset, and 30 for this run."""
    wide = dataclasses.replace(small, spec=SpecOptions(max_nodes=25))
    write_config(tmp_path, as_dict(wide))
    for order in (1, -1):
        config, _ = resolve(*[f"--run={tmp_path}", "--config.spec.nodes=20", "--step=0"][::order])
        assert config == dataclasses.replace(wide, spec=SpecOptions(max_nodes=25, nodes=20))
    with pytest.raises(ConfigError, match=r"spec.nodes = 30: must lie in 1..spec.max_nodes = 25"):
        resolve(f"--run={tmp_path}", "--config.spec.nodes=30", "--step=0")


@pytest.mark.parametrize("arguments, message", [
    (["--run={run}"], "no complete checkpoint; wait for one, or give --step=0"),
    (["--run={run}/x"], "config.json: no such file; give the working directory of a run"),
    (["--run={run}", "--config=tiny"], "brings its own config; drop --config"),
    (["--step=3"], "--step=3: it needs --run=DIR"),
    (["--run={run}", "--step=last"], "--step=last: give a number of completed steps, or best"),
    (["--run={run}", "--step=best"], "best.json: no such file, so the run has evaluated nothing"),
    (["--run={run}", "--step=0", "--config.steps=0"], "steps = 0: must be at least 1"),
    (["--workdir=x"], "--workdir=x: this script writes no run"),
])
def test_contradictions_are_refused(run, arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(*(a.format(run=run) for a in arguments))


@pytest.mark.parametrize("text, stop, shown, tokens", [
    ("one\n\ntwo", ("\n\n",), "one", 5), ("one\ntwo", ("\n\n",), "one\ntwo", 7),
    ("abcabd", ("abd", "zz"), "abc", 6), ("aab", ("ab", "b"), "a", 3), ("x\n", ("\n\n",), "x\n", 2),
    ("é€é", ("€",), "é", 5), ("stop", ("stop",), "", 4)])
@pytest.mark.parametrize("at_once", [1, 3])
def test_stop_string_ends_text_however_many_tokens_come(
        text: str, stop: tuple[str, ...], shown: str, tokens: int, at_once: int) -> None:
    tokenizer, written = byte_tokenizer(), []
    stream = generate.Stream(tokenizer.stream(), written.append, stop)
    ids = np.asarray([tokenizer.encode(text)])
    for length in (*range(at_once, ids.size, at_once), ids.size):
        if stream.write_new(ids, [length]):
            break
    stream.close()
    assert "".join(written) == stream.text == shown
    assert stream.tokens == tokens and stream.ended == any(s in text for s in stop)


@pytest.mark.ci
def test_text_is_the_same_with_and_without_speculation(command):
    ask = ("generate.py", "--prompt=What is 1 + 1?", *TINY, "--config.rollout.max_new_tokens=60",
           "--config.rollout.temperature=0",  # greedy, it soon repeats itself, and
           "--config.control.policy=fixed")  # drafts whether that saves time or not
    fast, plain = command(*ask), command(*ask, "--config.spec.drafter=off")
    assert (fast.returncode, plain.returncode) == (0, 0), fast.stderr + plain.stderr
    assert fast.stdout == plain.stdout and len(fast.stdout) > 1
    accepted, one = (float(re.findall(r"accept length ([\d.]+) ", done.stderr)[0])
                     for done in (fast, plain))
    assert accepted > 1 and one == 1


@pytest.mark.ci
def test_generator_compiles_once_and_streams_many_answers(trained):
    config = actors.run_config(trained)
    config = override(config, {"rollout.max_new_tokens": 80})  # few bytes are text
    actor, written = actors.open_actor(config, trained), []
    generator = generate.Generator(config, actor, longest=96, say=lambda line: None)
    counter = CompilationCounter()
    first, second = (generator.answer("Hi", "", number, write=written.append)
                     for number in range(2))
    assert counter.take() == 0
    assert "".join(written) == first.text + second.text and len(written) >= 4
    assert first.tokens <= 80 and first.drafter == "history" and first.text != second.text
    with pytest.raises(ConfigError, match=r"--prompt = 'aaaa.* at most 128 fit; raise --config"):
        generator.answer("a" * 200, "", write=written.append)
    once = generate.generate(config, "Hi", actor=actor)
    assert once.text == first.text  # shapes change no token


@pytest.mark.ci
def test_interactive_answers_lines_until_an_empty_one():
    done = subprocess.run(
        [sys.executable, ROOT / "experiments/generate.py", "--interactive", *TINY,
         "--config.rollout.max_new_tokens=5"], input="One\nTwo\n\nThree\n", text=True,
        capture_output=True, timeout=300, env=script_environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("accept length") == 2 and done.stderr.count("loading") == 1


@pytest.mark.ci
def test_eval_of_a_run_and_of_its_beginning(trained, command, tmp_path):
    common = ("eval.py", f"--run={trained}", "--problems=5", "--split=train")
    done = command(*common, f"--out={tmp_path / 'a.json'}", "--samples=3", "--temperature=1")
    assert done.returncode == 0, done.stderr
    actual = json.loads((tmp_path / "a.json").read_text())
    assert (actual["step"], actual["run"], actual["data"]["split"]) == (2, str(trained), "train")
    assert len(actual["problems"]) == 5 and np.shape(actual["correct"]) == (5, 3)
    assert actual["accuracy"] == np.mean(actual["correct"])
    assert list(actual["pass_at"]) == ["1", "2", "3"]
    assert 5 * 3 <= actual["tokens"] <= 5 * 3 * 8 and actual["accept_length"] >= 1

    done = command(*common, "--step=0", f"--baseline={tmp_path / 'a.json'}",
                   f"--out={tmp_path / 'b.json'}")
    assert done.returncode == 0, done.stderr
    actual = json.loads((tmp_path / "b.json").read_text())
    assert actual["step"] == 0 and actual["paired"]["interval_method"] == "paired bootstrap"

    done = command("eval.py", f"--run={trained}", f"--baseline={tmp_path / 'a.json'}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "data.split = 'test': the baseline is about 'train'" in done.stderr
