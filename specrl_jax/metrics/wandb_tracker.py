"""The tracker of Weights & Biases (extra `wandb`)."""

import importlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrl_jax.config import ConfigError
from specrl_jax.metrics.trackers import COLUMNS, SHOWN, RunInfo, numbers
from specrl_jax.runtime.files import write_atomically
from specrl_jax.structs import Json

try:
    wandb: Any = importlib.import_module("wandb")
except ImportError as error:
    raise ConfigError(f"track.to = 'wandb': {error}; install the extra by pip install "
                      "'specrl-jax[wandb]', or leave it out") from error

RUN_ID = "wandb.json"
INIT_SECONDS = 60  # that it may take to connect


class WeightsAndBiases:
    """A run of W&B, which goes on when the run does; RUN_ID in the working directory holds its id.

    With WANDB_MODE=offline it is written to WORKDIR/wandb, from where `wandb sync` uploads it.
    """

    def __init__(self, info: RunInfo) -> None:
        self._run = wandb.init(
            project=info.options.project, name=info.config.get("name"), id=run_id(info.workdir),
            resume="allow", dir=str(info.workdir), config=info.config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS))

    def write(self, metrics: Json, samples: Sequence[Json]) -> None:
        """Logs a step; W&B ignores those that it has already."""
        values = dict(numbers(metrics))
        if samples:
            rows = [[x.get(name) for name in COLUMNS] for x in samples[:SHOWN]]
            values["samples"] = wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log(values, step=metrics["step"])

    def close(self) -> None:
        """Ends the run, after what is left is uploaded."""
        self._run.finish()


def run_id(workdir: Path) -> str:
    """Returns the id of the W&B run of a working directory, made on the first call."""
    path = workdir / RUN_ID
    if not path.exists():
        write_atomically(path, json.dumps({"id": uuid.uuid4().hex[:8]}) + "\n")
    return json.loads(path.read_bytes())["id"]
