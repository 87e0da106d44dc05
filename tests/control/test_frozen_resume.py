"""A resumed run without cost updates equals one that never stopped, whatever its controller."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import repeatable_metrics, run_training

from specrl_jax.checkpoint.checkpoints import restore_part
from specrl_jax.metrics.run_files import read_metrics

LEARNS = ("--config.spec.drafter=eagle", "--config.distill.batch=4", "--config.distill.updates=1",
          "--config.distill.micro_batch=4", "--config.distill.probe_tokens=2",
          "--config.draft.vocab=256")


@pytest.fixture(scope="module")
def cheap_drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    """The flag of a table, by what drafts, of costs that let drafting pay; else a rollout without a
    draft would be what is compared."""
    files: dict[bool, Path] = {}

    def flag(learns: tuple[str, ...]) -> str:
        if bool(learns) not in files:
            workdir = tmp_path_factory.mktemp("costs")
            file = files[bool(learns)] = workdir / "cost.json"
            run_training(workdir / "run", f"--config.control.cost_table={file}",
                         "--config.control.policy=budget", "--config.steps=1", *learns)
            stored = json.loads(file.read_text())
            costs = {name: np.zeros(np.shape(a)) for name, a in stored["costs"].items()}
            costs["verify"] += 1e-3 * (1 + 0.01 * np.arange(costs["verify"].shape[1])[:, None])
            costs["draft"] += 2e-6 * np.arange(costs["draft"].shape[1])[:, None]
            stored["costs"] = {name: a.tolist() for name, a in costs.items()}
            file.write_text(json.dumps(stored))
        return f"--config.control.cost_table={files[bool(learns)]}"

    return flag


@pytest.mark.ci
@pytest.mark.parametrize("policy, learns", [("budget", ()), *(
    pytest.param(*case, marks=pytest.mark.full) for case in (
        ("respec", ()),
        ("budget", (*LEARNS, "--config.distill.when=interval")),
        ("budget", (*LEARNS, "--config.distill.when=interval",
                    "--config.distill.overlap=true"))))])
def test_resumed_run_chooses_what_it_would_have_chosen(
        policy: str, learns: tuple[str, ...], cheap_drafts: Callable[[tuple[str, ...]], str],
        tmp_path: Path) -> None:
    flags = (f"--config.control.policy={policy}", "--config.control.cost_updates=off",
             cheap_drafts(learns), "--config.checkpoint_every=2", *learns)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_training(whole, *flags, "--config.steps=4")
    for steps in (2, 4):
        run_training(parts, *flags, f"--config.steps={steps}")
    assert (whole / "samples.jsonl").read_bytes() == (parts / "samples.jsonl").read_bytes()
    told = [repeatable_metrics(workdir) for workdir in (whole, parts)]
    assert told[0] == told[1] and told[0][-1]["control/launches"]
    assert all(sum(row["rollout/drafted"] for row in half) for half in (told[0][:2], told[0][2:]))
    for row in read_metrics(parts):  # by the controller's table, after a resume as before
        took = sum(launch["seconds"] for launch in row["time/launches"])
        if policy == "budget":
            assert row["time/saved"] == pytest.approx(row["control/plain_seconds"] - took, abs=1e-3)
    learned = ("drafter", "drafter_features") if learns else ()
    for key in ("actor", "control", "acceptance", *learned):
        arrays = [jax.tree.leaves(restore_part(w / "checkpoints", 4, key)) for w in (whole, parts)]
        assert len(arrays[0]) == len(arrays[1]) > 0
        for a, b in zip(*arrays, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=key)
