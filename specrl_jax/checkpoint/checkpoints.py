"""Checkpoints of a run: Orbax steps with checksums of their files, written in the background.

Orbax writes a step under a temporary name. When all files are there, their checksums are written,
then Orbax's commit file, and the directory gets its name: one that has its name has both, and a
killed save leaves nothing that looks like a checkpoint. Orbax does not notice later damage: it
restores a flipped bit in an array or in the JSON item silently, and most other damage raises a bare
`Exception`. So checksums are compared before Orbax reads anything.

A step's directory, named by the number of completed RL steps: `state/` (the arrays), `meta/`
(JSON), `checksums.json`, and Orbax's own files.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from specrl_jax.checkpoint.orbax_setup import (
    UNCHECKED,
    apart,
    array_handler,
    async_checkpointer,
    host_bytes,
    literal,
    quiet_orbax,
)
from specrl_jax.checkpoint.steps import (
    NONE,
    PARTIAL,
    SAVE,
    list_steps,
    named_steps,
    newest_intact,
    remove,
    remove_failed,
    remove_partial,
)
from specrl_jax.config import ConfigError
from specrl_jax.runtime.files import CHECKSUMS, damage, write_checksums
from specrl_jax.runtime.paths import writing
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.structs import Json, PyTree, ignore

BEST = "best"  # of a checkpoint's meta: the best evaluation so far, with its "step"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DELETION = 0.5  # seconds after which a checkpoint that is being deleted has lost its checksums


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read; the message names it, the reason and a way out."""


