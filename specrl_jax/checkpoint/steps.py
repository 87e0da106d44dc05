"""Which checkpoints of a run are complete, which is being written, and how one is removed.

While a step is written or removed, its directory has a name that ends in PARTIAL; a complete one is
named by the step. So a kill leaves nothing that looks like a checkpoint, and the next start removes
what it leaves.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specrl_jax.runtime.files import damage
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.runtime.stderr import say

NONE = -1  # no intact checkpoint
PARTIAL = ".orbax-checkpoint-tmp"  # Orbax's ending
SAVE = "save of a checkpoint"  # begins the name of the thread that completes one
REMOVALS, REMOVAL_SECONDS = 20, 0.1  # attempts to remove a failed save, and between them


def list_steps(directory: str | Path) -> list[int]:
    """Returns the steps of complete checkpoints, ascending; their checksums are not compared."""
    directory = Path(directory)
    return [step for step in named_steps(directory)
            if damage(directory / str(step), contents=False) is None]


def named_steps(directory: Path) -> list[int]:
    """Returns the steps that have a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def newest_intact(directory: Path, warn: Callable[[str], None]) -> int:
    """Returns the newest intact step, or NONE. Newer damaged ones are reported and renamed."""
    steps = named_steps(directory)[::-1]
    for i, step in enumerate(steps):
        step_dir = directory / str(step)
        reason = damage(step_dir)
        if reason is None:
            return step
        aside = _set_aside(step_dir)
        then = (f"falling back to checkpoint {steps[i + 1]}" if i + 1 < len(steps) else
                "no checkpoint is left: restarting at step 0, the lines of all steps are removed")
        warn(f"checkpoint {step_dir} is damaged: {reason}; kept as {aside.name}; {then}")
    return NONE


def _set_aside(step_dir: Path) -> Path:
    names = (f"{step_dir.name}.damaged{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
    targets = (step_dir.with_name(name) for name in names)
    return step_dir.rename(next(target for target in targets if not target.exists()))


def remove(step_dir: Path) -> None:
    """Removes a checkpoint; what a reader holds open on some file systems stays until the next
    start."""
    partial = step_dir.rename(step_dir.with_name(step_dir.name + PARTIAL))
    shutil.rmtree(partial, ignore_errors=True)


def remove_partial(directory: Path) -> None:
    """Removes what a kill has left of saves and removals."""
    for path in directory.glob(f"*{PARTIAL}*"):
        shutil.rmtree(path)


def remove_failed(step_dir: Path) -> None:
    """Removes what a failed save left, at once: other writes of the save may still be running."""
    for _ in range(REMOVALS):
        left = list(step_dir.parent.glob(f"{step_dir.name}{PARTIAL}*"))
        if not left:
            return
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(REMOVAL_SECONDS)


def finish_saves() -> None:
    """Waits until no save of this process is in flight, with a line; any thread may call it."""
    for thread in threading.enumerate():
        if thread.name.startswith(SAVE):
            say("waiting for the checkpoint that is being written")
            thread.join()


def how_to_go_on(workdir: Path, without: str = "there is no checkpoint yet") -> str:
    """Returns the line of a run that is stopped, once no save is in flight; `without` describes
    one without checkpoints."""
    finish_saves()
    steps = list_steps(workdir / CHECKPOINTS)
    kept = f"checkpoint {steps[-1]} is good" if steps else without
    return f"stopped; {kept}: run the same command again to go on"
