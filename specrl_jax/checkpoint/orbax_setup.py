"""How this package uses Orbax: with checksums, quietly, below names of any kind."""

import contextlib
import glob
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from specrl_jax.runtime.files import write_checksums

# Orbax rewrites these two after the checksums are taken; restoring does not read them.
UNCHECKED = ("_CHECKPOINT_METADATA", "commit_success.txt")


class ChecksumHandler(ocp.CheckpointHandler):
    """The last item of a step: writes the checksums of all others once they are complete.

    Orbax calls `finalize` in one process, item by item in the order of the registry, and renames
    the step's directory only then. So a complete checkpoint has its checksums.
    """

    def save(self, directory: Any, args: "ChecksumSave") -> None:
        """Writes nothing: the files are not complete yet."""

    def restore(self, directory: Any, args: Any = None) -> None:
        """Reads nothing: `damage` of runtime/files.py compares the checksums."""

    def finalize(self, directory: Any) -> None:
        """Writes the checksums of the step that has the item `directory`."""
        write_checksums(Path(directory).parent, UNCHECKED)


@ocp.args.register_with_handler(ChecksumHandler, for_save=True)
class ChecksumSave(ocp.args.CheckpointArgs):
    """Asks for a step's checksums."""


def handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns what writes and reads the items of a step, the checksums last."""
    registry, arrays = ocp.handlers.DefaultCheckpointHandlerRegistry(), array_handler()
    registry.add("state", ocp.args.PyTreeSave, arrays)
    registry.add("state", ocp.args.PyTreeRestore, arrays)
    meta = ocp.JsonCheckpointHandler()
    registry.add("meta", ocp.args.JsonSave, meta)
    registry.add("meta", ocp.args.JsonRestore, meta)
    registry.add("checksums", ChecksumSave, ChecksumHandler())
    return registry


@contextlib.contextmanager
def quiet_orbax() -> Iterator[Callable[[], None]]:
    """Drops what Orbax logs and what its threads print; its errors are also raised.

    Yields a function to call when a write has failed: then that lasts, since other writes of the
    same save fail later, after the block, too.
    """
    def keep(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def show(problem: Any) -> None:
        if str(problem.exc_value) != "Event loop is closed":  # TensorStore calls back too late
            shown(problem)

    logger, shown = logging.getLogger("absl"), sys.unraisablehook
    logger.addFilter(keep)
    sys.unraisablehook = show
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, sys, "unraisablehook", shown)
        undo.callback(logger.removeFilter, keep)

        def failed() -> None:
            undo.pop_all()
            logging.getLogger("asyncio").addFilter(_retrieved)

        yield failed


def _retrieved(record: logging.LogRecord) -> bool:
    """Drops the traceback that asyncio prints for a failed write whenever it is collected."""
    return "exception was never retrieved" not in record.getMessage()


@contextlib.contextmanager
def literal(directory: Path) -> Iterator[Path]:
    """Gives a path of `directory` that Orbax cannot take for a pattern of names: it globs below
    it, and would find nothing in "lr[1e-5]"."""
    if glob.escape(str(directory)) == str(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="specrl_jax.") as place:
        link = Path(place) / "checkpoints"
        link.symlink_to(directory)
        yield link


def array_handler() -> ocp.PyTreeCheckpointHandler:
    # By default Orbax slices replicated arrays so that all replicas write a part, which compiles
    # a program for each sharding in the middle of a run. Compressed, weights are 7 % smaller, and
    # saving them takes up to as much memory again as they do.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))))