def describe(tree: PyTree) -> dict[str, list[Any]]:
    """Returns [shape, dtype] of every leaf by its path."""
    def dtype(leaf: Any) -> str:
        return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)

    return {jax.tree_util.keystr(path, simple=True, separator="/"):
            [list(np.shape(leaf)), dtype(leaf)]
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def check_leaves(step_dir: Path, saved: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    """Raises CheckpointError with the first leaf in which a checkpoint differs from a run."""
    for name in sorted(saved.keys() | wanted.keys()):
        mine, asked = (f"{of[name][1]}{of[name][0]}" if name in of else "absent"
                       for of in (saved, wanted))
        if mine != asked:
            raise CheckpointError(f"{step_dir}: {name} is {mine} in the checkpoint and {asked} in "
                                  f"this run: use the configuration that wrote it")


def _savable(leaf: Any) -> Any:
    # Orbax saves numpy scalars but refuses to restore them.
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else np.asarray(leaf)


class CheckpointReader(Protocol):
    """What a trainer restores from; `Checkpoints` is one."""

    def restore_latest(self, abstract: dict[str, PyTree], required: Collection[str] | None = None
                       ) -> tuple[int, dict[str, PyTree], Json] | None: ...


class Checkpoints:
    """The checkpoints of one run. A context manager; every process makes the same calls.

    Saving is asynchronous, with one save in flight: `save` waits for the one before, copies the
    arrays to the host and returns. The end of the block waits for the last. What killed saves and
    removals left is removed at its start.
    """

    def __init__(self, directory: str | Path, keep: int,
                 warn: Callable[[str], None] = loud) -> None:
        """Args: directory, created if missing; keep, checkpoints kept; warn, gets warnings."""
        self.directory, self._keep, self._warn = Path(directory).absolute(), keep, warn
        self._save: Future[None] | None = None  # the one in flight
        self._writing = NONE  # its step

    def __enter__(self) -> "Checkpoints":
        with contextlib.ExitStack() as stack:
            self._failed = stack.enter_context(quiet_orbax())
            with writing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
                if jax.process_index() == 0:
                    remove_partial(self.directory)
            self._place = stack.enter_context(literal(self.directory))
            self._checkpointer = stack.enter_context(async_checkpointer(self._write_checksums))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with self._stack:
            try:
                self.finish()
            except ConfigError as failure:
                if kind is None:
                    raise
                self._warn(str(failure))  # it must not hide the error that ended the run

    def save(self, step: int, arrays: PyTree, meta: Json, complete: Callable[[], None] = ignore
             ) -> int:
        """Begins the checkpoint of `step` completed steps; returns the bytes of its host copy.

        Args:
          step: larger than every step saved so far.
          arrays: dict of pytrees of jax or numpy arrays; they may be donated after the call.
          meta: JSON values (tuples come back as lists, keys as strings); meta[BEST]["step"] is the
            checkpoint to keep besides the newest.
          complete: called in a thread of process 0 when the checkpoint is complete, before older
            ones are removed.

        Raises:
          CheckpointError: it or the one before cannot be written; the earlier checkpoints are
            untouched.
          TypeError: `meta` holds a value that JSON has not.
        """
        self.finish()
        newest = max(named_steps(self.directory), default=NONE)
        if newest >= step:
            raise CheckpointError(f"{self.directory}: checkpoint {step} would not be the newest, "
                                  f"{newest} exists: resume from it or choose another directory")
        arrays = jax.tree.map(_savable, arrays)
        note = json.loads(json.dumps({"meta": meta, "leaves": describe(arrays)}))
        self._writing = step
        with self._saving(step):
            self._checkpointer.save(self._place / str(step), ocp.args.Composite(
                state=ocp.args.PyTreeSave(jax.tree.map(apart, arrays)),
                meta=ocp.args.JsonSave(note)))
        pool = ThreadPoolExecutor(1, SAVE)
        self._save = pool.submit(self._complete, step, meta.get(BEST, {}).get("step", NONE),
                                 complete)
        pool.shutdown(wait=False)
        return host_bytes(arrays)

    def check(self) -> None:
        """Raises CheckpointError if the save in flight has failed."""
        if self._save is not None and self._save.done():
            self.finish()

    def finish(self) -> None:
        """Waits for the save in flight, if any. Raises CheckpointError if it fails."""
        if self._save is not None:
            wait([self._save])
            save, self._save = self._save, None
            save.result()

    def _write_checksums(self) -> None:
        write_checksums(self.directory / f"{self._writing}{PARTIAL}", UNCHECKED)

    def _complete(self, step: int, best: int, complete: Callable[[], None]) -> None:
        """Waits until a checkpoint is complete; then process 0 removes old ones."""
        with self._saving(step):
            self._checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            complete()
            steps = named_steps(self.directory)
            with writing(self.directory):
                for old in sorted({*steps} - {*steps[-self._keep:], best}):
                    remove(self.directory / str(old))

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Raises CheckpointError if the block cannot write a checkpoint, and removes it."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._failed()
            remove_failed(self.directory / str(step))
            kept = ", ".join(map(str, list_steps(self.directory))) or "none"
            raise CheckpointError(
                f"{self.directory / str(step)}: the checkpoint could not be written "
                f"({_brief(error)}); complete ones: {kept}. "
                f"{'Free some space and resume' if _is_full(error) else 'Mend that, and resume'}"
            ) from error

    def restore_latest(self, abstract: PyTree, required: Collection[str] | None = None
                       ) -> tuple[int, PyTree, Json] | None:
        """Returns the newest intact checkpoint as (step, arrays, meta); None if there is none.

        Newer damaged ones are reported and renamed to `STEP.damaged`, so that their steps can be
        saved again. If none is left, a warning says that the run starts again from step 0.

        Args:
          abstract: the tree of jax.ShapeDtypeStruct with shardings to restore to; a leaf that is
            a numpy array comes back as one.
          required: top-level entries that it must hold; others are left out where they are not the
            same in `abstract` and the checkpoint. None is all.

        Raises:
          CheckpointError: the newest intact one holds other leaves than `abstract`.
        """
        self.finish()
        step = newest_intact(self.directory, self._warn) if jax.process_index() == 0 else 0
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        if step == NONE:
            return None
        step_dir = self.directory / str(step)
        saved = _note(step_dir)["leaves"]
        if required is not None:
            wanted = describe(abstract)
            keys = {name.split("/")[0] for name in [*saved, *wanted]}
            out = {key for key in keys - set(required) if _part(saved, key) != _part(wanted, key)}
            saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] not in out}
            abstract = {key: part for key, part in abstract.items() if key not in out}
        check_leaves(step_dir, saved, describe(abstract))
        restored: Any = self._checkpointer.restore(self._place / str(step), ocp.args.Composite(
            state=_restore_args(jax.tree.map(_savable, abstract)), meta=ocp.args.JsonRestore()))
        return step, restored.state, restored.meta["meta"]


