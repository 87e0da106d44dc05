"""One case of the speculation benchmark on a tiny model, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench import arms, tables
from experiments.bench.arms import TIMED, WARM_UP, Arm, Cell
from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, ModelSource, RolloutConfig
from specrl_jax.model.source import open_actor
from specrl_jax.runtime.compilation import CompilationCounter


@pytest.mark.ci
def test_speculation_case_times_every_arm_on_equal_tokens():
    config = Config(model=ModelSource("random:tiny"),
                    rollout=RolloutConfig(batch_size=2, max_new_tokens=6))
    actor = open_actor(config)
    params = actor.params(sharding.make_mesh(config.mesh))
    cells = [Cell(1, 1, 2), Cell(2, 1, 3)]
    actual = arms.run_case(config, actor.source, params, [[1, 2, 3], [4, 5], [6]], 2,
                                 ["history"], cells, 2, CompilationCounter(), ["budget"])
    json.dumps(actual)
    assert (actual["rows"], actual["prompts"], actual["tokens"]) == (2, 3, 18)
    assert (actual["tokens_compared"], actual["flips_per_million_tokens"]) == (4 * 18, 0)
    timed = actual["arms"]
    assert list(timed) == ["off", "history 0", "history 1x1x2", "history 2x1x3", "history budget"]
    assert all(one["equal_tokens"] and one["compilations"] == 0 for one in timed.values())
    assert all(len(one["speedup"]["values"]) == 2 for one in timed.values())
    assert timed["off"]["accept_length"] == timed["history 0"]["accept_length"] == 1
    assert timed["history 0"]["drafted_a_row"] == 0
    assert tables.speculation_table(actual).row_count == 5


def test_parse_setting_returns_cell_or_refuses():
    assert arms.parse("4x2x8") == Cell(4, 2, 8) and Cell(4, 2, 8).name == "4x2x8"
    for text in ("4x2", "4x2x0", "axbxc", ""):
        with pytest.raises(ConfigError, match="--setting"):
            arms.parse(text)


def test_earlier_responses_are_other_samples():
    config = Config(model=ModelSource("random:tiny"), rollout=RolloutConfig(max_new_tokens=6))
    actor = open_actor(config)
    prompts = [[1, 2, 3], [4, 5]]
    arm = Arm(config, actor.source, actor.params(sharding.make_mesh(config.mesh)), prompts, 2,
              "off", [Cell(1, 1, 2)], CompilationCounter())
    arm.compile()
    earlier = arm.earlier(3)
    runs = [arm.run(None, step) for step in (TIMED, WARM_UP)]
    assert [arms.describe([run], runs[:1])["flips"] for run in runs] == [0, 2]
    timed, calibrating = (run.result.sequences.tokens for run in runs)
    assert earlier.shape == (2, 3, 6)
    streams = np.concatenate([earlier, np.stack([timed, calibrating], 1)], 1)
    assert all(len(np.unique(row, axis=0)) == 5 for row in streams)


@pytest.mark.parametrize("flags, message", [
    (["--resume"], "1 rows were timed with other arms (history 4x1x5, history 9x1x10)"),
    (["--policy=greedy"], "--policy=greedy: choose some of budget, respec"),
])
def test_speculation_bad_flag_is_refused_in_one_line(
        command: Any, flags: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    before = dict.fromkeys(("off", "history 0", "history 9x1x10", "history budget"), {})
    out.write_text(text := json.dumps({"cases": {"1": {"arms": before}}}))
    done = command("bench.py", "speculation", "--config.model.path=random:tiny", f"--out={out}",
                   "--setting=4x1x5", *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert out.read_text() == text
