"""Plans: what does not fit is refused, the rest is ranked by hand-worked arithmetic."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT

from experiments import plan
from experiments.compile import seconds, targets, traces, work
from experiments.compile.traces import Trace
from experiments.compile.work import Model
from specrl_jax.config import Config, ConfigError, load_config, override
from specrl_jax.metrics.run_files import encode
from specrl_jax.model.tiny import TINY
from specrl_jax.runtime.hardware import CHIPS, Chip

NEVER, ALWAYS = (Trace("made up", np.asarray([4]), (rate,)) for rate in (0.0, 1.0))
SPEED = 1e9  # bytes/s
MATRICES = 2 * (8 * 4 * 8 * 64 + 64 * 128 + 2 * 128 * 64 + 64 * 128)  # of TINY's two layers
WEIGHTS = MATRICES + 512 * 64  # multiplied: the tied embedding is the head
PARAMETERS = WEIGHTS + 5 * 64  # and norms
CHIP = Chip("v5e", "made up", 1, 1e30, SPEED, int(1e12))  # reads SPEED bytes/s, products are free


def config(**values: Any) -> Config:
    base = {"prompts_per_step": 4, "group_size": 2, "rollout.batch_size": 2,
            "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 4, "rollout.min_batch": 1,
            "learner.micro_batch": 2, "learner.packing": "sequence", "spec.drafter": "off"}
    return override(load_config("tiny"), base | values)


def test_accept_length_sums_the_chances_of_a_chain() -> None:
    trace = Trace("", None, (0.5, 0.4))
    assert trace.accept_length(2) == pytest.approx(1 + 0.5 + 0.2)
    assert trace.accept_length(3) == pytest.approx(1 + 0.5 + 0.2 + 0.08)


def test_trace_of_a_run_has_its_lengths_and_acceptance(tmp_path: Path) -> None:
    """Half of the rounds drafted two tokens, and committed 1.75 tokens: a + a**2 = 0.75."""
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(
        {"step": 0, "tokens": [1] * n}) + "\n" for n in (3, 5)))
    (tmp_path / "metrics.jsonl").write_text(encode({
        "step": 0, "control/drafting": 0.5, "control/draft_depth": 1.0,
        "rollout/accept_length": 1.375}))
    trace = traces.read(str(tmp_path))
    assert trace.lengths is not None and sorted(trace.lengths) == [3, 5]
    assert trace.acceptance == pytest.approx((0.5,), abs=1e-3)


@pytest.mark.parametrize(("files", "names"), [
    ({}, "no run; name a run's directory"),
    ({"metrics.jsonl": "", "samples.jsonl": ""}, "the run has no steps; name another")])
def test_trace_of_no_run_is_refused_in_one_line(
        tmp_path: Path, files: dict[str, str], names: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^--trace = .*{names}$"):
        traces.read(str(tmp_path))


def test_memory_is_that_of_the_shapes() -> None:
    needs = work.memory(Model(config(), TINY))
    assert needs["learner state"] == 12 * PARAMETERS
    assert needs["published weights"] == 4 * PARAMETERS
    assert needs["caches"] == 2 * 64 * 4 * (2 * 2 * 8 * 8)  # 13 slots become one segment of 64
    split = work.memory(Model(config(**{
        "mesh.fsdp": 2, "mesh.tensor": 2, "rollout.batch_size": 4}), TINY))
    assert split["learner state"] == 3 * PARAMETERS
    assert split["published weights"] == 2 * PARAMETERS
    assert split["caches"] == needs["caches"] / 2


def test_rollout_reads_weights_and_contexts_each_round() -> None:
    """8 sequences of 4 tokens in 2 slots are 16 rounds, whose contexts are 4, 5, 6 and 7 tokens."""
    model = Model(config(), TINY)
    actual = seconds.step(model, seconds.least_round(model, CHIP), {}, NEVER)
    token = 4 * 2 * 2 * 8 * 8
    context = 4 * 4 * 2 * (4 + 2) * token  # the mean over a sequence stands for each round
    written = 16 * 2 * token
    read = 16 * 4 * (MATRICES + 5 * 64 + 512 * 64)
    assert actual.seconds == actual.plain == pytest.approx((context + written + read) / SPEED)


@pytest.mark.parametrize(("trace", "drafts"), [(NEVER, False), (ALWAYS, True)])
def test_drafts_run_where_they_pay(trace: Trace, drafts: bool) -> None:
    model = Model(config(**{"spec.drafter": "eagle", "spec.depth": 2, "spec.nodes": 3}), TINY)
    actual = seconds.step(model, seconds.least_round(model, CHIP), {}, trace)
    assert (actual.seconds < actual.plain) == drafts


def test_cost_by_the_clock_has_the_costliest_branch_and_attention_apart() -> None:
    """On v5e a cycle is 1 / 1.5e9 s."""
    account = {"where": {
        "/branch 0": {"products": 100}, "/branch 2/loop x24": {"products": 600, "attention": 300},
        "/branch 10": {"draw": 30}, "outside of loops": {"drafter": 70, "attention": 60}}}
    cost = seconds.cost(account, CHIPS["v5e"], rows=4, slots=5)
    assert (cost.fixed * 1.5e9, cost.token * 1.5e9) == pytest.approx((670, 360 / 20))
    plain, drafted = ([seconds.Cost(4, 1.0, 0.5), seconds.Cost(8, 3.0, 0.5)],
                      [seconds.Cost(4, 5.0, 0.25)])
    # The least is 1 up to 4 rows, and their number over 4 beyond: ratios of 1, 1.25 and 1.5.
    round_of = seconds.clocked_round(lambda rows, *_: max(rows / 4, 1), plain, drafted)
    assert [round_of(rows, 8, False) for rows in (2, 4, 6, 8, 16)] == pytest.approx(
        [1 + 4, 1 + 4, 1.25 * 1.5 + 4, 1.5 * 2 + 4, 1.5 * 4 + 4])
    assert round_of(16, 8, True) == pytest.approx(5 * 4 + 2)


def test_update_by_the_clock_repeats_its_micro_batches() -> None:
    """8 sequences, 2 at a time, in two optimiser steps: 2 x (10 + 2 x 1000) cycles."""
    model = Model(config(**{"rl.minibatches": 2}), TINY)
    account = {"where": {"/loop x?/loop x2": {"products": 900}, "/loop x?": {"rest": 100},
                         "outside of loops": {"rest": 10}}}
    assert seconds.update_seconds(model, CHIPS["v5e"], account) * 1.5e9 == pytest.approx(4020)


def target(available: float) -> targets.Target:
    return targets.Target("made up", dataclasses.replace(CHIP, available=int(available)), "1")


def test_layouts_are_ranked_and_those_that_do_not_fit_refused() -> None:
    wide = config(**{"prompts_per_step": 16, "rollout.batch_size": 4})
    every, refused = plan.fitting(wide, TINY, target(1e12), NEVER, plain=True)
    times = [candidate.step.seconds for candidate in every]
    assert np.diff(times).min() > -0.01 * max(times) and not refused
    # Rounds read the weights, so more rows are faster; the update reads them a micro-batch.
    best = every[0].values
    assert (best["rollout.batch_size"], best["learner.micro_batch"]) == (32, 8)
    assert [candidate.values["rollout.batch_size"] for candidate in every] == [32, 16, 8, 4]
    most = max(sum(candidate.memory.values()) for candidate in every)
    some, refused = plan.fitting(wide, TINY, target(most / 1.2), NEVER, plain=True)
    assert 0 < len(some) < len(every)
    assert all(name.startswith("memory: most of it ") for name in refused)
    with pytest.raises(ConfigError, match="no layout fits; the nearest misses"):
        plan.fitting(wide, TINY, target(1e3), NEVER, plain=True)


STUBBED = f"""
import sys
sys.path.insert(0, {str(ROOT / "experiments")!r})
import plan
def compiled(config, target, only):
    ticks = {{"where": {{"outside of loops": {{"rest": 1.5e9}}}}, "cycles": 1.5e9, "kernels": {{}}}}
    fits = dict(limit=9, peak=5, resident={{}}, copies=[], clock=ticks)
    broken = dict(error="it is broken") if config.rollout.batch_size == 4 else {{}}
    return dict(programs=[dict(fits, program=name) | broken for name in only])
