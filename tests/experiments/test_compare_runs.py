"""Two runs' tokens: equal, near ties, real differences, and bad input."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from experiments import compare_runs
from specrl_jax import prng
from specrl_jax.config import as_dict
from specrl_jax.data.prompts import make_prompts
from specrl_jax.model import weights
from specrl_jax.runtime.workdir import write_config
from specrl_jax.training import audit

KEYS = [(0, 0, 0), (0, 0, 1)]


def edit(source, target, change):
    """A copy of a run in which `change` was called with each record of samples.jsonl."""
    shutil.copytree(source, target)
    path = target / "samples.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return target


def compare(tmp_path, *arguments):
    """(exit status, what --json holds)."""
    path = tmp_path / "found.json"
    status = compare_runs.main([*map(str, arguments), f"--json={path}"])
    return status, json.loads(path.read_text())


@pytest.fixture(scope="module")
def drawn(small, tmp_path_factory):
    """A run at learning rate 0: two steps, one token a sequence, drawn by the plain formula."""
    config = dataclasses.replace(small, learner=dataclasses.replace(
        small.learner, learning_rate=0.0))
    source = weights.describe_source(config.model.path)
    prompt = make_prompts(config, source.tokenizer, print).texts[0]
    tokens = np.asarray([source.tokenizer.encode(prompt)], np.int32)
    logits = np.asarray(audit.next_logits(source.arch, source.params(), tokens,
                                          np.asarray(tokens.shape[1:])))[:, 0]
    run = tmp_path_factory.mktemp("drawn") / "run"
    run.mkdir()
    records, ranks = [], {}
    for step in range(2):
        for key in KEYS:
            words = prng.row_keys(config.seed, "train", step,
                                  *(np.asarray([k], np.int32) for k in key))
            noise = prng.gumbel(words, np.zeros(1, np.int32), np.arange(len(logits)))[0]
            ranks[step, key] = np.argsort(-(logits + np.asarray(noise))).tolist()
            records.append({
                "step": step, "prompt_id": key[0], "occurrence": key[1], "sample_id": key[2],
                "prompt": prompt, "tokens": ranks[step, key][:1]})
    for name, rows in (("samples", records), ("metrics", [{"step": 0}, {"step": 1}])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    write_config(run, as_dict(config))
    return run, ranks


def runner_up(ranks, *chosen):
    """Gives the chosen (step, sample id) the token with the second best score."""
    def change(record):
        at = record["step"], record["sample_id"]
        if at in chosen:
            record["tokens"] = [ranks[at[0], (0, 0, at[1])][1]]

    return change


def test_equal_runs(drawn, tmp_path, capsys):
    run, _ = drawn
    status, actual = compare(tmp_path, run, run)
    assert status == 0 and actual["per_million_tokens"] == 0 and actual["steps"] == 2
    assert "\nequal: 2 steps, 4 sequences, 4 tokens; " in capsys.readouterr().out


def test_steps_after_a_reward_failed_in_one_run_are_not_compared(drawn, tmp_path):
    run, ranks = drawn

    def change(record):
        record["reward"] = float(record["step"] == 0)
        runner_up(ranks, (1, 0))(record)

    def fail(record):
        record["reward"] = 0.0
        if (record["step"], record["sample_id"]) == (0, 1):
            record["failures"] = {"exact": "reward 'exact', example 0: late"}

    a, b = edit(run, tmp_path / "a", change), edit(run, tmp_path / "b", fail)
    status, actual = compare(tmp_path, a, b)
    assert status == 0 and actual["steps"] == 1 and actual["rewards_failed_apart"] == {"0": 1}


@pytest.mark.parametrize("length, warns", [(1.0, True), (1.5, False)])
def test_comparison_without_a_draft_is_noticed(drawn, tmp_path, capsys, length, warns):
    run = edit(drawn[0], tmp_path / "b", lambda record: None)
    rows = [{"step": step, "rollout/accept_length": length} for step in range(2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    status, actual = compare(tmp_path, run, run)
    assert status == 0 and actual["accept_length"] == [length] * 2
    assert ("neither run accepted a draft" in capsys.readouterr().out) == warns


def test_real_difference_is_reported(drawn, tmp_path):
    run, ranks = drawn
    other = edit(run, tmp_path / "b", runner_up(ranks, (0, 1), (1, 0)))
    status, actual = compare(tmp_path, run, other)
    assert (status, actual["near_ties"], actual["real"]) == (1, 0, 1)
    difference, = actual["differences"]
    assert (difference["step"], difference["sample_id"], difference["position"]) == (0, 1, 0)
    assert [difference[f"token_{x}"] for x in "ab"] == ranks[0, (0, 0, 1)][:2]
    assert difference["drawn"] == difference["token_a"] and difference["gap"] > 1e-4
    assert difference["tolerance"] == pytest.approx(1e-4)
    assert actual["per_million_tokens"] == pytest.approx(1e6 / 2)


def test_near_ties_leave_the_exit_status_0(drawn, tmp_path, monkeypatch):
    run, ranks = drawn
    other = edit(run, tmp_path / "b", runner_up(ranks, (1, 0)))
    monkeypatch.setattr(audit, "LEAST_TOLERANCE", 100.0)
    status, actual = compare(tmp_path, run, other)
    assert (status, actual["near_ties"], actual["real"]) == (0, 1, 0)
    assert actual["first_step_that_differs"] == 1


def test_all_steps_at_learning_rate_0_are_ruled(drawn, tmp_path):
    run, ranks = drawn
    other = edit(run, tmp_path / "b", runner_up(ranks, (0, 1), (1, 0), (1, 1)))
    status, actual = compare(tmp_path, run, other, "--all_steps")
    assert (status, actual["real"], actual["steps"]) == (1, 3, 2)
    for difference in actual["differences"]:
        assert difference["drawn"] == difference["token_a"]  # each with the noise of its own step


@pytest.mark.parametrize("section, values, flags, line", [
    ("spec", {"drafter": "off"}, [], None), ("rollout", {"top_k": 3}, ["--force"], None),
    ("rollout", {"top_k": 3}, [], "rollout.top_k = 0 in A and 3 in B"),
    ("learner", {"learning_rate": 0.5}, ["--all_steps", "--force"], "learner.learning_rate = 0.5"),
    (None, {}, [], "config.json is missing")])
def test_configs_must_promise_the_same_tokens(
        drawn, tmp_path, capsys, section, values, flags, line):
    run = edit(drawn[0], tmp_path / "b", lambda record: None)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").unlink()
    if section is not None:
        config[section] |= values
        (run / "config.json").write_text(json.dumps(config))
    assert compare_runs.main([str(drawn[0]), str(run), *flags]) == (2 if line else 0)
    error = capsys.readouterr().err
    assert (line is None and error == "") or (line in error and error.count("\n") == 1)


@pytest.mark.ci
def test_differences_are_ruled_with_the_weights_of_their_step(trained, tmp_path):
    def last_token(record):
        if record["step"] == 1:
            record["tokens"][-1] = (record["tokens"][-1] + 1) % 256

    before = sorted(trained.rglob("*"))
    other = edit(trained, tmp_path / "b", last_token)
    status, actual = compare(tmp_path, trained, other)  # repeats step 0: no checkpoint before 2
    assert (status, actual["checkpoint"], actual["replay_deviations"]) == (1, 0, 0)
    assert len(actual["differences"]) == 4
    assert all(d["drawn"] == d["token_a"] for d in actual["differences"])
    score = actual["differences"][0]["score_a"]
    initial = audit.rule(initial_of(trained), differences_of(trained, other))[0].score_a
    assert abs(score - initial) > 1e-3  # so the weights matter
    assert sorted(trained.rglob("*")) == before  # A is only read


@pytest.mark.ci
def test_replay_restores_a_checkpoint_and_only_reads_it(trained):
    made = audit.replay(trained, 2, print)
    assert (made.checkpoint, made.state.step, made.deviations) == (2, 2, 0)
    initial = initial_of(trained).state.policy.params["embed"]
    assert np.abs(np.asarray(made.state.policy.params["embed"] - initial)).max() > 1e-3


def initial_of(run):
    """The run with its initial weights."""
    return audit.replay(run, 0, print)


def differences_of(a, b):
    return [d for step in compare_runs.compare_steps(a, b) for d in step.differences]
