"""Plans: what does not fit is refused, the rest is ranked by hand-worked arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT

from experiments.compile import candidates, predict, traces, work
from experiments.compile.predict import Machine
from experiments.compile.traces import Trace
from experiments.compile.work import Model
from specrl_jax.config import Config, ConfigError, load_config, override
from specrl_jax.metrics.run_files import encode
from specrl_jax.model.tiny import TINY
from specrl_jax.runtime.hardware import Chip

NEVER, ALWAYS = (Trace("made up", np.asarray([4]), (rate,)) for rate in (0.0, 1.0))
SPEED = 1e9  # bytes/s
MATRICES = 2 * (8 * 4 * 8 * 64 + 64 * 128 + 2 * 128 * 64 + 64 * 128)  # of TINY's two layers
WEIGHTS = MATRICES + 512 * 64  # multiplied: the tied embedding is the head
PARAMETERS = WEIGHTS + 5 * 64  # and norms


def machine(available: float = 1e12, devices: int = 1) -> Machine:
    """Reads SPEED bytes/s, with products and small operations that cost nothing."""
    chip = Chip("v5e", "made up", 1, 1e30, SPEED, int(available))
    return Machine(chip, devices, dict.fromkeys(predict.EFFICIENCY, 1.0), round_seconds=0.0)


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


@pytest.mark.parametrize("text", [
    "[]", '{"lengths": [3]}', '{"lengths": [], "acceptance": [0.5]}',
    '{"lengths": [0], "acceptance": [0.5]}', '{"lengths": [3], "acceptance": [1.5]}'])
def test_wrong_trace_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--trace=.*give a run's directory") as error:
        traces.read(str(path))
    assert "\n" not in str(error.value)


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
    actual = predict.simulate(Model(config(), TINY), machine(), NEVER)
    token = 4 * 2 * 2 * 8 * 8
    context = 4 * 4 * 2 * (4 + 2) * token  # the mean over a sequence stands for each round
    written = 16 * 2 * token
    read = 16 * 4 * (MATRICES + 5 * 64 + 512 * 64)
    assert actual.seconds == pytest.approx((context + written + read) / SPEED)
    assert (actual.drafting, actual.plain_seconds) == (0, actual.seconds)


@pytest.mark.parametrize(("trace", "drafting"), [(NEVER, 0), (ALWAYS, 1)])
def test_drafts_run_where_they_pay(trace: Trace, drafting: int) -> None:
    model = Model(config(**{"spec.drafter": "eagle", "spec.depth": 2, "spec.nodes": 3}), TINY)
    actual = predict.simulate(model, machine(), trace)
    assert actual.drafting == drafting
    assert (actual.seconds < actual.plain_seconds) == bool(drafting)


def test_layouts_are_ranked_and_those_that_do_not_fit_refused() -> None:
    wide = config(**{"prompts_per_step": 16, "rollout.batch_size": 4})
    every = candidates.plan(wide, TINY, machine(), NEVER)
    seconds = [candidate.step.seconds for candidate in every.ranked]
    assert np.diff(seconds).min() > -0.01 * max(seconds) and not every.refused
    # Rounds read the weights, so more rows are faster; the update reads them a micro-batch.
    best = every.ranked[0].values
    assert (best["rollout.batch_size"], best["learner.micro_batch"]) == (32, 8)
    assert [candidate.values["rollout.batch_size"] for candidate in every.best] == [32, 16, 8, 4]
    most = max(sum(candidate.memory.values()) for candidate in every.ranked)
    some = candidates.plan(wide, TINY, machine(most / 1.5), NEVER)
    assert 0 < len(some.ranked) < len(every.ranked)
    assert sum(some.refused.values()) == len(every.ranked) - len(some.ranked)
    assert all(name.startswith("memory: most of it ") for name in some.refused)


STUBBED = f"""
import sys
sys.path.insert(0, {str(ROOT / "experiments")!r})
import plan
found = dict(compile_seconds=1.0, limit=9, least_seconds=1.0, copies=[], clock=None)
plan.targets.check_packages = lambda target: None
plan.compiling.compile_for = lambda config, target, only: dict(programs=[
    dict(found, program=only[0], peak=5, resident=dict(cache=2)),
    dict(program=only[1], error="it is broken")])
plan.config_flags.run(plan.main)
"""


def test_command_records_memory_of_what_it_compiled(command: Callable[..., Any], tmp_path: Path
                                                    ) -> None:
    (tmp_path / "stubbed.py").write_text(STUBBED)
    done = command(str(tmp_path / "stubbed.py"), "--config=qwen2_5_0_5b", "--target=v5e:2x2",
                   "--config.prompts_per_step=8", f"--out={tmp_path / 'plan.json'}")
    assert done.returncode == 1 and "it is broken" in done.stdout, done.stderr
    update, launch = json.loads((tmp_path / "plan.json").read_text())["compiled"][0]["programs"]
    assert (update["memory"], update["limit"]) == (7, 9)
    assert launch["program"].startswith("launch ") and launch["error"] == "it is broken"


@pytest.mark.parametrize(("arguments", "line"), [
    (["--config=tiny", "--target=v5e:2x"], "target = 'v5e:2x': give a TPU of v4, "),
    (["--config=tiny", "--target=h100", "--trace=nowhere"], "--trace=nowhere: "),
    (["--config=tiny", "--target=h100", "--noplain", "--config.spec.drafter=off"],
     "spec.drafter = 'off': --noplain leaves no layout; "),
    (["--config=qwen2_5_14b", "--target=v5e:2x2"], "target = 4 x v5e: no layout fits; the near"),
])
def test_command_ends_bad_input_with_one_line(command: Callable[..., Any], arguments: list[str],
                                              line: str) -> None:
    done = command("plan.py", *arguments, "--nocompile")
    assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)
