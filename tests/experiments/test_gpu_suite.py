"""The GPU suite at sizes that a CPU can do, with nothing but what it says it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "experiments" / "gpu_suite.sh"
# Imported before anything else: all direct dependencies but those that the suite needs are missing.
MISSING = '''
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
'''
NAMES = {"ml_collections", "tensorflow_datasets", "importlib_resources", "llvmlite", "safetensors",
         "gguf", "tokenizers", "jinja2", "huggingface_hub", "math_verify", "tensorboardX",
         "matplotlib"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a machine with a bare checkout."""
    place = tmp_path_factory.mktemp("bare")
    (place / "sitecustomize.py").write_text(MISSING.replace("NAMES", repr(NAMES)))
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PYTHONPATH": str(place), "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}


def run(environment: dict[str, str], *args: str, status: int = 0) -> subprocess.CompletedProcess:
    actual = subprocess.run([str(SUITE), *args], env=environment, capture_output=True, text=True,
                            cwd="/", timeout=500)
    assert actual.returncode == status, actual.stderr
    return actual


def tiny(environment: dict[str, str], path: Path, command: str, *args: str) -> dict[str, Any]:
    """What a command writes."""
    run(environment, command, "--tiny", f"--out={path}", *args)
    return json.loads(path.read_text())


@pytest.mark.ci
def test_kernels(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    actual = tiny(environment, path, "kernels", "--repeats=2")
    assert len(actual["cases"]) == 5 and "/" not in actual["command"].replace("experiments/", "")
    for name, case in actual["cases"].items():
        assert case["bytes"] > 0 and case["times_faster"] > 0, name
        timed = [who for who, one in case["contenders"].items() if "seconds" in one]
        assert "xla" in timed and case["best_alternative"] in timed
        assert all(case["contenders"][who]["bandwidth_fraction"] > 0 for who in timed)
        assert not [one for one in case["contenders"].values() if "failed" in one]
    assert "needs a tpu" in str(actual["cases"])
    assert "needs the package llvmlite" in str(actual["cases"])
    before = path.stat().st_mtime_ns
    tiny(environment, path, "kernels")
    assert path.stat().st_mtime_ns == before  # all cases were kept


@pytest.mark.ci
def test_rollouts(environment: dict[str, str], tmp_path: Path) -> None:
    [case] = tiny(environment, tmp_path / "rollouts.json", "rollouts")["cases"].values()
    plain, replayed = (case["settings"][f"{drafter}, xla"] for drafter in ("off", "replay"))
    assert plain["accept_length"] == 1 and replayed["accept_length"] > 4
    assert replayed["equal_streams"] == 1 and replayed["compilations"] == 0
    assert min(plain["over_bound"], replayed["over_bound"]) > 0


@pytest.mark.ci
def test_steps_without_drafts_and_with_a_head_that_learns(
        environment: dict[str, str], tmp_path: Path) -> None:
    assert "skipped: steps needs the package" in run(environment, "steps").stdout
    cases = tiny(environment | {"PYTHONPATH": ""}, tmp_path / "steps.json", "steps")["cases"]
    plain, head = (cases[f"tiny, {arm}"]["steps"] for arm in ("off", "eagle, learns"))
    assert [step["rollout/accept_length"] for step in plain] == [1, 1, 1]
    assert all(step["rollout/accept_length"] >= 1 and step["time/distill"] > 0 for step in head)
    assert all(step["learn/tokens_per_second"] > 0 and step["time/rollout"] + step["time/learn"]
               <= step["time/step"] for step in plain + head)


@pytest.mark.ci
def test_contract(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    first = tiny(environment, path, "contract", "--seconds=1")["cases"]
    assert len(first) == 1  # out of time after one test
    cases = tiny(environment, path, "contract")["cases"]
    outcomes = {name.partition("[")[2]: case["outcome"] for name, case in cases.items()
                if "test_tree_attention" in name}
    assert outcomes == {"pallas]": "passed", "pallas_triton]": "passed", "machine]": "skipped",
                        "xla]": "passed", "reference]": "passed"}
    assert "llvmlite" in str([case.get("reason") for case in cases.values()])
    assert cases.items() >= first.items()