plan.targets.check_packages = lambda target: None
plan.compiling.compile_for = compiled
plan.config_flags.run(plan.main)
"""


@pytest.mark.parametrize(("least", "code"), [(8, 0), (4, 1)])
def test_command_shows_seconds_by_the_clock_of_what_compiles(
        command: Callable[..., Any], tmp_path: Path, least: int, code: int) -> None:
    (tmp_path / "stubbed.py").write_text(STUBBED)
    done = command(str(tmp_path / "stubbed.py"), "--config=qwen2_5_0_5b", "--target=v5e:1x1",
                   "--config.prompts_per_step=4", f"--config.rollout.min_batch={least}",
                   f"--out={tmp_path / 'plan.json'}")
    made = json.loads((tmp_path / "plan.json").read_text())
    assert done.returncode == code, done.stderr
    assert len(made["failures"]) == 3 * code and ("it is broken" in done.stdout) == bool(code)
    rounds = [one["step"]["rollout"] for one in made["clock"]]
    assert len(rounds) == 3 * (1 - code) and all(each > 100 for each in rounds)  # 1 s a round


@pytest.mark.parametrize(("arguments", "line"), [
    (["--config=tiny", "--target=v5e:2x"], "target = 'v5e:2x': give a TPU of v4, "),
    (["--config=tiny", "--target=h100", "--trace=nowhere"], "--trace = 'nowhere': no run; "),
    (["--config=tiny", "--target=h100", "--noplain", "--config.spec.drafter=off"],
     "spec.drafter = 'off': --noplain leaves no layout; "),
    (["--config=qwen2_5_14b", "--target=v5e:2x2"], "target = v5e:2x2: no layout fits; the nea"),
])
def test_command_ends_bad_input_with_one_line(command: Callable[..., Any], arguments: list[str],
                                              line: str) -> None:
    done = command("plan.py", *arguments, "--nocompile")
    assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)
