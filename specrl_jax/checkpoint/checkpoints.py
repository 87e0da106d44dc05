"""Checkpoints of a run: Orbax steps with checksums of their files.

Orbax writes a step under a temporary name and renames it when it is complete, so a killed save
leaves nothing that looks like a checkpoint. It does not notice later damage: it restores a flipped
bit in an array or in the JSON item silently, and most other damage raises a bare `Exception`. So
checksums of a step's files are written just before the rename, and are compared before Orbax reads
anything.

A step's directory, named by the number of completed RL steps: `state/` (the arrays), `meta/`
(JSON), `checksums.json`, and `checksums/`, the empty item whose end writes them.
"""

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from specrl_jax.checkpoint.orbax_setup import (
    ChecksumSave,
    array_handler,
    handlers,
    literal,
    quiet_orbax,
)
from specrl_jax.config import ConfigError
from specrl_jax.runtime.files import CHECKSUMS, damage
from specrl_jax.runtime.paths import writing
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.structs import Json, PyTree

NONE = -1  # no intact checkpoint
BEST = "best"  # of a checkpoint's meta: the best evaluation so far, with its "step"
DELETION = 0.5  # seconds after which a checkpoint that is being deleted has lost its checksums
REMOVALS, REMOVAL_SECONDS = 20, 0.1  # attempts to remove a failed save, and between them


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read; the message names it, the reason and a way out."""


def list_steps(directory: str | Path) -> list[int]:
    """Returns the steps of complete checkpoints, ascending; their checksums are not compared."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir()
                  if path.name.isdecimal() and damage(path, contents=False) is None)


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


class _Preserved:
    """Orbax's preservation policy: the newest `keep` checkpoints and the best one."""

    def __init__(self, keep: int) -> None:
        self._keep, self.best = keep, NONE

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted(info.step for info in checkpoints)[-self._keep:]
        return [info.step in (*newest, self.best) for info in checkpoints]


class CheckpointReader(Protocol):
    """What a trainer restores from; `Checkpoints` is one."""

    def restore_latest(self, abstract: dict[str, PyTree], required: Collection[str] | None = None
                       ) -> tuple[int, dict[str, PyTree], Json] | None: ...


class Checkpoints:
    """The checkpoints of one run. A context manager; every process makes the same calls.

    Saving is synchronous: when `save` returns, the checkpoint is complete under its final name.
    Only then are older ones beyond `keep` deleted, but for the best one. Files of killed saves are
    removed in the background after the directory is opened, and before the next save.
    """

    def __init__(self, directory: str | Path, keep: int,
                 warn: Callable[[str], None] = loud) -> None:
        """Args: directory, created if missing; keep, checkpoints kept; warn, gets warnings."""
        self.directory, self._warn = Path(directory).absolute(), warn
        self._preserved = _Preserved(keep)

    def __enter__(self) -> "Checkpoints":
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._preserved, cleanup_tmp_directories=True,
            enable_async_checkpointing=False, atomicity_options=ocp.options.AtomicityOptions(
                mode=ocp.options.AtomicityMode.ATOMIC_RENAME))
        with contextlib.ExitStack() as stack:
            self._failed = stack.enter_context(quiet_orbax())
            with writing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                stack.enter_context(literal(self.directory)), handler_registry=handlers(),
                options=options)
            stack.callback(self._manager.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def save(self, step: int, arrays: PyTree, meta: Json) -> None:
        """Writes the checkpoint of `step` completed steps.

        Args:
          step: larger than every step saved so far.
          arrays: dict of pytrees of jax or numpy arrays.
          meta: JSON values (tuples come back as lists, keys as strings); meta[BEST]["step"] is the
            checkpoint to keep besides the newest.

        Raises:
          CheckpointError: it cannot be written; the earlier checkpoints are untouched.
          TypeError: `meta` holds a value that JSON has not.
        """
        newest = self._manager.latest_step()
        if newest is not None and newest >= step:
            raise CheckpointError(f"{self.directory}: checkpoint {step} would not be the newest, "
                                  f"{newest} exists: resume from it or choose another directory")
        arrays = jax.tree.map(_savable, arrays)
        note = {"meta": meta, "leaves": describe(arrays)}
        json.dumps(note)
        self._preserved.best = meta.get(BEST, {}).get("step", NONE)
        try:
            self._manager.save(step, force=True, args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(note),
                checksums=ChecksumSave()))
        except (OSError, ValueError) as error:
            self._failed()
            self._remove_partial(step)
            kept = ", ".join(map(str, list_steps(self.directory))) or "none"
            raise CheckpointError(
                f"{self.directory / str(step)}: the checkpoint could not be written "
                f"({_brief(error)}); complete ones: {kept}. Free some space and resume"
            ) from error

    def _remove_partial(self, step: int) -> None:
        """Removes what a failed save left, at once: other writes of the save may still be running.
        """
        for _ in range(REMOVALS):
            left = list(self.directory.glob(f"{step}.orbax-checkpoint-tmp*"))
            if not left:
                return
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(REMOVAL_SECONDS)

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
        step = self._newest_intact() if jax.process_index() == 0 else 0
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        self._manager.reload()
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
        restored: Any = self._manager.restore(step, args=ocp.args.Composite(
            state=_restore_args(jax.tree.map(_savable, abstract)), meta=ocp.args.JsonRestore()))
        return step, restored.state, restored.meta["meta"]

    def _newest_intact(self) -> int:
        steps = sorted((int(path.name) for path in self.directory.iterdir()
                        if path.name.isdecimal()), reverse=True)
        for i, step in enumerate(steps):
            step_dir = self.directory / str(step)
            reason = damage(step_dir)
            if reason is None:
                return step
            aside = _set_aside(step_dir)
            then = (f"falling back to checkpoint {steps[i + 1]}" if i + 1 < len(steps) else
                    "no checkpoint is left: restarting at step 0, the lines of all steps are "
                    "removed")
            self._warn(f"checkpoint {step_dir} is damaged: {reason}; kept as {aside.name}; {then}")
        return NONE


def _set_aside(step_dir: Path) -> Path:
    names = (f"{step_dir.name}.damaged{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
    targets = (step_dir.with_name(name) for name in names)
    return step_dir.rename(next(target for target in targets if not target.exists()))


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
