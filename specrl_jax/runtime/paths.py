"""Places that a user names: local paths, outputs that can be written, and the user's cache.

An output is checked before any work, and written under a temporary name that becomes its own at the
end, so that neither a refusal nor an error leaves anything behind. A cache is optional.
"""

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from specrl_jax.config import ConfigError, check

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: Path drops the second
ELSEWHERE = "choose another place"
CHECKPOINTS = "checkpoints"  # in the working directory of a run


def local_path(field: str, value: str | os.PathLike[str]) -> Path:
    """Returns a path with `~` replaced by the home directory.

    Raises:
      ConfigError: it is a URL, such as gs://bucket/run, or there is no such home.
    """
    text = os.fspath(value)
    check(URL.match(text) is None, field, text, "is no local path; mount the bucket and name the "
          "directory it is mounted at")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no home, or ~name of nobody
        raise ConfigError(f"{field} = {text!r}: {error}; write the whole path") from error


def weights_path(field: str, value: str | os.PathLike[str]) -> Path:
    """Returns the local path of a model, or of a drafter's head.

    Raises:
      ConfigError: `local_path` refuses it, or it is the working directory of a run, which holds
        no such weights itself.
    """
    path = local_path(field, value)
    within = path / ("drafter" if field == "draft.path" else "model")
    way_out = (f"give {within}" if os.path.isdir(within) else
               f"experiments/export.py --run={path} writes its model: give that")
    check(not os.path.isdir(path / CHECKPOINTS), field, str(value),
          f"is a working directory; {way_out}")
    return path


def output_file(field: str, value: str | os.PathLike[str]) -> Path:
    """Returns the path of a file that can be written, or replaced, in a directory that exists.

    Raises:
      ConfigError: it cannot.
    """
    path = local_path(field, value)
    check(os.path.isdir(path.absolute().parent), field, str(path),
          f"{path.parent} is no directory; make it first")
    check(not os.path.isdir(path), field, str(path), "is a directory; name a file")
    check(os.path.isfile(path) or not os.path.exists(path), field, str(path),
          f"is a device or a pipe; {ELSEWHERE}")
    try:
        path.with_name(path.name + ".tmp").exists()  # the name that it is written under
    except OSError as error:
        raise ConfigError(f"{field} = {str(path)!r}: {error.strerror}; {ELSEWHERE}") from error
    _check_writable(field, path, path.absolute().parent)
    return path


def output_directory(field: str, value: str | os.PathLike[str], *, new: bool = True) -> Path:
    """Returns the path of a directory that can be made, with those above it.

    Args:
      new: it must not exist yet, or be empty.

    Raises:
      ConfigError: it cannot, or holds something.
    """
    path = local_path(field, value)
    try:
        check(path.exists() or not path.is_symlink(), field, str(path),
              f"is a link to nothing; {ELSEWHERE}")
        holds = new and path.exists() and not (path.is_dir() and not any(path.iterdir()))
        above = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    except OSError as error:
        raise ConfigError(f"{field} = {str(path)!r}: {error.strerror}; {ELSEWHERE}") from error
    check(not holds, field, str(path), f"exists already; remove it or {ELSEWHERE}")
    check(above.is_dir(), field, str(path), f"{above} is not a directory; {ELSEWHERE}")
    _check_writable(field, path, above)
    return path


def _check_writable(field: str, path: Path, directory: Path) -> None:
    """Raises ConfigError unless a file can be created in `directory`; its mode alone does not
    show that."""
    try:
        handle, name = tempfile.mkstemp(prefix=".specrl_jax.", dir=directory)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"{field} = {str(path)!r}: {directory} is not a directory that can be "
                          f"written ({error.strerror}); {ELSEWHERE}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigError in place of OSError: `path` cannot be written, or the disk is full."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); make room, or "
                          f"{ELSEWHERE}") from error


@contextlib.contextmanager
def new_directory(field: str, directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary directory that becomes `directory` at the end; after an error nothing.

    An empty one that exists is filled, not replaced: it may be a mount point, or a link.

    Raises:
      ConfigError: the directory exists and is not empty, or cannot be written.
    """
    target = output_directory(field, directory).absolute()
    exists = target.is_dir()
    made = [p for p in target.parents if not p.exists()]  # the innermost first
    partial = (target if exists else target.parent) / f".{uuid.uuid4().hex}.partial"
    try:
        with writing(target):
            partial.mkdir(parents=True)
            yield partial
            if exists:
                check(list(target.iterdir()) == [partial], field, str(directory),
                      f"another process has written there meanwhile; {ELSEWHERE}")
                for path in list(partial.iterdir()):
                    path.rename(target / path.name)
                partial.rmdir()
            else:
                os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # another process writes there, too
                parent.rmdir()
        raise


def user_cache(name: str) -> Path | None:
    """Returns the directory `name` in the user's cache, made if need be; None where none can be
    written."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "specrl_jax" / name
        path.mkdir(parents=True, exist_ok=True)
        return path if os.access(path, os.W_OK) else None
    except (OSError, RuntimeError):
        return None
