"""Several processes of one run judge each answer once, stop together and wait aloud."""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import HANGS, ROOT, ends, run_training
from pairs import free_port, run_two, start_two
from same_runs import assert_same_runs

from specrl_jax.checkpoint.checkpoints import list_steps
from specrl_jax.config import ConfigError
from specrl_jax.metrics.run_files import read_metrics, read_samples
from specrl_jax.model import tiny
from specrl_jax.model.export import export
from specrl_jax.model.tensors import pack
from specrl_jax.runtime import processes

SIZES = ("--config.mesh.data=2", "--config.spec.drafter=off")


@pytest.mark.ci
def test_each_answer_is_judged_once_and_shared(tmp_path: Path) -> None:
    """The reward differs between the processes: judged in both, they would go different ways."""
    run = tmp_path / "run"
    run_two(run, *SIZES, "--config.steps=3",
            "--config.reward.terms=('tests.support.rewards:recorded',)")
    calls = [(tmp_path / f"calls.{i}").read_text().count("\n") for i in range(2)]
    samples = list(read_samples(run))
    assert calls == [12, 12] and len(samples) == 24
    assert [int(sample["reward"]) for sample in samples] == 3 * [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row["reward/mean"] for row in read_metrics(run)] == pytest.approx(
        [sum(s["reward"] for s in samples if s["step"] == step) / 8 for step in range(3)])
    assert all(row["compilations"] == 0 for row in read_metrics(run))


@pytest.mark.ci
def test_processes_choose_prompts_and_baselines_as_one_does(tmp_path: Path) -> None:
    """Each judges half of a rollout, so that none knows all pass rates by itself. A sum of two
    devices has one value in any order: weights are equal bit by bit."""
    flags = (*SIZES, "--config.steps=3", "--config.rl.filter=dynamic",
             "--config.rl.curriculum=pass_rate", "--config.rl.advantage=greedy_baseline",
             "--config.rl.loss=reinforce", "--config.reward.terms=('rewards:starts_even',)")
    run_two(tmp_path / "two", *flags)
    run_training(tmp_path / "one", *flags, devices=2)
    assert_same_runs(tmp_path / "one", tmp_path / "two", 3,
                     ("actor", "optimizer", "responses", "prompts"))
    assert max(row["rollout/batches"] for row in read_metrics(tmp_path / "two")) > 1


@pytest.mark.ci
def test_a_reward_that_raises_in_one_process_ends_both(tmp_path: Path) -> None:
    started = start_two(tmp_path / "run", *SIZES,
                        "--config.reward.terms=('tests.support.rewards:fails_in_process_1',)")
    other, failing = ends(started)
    assert [process.returncode for process in started] == [2, 2]
    assert "Traceback" not in other + failing and "Check failure" not in other + failing
    assert failing.splitlines()[-1].startswith("error: reward 'tests.support.rewards:fails")
    assert other.splitlines()[-1].startswith("error: process 1: reward 'tests.support.rewards")
    assert "judge is down" in other


