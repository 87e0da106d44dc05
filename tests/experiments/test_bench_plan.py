"""The controller's own time beside whole rounds, on a tiny model."""

import json

import numpy as np
import pytest
from control_cases import LADDER, load

from experiments.bench import parts, plan
from experiments.bench.arms import Arm, Cell
from specrl_jax import sharding
from specrl_jax.config import Config, ModelSource, RolloutConfig
from specrl_jax.control import budget
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.source import open_actor


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 8])
def test_shares_are_of_whole_rounds(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CALLS", 3)
    config = Config(model=ModelSource("random:tiny"), rollout=RolloutConfig(max_new_tokens=6))
    actor = open_actor(config)
    arm = Arm(config, actor.source, actor.params(sharding.make_mesh(config.mesh)),
              [[1, 2, 3], [4, 5]] * (rows // 2), rows, "history", [Cell(2, 1, 3)],
              CompilationCounter(), "budget")
    arm.warm_up(Cell(2, 1, 3), np.full((rows, 8, 6), -1, np.int32))
    told: list[str] = []
    found = json.loads(json.dumps(plan.measure(arm, 2, told.append)))
    assert found["compilations"] == 0 and len(found["buckets"]) > 1 and len(told) == 2
    assert set(found["share"]) == {"plan", "keep", "note", "plan + keep"}
    for i in range(2):
        values = {name: one["values"][i] for name, one in found["seconds"].items()}
        assert values["plan + keep"] == values["plan"] + values["keep"]
        share = found["share"]["keep"]["values"][i]
        assert share == pytest.approx(values["keep"] / values["round"])
    assert plan.table(found).row_count == 5


def test_trees_are_large_and_closed_under_survival() -> None:
    tree = parts.random_tree(4, 7, 3)
    assert tree.live.all() and tree.depth.max() == 3 and (tree.depth[:, 0] == 0).all()
    above = np.take_along_axis(tree.survival, tree.parent, 1)
    assert (tree.survival <= above).all() and (tree.survival[:, 1:] < above[:, 1:]).all()
    level = np.take_along_axis(tree.depth, tree.parent, 1)
    assert (tree.depth[:, 1:] == level[:, 1:] + 1).all()
    prices = np.zeros(len(LADDER), np.float32)
    live, bucket = parts._alone(lambda *args: budget.fill(*args, LADDER))(
        tree, load(4), np.float32(1), prices)
    assert int(bucket) == len(LADDER) - 1 and int(live.sum()) == 28, "all fit the largest bucket"
