"""A comparison of what two runs wrote."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from helpers import repeatable_metrics

from specrl_jax.checkpoint.checkpoints import list_steps, read_meta, restore_part
from specrl_jax.metrics.run_files import read_metrics


def assert_same_runs(left: Path, right: Path, steps: int, keys: Sequence[str] = (
        "actor", "optimizer", "responses", "control")) -> None:
    """The same samples, metrics and last checkpoints, of which `keys` are compared."""
    samples = [workdir / "samples.jsonl" for workdir in (left, right)]
    assert samples[0].read_bytes() == samples[1].read_bytes()
    assert [record["step"] for record in read_metrics(right)] == list(range(steps))
    assert repeatable_metrics(left) == repeatable_metrics(right)
    folders = [workdir / "checkpoints" for workdir in (left, right)]
    assert [list_steps(folder)[-1] for folder in folders] == [steps, steps]
    assert read_meta(folders[0], steps) == read_meta(folders[1], steps)
    for key in keys:
        arrays = [jax.tree.leaves(restore_part(folder, steps, key)) for folder in folders]
        assert len(arrays[0]) == len(arrays[1]) > 0
        for a, b in zip(*arrays, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=key)
