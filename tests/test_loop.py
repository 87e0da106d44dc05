"""The step's safety net: updates that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro_config, micro_trainer

from specrl_jax.config import LearnerConfig
from specrl_jax.host import metrics
from specrl_jax.host.checkpoint import Checkpoints
from specrl_jax.host.compilation import CompilationCounter
from specrl_jax.host.progress import Progress
from specrl_jax.loop import TrainingError, run_steps


def test_a_run_of_bad_updates_is_skipped_counted_and_stopped_with_a_checkpoint(
        tmp_path, capsys) -> None:
    config = micro_config(
        steps=9, learner=LearnerConfig(micro_batch=16, max_bad_steps=3))
    trainer = micro_trainer(config)
    norm = trainer.state.params["final_norm"]
    broken = trainer.state.params | {"final_norm": jnp.full_like(norm, jnp.nan)}
    trainer.state = trainer.state.replace(params=broken)
    before = jax.tree.map(np.asarray, trainer.state)
    with (Checkpoints(tmp_path / "checkpoints", 2) as checkpoints,
          metrics.Writer(tmp_path, 0) as writer, Progress(9, 0) as progress,
          pytest.raises(TrainingError, match="max_bad_steps = 3")):
        run_steps(trainer, checkpoints, writer, progress, CompilationCounter())
    assert [row["applied"] for row in metrics.read_metrics(tmp_path)] == [0.0, 0.0, 0.0]
    assert checkpoints.steps() == [3]
    assert "not finite; skipped" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, trainer.state))
