"""How this package uses Orbax: in the background, quietly, below names of any kind."""

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

from specrl_jax import sharding
from specrl_jax.structs import PyTree

# Orbax rewrites these two after the checksums are taken; restoring does not read them.
UNCHECKED = ("_CHECKPOINT_METADATA", "commit_success.txt")
SECONDS = 24 * 3600  # that one save may last; the heartbeats of JAX notice a lost process earlier


def async_checkpointer(written: Callable[[], None]) -> ocp.AsyncCheckpointer:
    """Returns what saves steps in the background; it calls `written` in process 0 when all files
    of a step are written, before it commits the step."""
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(handler_registry=handlers()),
        async_options=ocp.options.AsyncOptions(
            timeout_secs=SECONDS, post_finalization_callback=written),
        atomicity_options=ocp.options.AtomicityOptions(
            mode=ocp.options.AtomicityMode.ATOMIC_RENAME))


def handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns what writes and reads the items of a step."""
    registry, arrays = ocp.handlers.DefaultCheckpointHandlerRegistry(), array_handler()
    registry.add("state", ocp.args.PyTreeSave, arrays)
    registry.add("state", ocp.args.PyTreeRestore, arrays)
    meta = ocp.JsonCheckpointHandler()
    registry.add("meta", ocp.args.JsonSave, meta)
    registry.add("meta", ocp.args.JsonRestore, meta)
    return registry


def apart(leaf: Any) -> Any:
    """Returns a leaf, or a copy if it is in host memory: Orbax writes from there without a copy of
    its own, while a step may donate the array."""
    if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == sharding.HOST:
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    return leaf


def host_bytes(arrays: PyTree) -> int:
    """Returns the bytes that this process copies to host memory when it saves arrays."""
    def size(leaf: Any) -> int:
        if isinstance(leaf, jax.Array):
            return sum(shard.data.nbytes for shard in leaf.addressable_shards
                       if shard.replica_id == 0)
        return np.asarray(leaf).nbytes

    return sum(map(size, jax.tree.leaves(arrays)))


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
    # saving them takes up to as much memory again as they do. On a CPU, Orbax would write from the
    # arrays themselves, which keeps them from being donated, unless it copies them as on a GPU.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, enable_pinned_host_transfer=jax.default_backend() != "tpu",
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))))