@pytest.mark.ci
def test_sigterm_to_one_process_saves_and_ends_both(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = start_two(run, *SIZES, "--config.steps=100000", "--config.checkpoint_every=100000")
    lines = run / "metrics.jsonl"
    while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    sent = lines.read_bytes().count(b"\n")
    told = ends(started)
    assert [process.returncode for process in started] == [130, 130], told
    saved = list_steps(run / "checkpoints")[-1]
    assert saved == len(read_metrics(run)) > 1
    assert saved <= sent + 10, "it is obeyed after the step, whatever else the machine does"
    assert all(f"stopped; checkpoint {saved} is good" in text for text in told)


@pytest.mark.ci
@pytest.mark.parametrize("full", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_full_disk_of_one_process_ends_both_and_keeps_what_is_complete(
        tmp_path: Path, full: int) -> None:
    """Its part of a checkpoint cannot be written, while the other writes its own."""
    run = tmp_path / "run"
    started = start_two(run, *SIZES, "--config.steps=100000", "--config.checkpoint_every=3")
    while not list_steps(run / "checkpoints"):
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)
    resource.prlimit(started[full].pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    told = ends(started)
    assert started[full].returncode == 2 and started[1 - full].returncode != 0, told
    last = told[full].splitlines()[-1]
    assert last.startswith("error: ") and "File too large" in last, told
    assert "Traceback" not in told[full]
    assert list_steps(run / "checkpoints")


AGREED = """
import train
preemption = train.Preemption()
def agrees(name, asked):
    assert asked or preemption.note()
    return asked
train.processes.any_of = agrees
print(*(train._preempted(preemption) for _ in range(2)))
"""


def test_sigterm_while_the_processes_agree_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", AGREED], cwd=ROOT / "experiments", text=True,
                          capture_output=True, timeout=HANGS)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_says_that_it_waits_and_ends(index: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    program = ("from specrl_jax.runtime import processes; processes.SAY_AFTER = 0.3; "
               f"processes.join('{address}', 2, {index}, patience=1.0)")
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True,
                             capture_output=True, timeout=HANGS)
    others = f"the other processes of --coordinator={address}"
    assert process.returncode == 2
    assert process.stderr.splitlines() == [
        f"waiting for {others}", f"error: --distributed: {others} did not come within 1 s; start "
        "all processes with the same --coordinator and --processes"]


SHARES = """
from specrl_jax.runtime import processes
processes.join('127.0.0.1:{}', 2, {})
import jax
mine = jax.process_index()
for length in (1, 70_000, 0, 200_000):
    values = processes.share("test", {{"text": str(mine) * (length + mine)}})
    assert values == [{{"text": str(i) * (length + i)}} for i in range(2)], length
assert processes.any_of("test", mine == 1) and not processes.any_of("test", False)
print("shared", flush=True)
with processes.ending_together():
    if mine == 1:
        raise processes.ConfigError("no\\nroom")
    processes.share("test", {{}})
"""


@pytest.mark.ci
def test_processes_share_values_of_any_length_and_lose_one_in_a_line() -> None:
    port = free_port()
    started = [subprocess.Popen([sys.executable, "-c", SHARES.format(port, index)], cwd=ROOT,
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for index in range(2)]
    other, failing = ends(started)
    assert [process.returncode for process in started] == [2, 2], other + failing
    assert failing.splitlines()[-1] == "error: no room"
    assert other.splitlines()[-1].startswith("error: another process ended or cannot be reached")


@pytest.mark.ci
@pytest.mark.parametrize("field, values, words", [
    ("seed", "01", "seed = {0}: process {1} has {1}; give all processes the same flags"),
    ("model.path", "ab",
     "model.path = '{0}': process {1} has different contents for it (weights)")])
def test_processes_that_differ_end_in_a_line(
        tmp_path: Path, field: str, values: str, words: str) -> None:
    for name in values if field == "model.path" else "":
        weights = pack(tiny.TINY, tiny.random_tensors(tiny.TINY, seed=ord(name)))
        export(tmp_path / name, tiny.TINY, weights, tiny.byte_tokenizer())
    own = [(f"--config.{field}={value}",) for value in values]
    started = start_two(tmp_path / "run", *SIZES, own=own)
    told = ends(started)
    assert [process.returncode for process in started] == [2, 2], told
    assert any(words.format(values[i], f"{1 - i}") in told[i] for i in range(2))
    assert "Traceback" not in told[0] + told[1]


@pytest.mark.ci
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_ends_soon_after_another_was_killed(killed: int) -> None:
    program = ("from specrl_jax.runtime import processes; import time; processes.HEARTBEAT = 5; "
               "processes.join('127.0.0.1:{}', 2, {}); print('joined', flush=True); "
               "time.sleep(3600)")
    port = free_port()
    started = [subprocess.Popen([sys.executable, "-c", program.format(port, index)], cwd=ROOT,
                                text=True, stdout=subprocess.PIPE) for index in range(2)]
    try:
        assert [process.stdout.readline() for process in started] == 2 * ["joined\n"]
        started[killed].kill()
        assert started[1 - killed].wait(HANGS) != 0
    finally:
        for process in started:
            process.kill()


def test_share_out_of_one_process_maps_all_items() -> None:
    assert processes.share_out("test", lambda part: [(x, {"a": x}) for x in part], [1, 2]) == [
        (1, {"a": 1}), (2, {"a": 2})]
    assert processes.share("test", {"x": 1}) == [{"x": 1}] and processes.any_of("test", True)
    for coordinator in ("localhost", "host:port"):
        with pytest.raises(ConfigError, match=f"--coordinator = '{coordinator}': give HOST:PORT"):
            processes.join(coordinator, 2, 0)