@contextlib.contextmanager
def _reading(directory: str | Path, step: int) -> Iterator[Path]:
    """Gives the directory of an intact checkpoint. Raises CheckpointError for whatever Orbax
    raises in the block, also where a run deletes the checkpoint meanwhile."""
    step_dir = Path(directory).absolute() / str(step)
    whole = (step_dir / CHECKSUMS).exists()
    try:
        if not step_dir.is_dir():
            have = ", ".join(map(str, list_steps(directory))) or "none"
            raise CheckpointError(f"{step_dir}: no such checkpoint; complete ones: {have}")
        if reason := damage(step_dir):
            raise CheckpointError(f"{step_dir}: damaged: {reason}; choose another step")
        yield step_dir
    except Exception as error:
        time.sleep(DELETION if whole else 0)
        if whole and not (step_dir / CHECKSUMS).exists():
            raise CheckpointError(f"{step_dir}: was deleted while it was read; choose a newer "
                                  f"step") from error
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{step_dir}: cannot be read ({type(error).__name__}: "
                              f"{_brief(error)}); choose another step") from error


def _note(step_dir: Path) -> Json:
    return json.loads((step_dir / "meta" / "metadata").read_bytes())


def _part(leaves: dict[str, list[Any]], key: str) -> dict[str, list[Any]]:
    """Returns the leaves of one top-level entry."""
    return {name: leaf for name, leaf in leaves.items() if name.split("/")[0] == key}


def _is_full(error: BaseException) -> bool:
    """Returns whether a write failed for lack of space, quota or file size."""
    return isinstance(error, OSError) and error.errno in FULL or any(
        os.strerror(number) in str(error) for number in FULL)


def _brief(error: BaseException) -> str:
    """Returns one line; TensorStore puts the reason at the end of a long one, before its own
    options."""
    line = (str(error).splitlines() or [type(error).__name__])[0].split(" [tensorstore_spec=")[0]
    return line if len(line) <= 160 else f"{line[:40]} ... {line[-100:]}"


def read_meta(directory: str | Path, step: int) -> Json:
    """Returns `meta` of one checkpoint; raises CheckpointError if it is missing or damaged."""
    with _reading(directory, step) as step_dir:
        return _note(step_dir)["meta"]


def saved_leaves(directory: str | Path, step: int, key: str) -> dict[str, list[Any]]:
    """Returns [shape, dtype] of the leaves of one top-level entry by their paths, see `describe`.
    Raises as `restore_part`."""
    with _reading(directory, step) as step_dir:
        return _saved(step_dir, key)


def _saved(step_dir: Path, key: str) -> dict[str, list[Any]]:
    saved = _part(_note(step_dir)["leaves"], key)
    if not saved:
        raise CheckpointError(f"{step_dir}: no arrays named {key!r} in this checkpoint")
    return saved


def restore_part(directory: str | Path, step: int, key: str, abstract: PyTree = None) -> PyTree:
    """Returns one top-level entry of a checkpoint's arrays, such as "actor".

    Args:
      abstract: tree of jax.ShapeDtypeStruct with shardings; None gives nested dicts of numpy
        arrays.

    Raises:
      CheckpointError: it is missing, damaged, or lacks the entry, or a run deletes it meanwhile.
    """
    with _reading(directory, step) as step_dir:
        return _restore_part(step_dir, key, abstract)


def _restore_part(step_dir: Path, key: str, abstract: PyTree) -> PyTree:
    saved = _saved(step_dir, key)
    with quiet_orbax(), literal(step_dir.parent) as directory, ocp.Checkpointer(
            array_handler()) as checkpointer:
        place = directory / step_dir.name / "state"
        item = checkpointer.metadata(place).item_metadata.tree[key]
        if abstract is not None:
            check_leaves(step_dir, saved, describe({key: abstract}))
            item = abstract
        return checkpointer.restore(place, args=_restore_args({key: item}))[key]


def _restore_args(abstract: PyTree) -> ocp.args.PyTreeRestore:
    """Restores ShapeDtypeStructs as jax arrays and all other leaves as numpy arrays."""
    def leaf_args(leaf: Any) -> ocp.RestoreArgs:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
        return ocp.RestoreArgs(restore_type=np.ndarray)

    return ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(leaf_args, abstract),
                                  partial_restore=True)
