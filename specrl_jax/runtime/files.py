"""Files that are replaced as a whole, and checksums that find damage before anything is read."""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from specrl_jax.runtime.paths import writing

CHECKSUMS = "checksums.json"
READ_BYTES = 1 << 24


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replaces a file durably: a reader, or a run after a kill, sees the old or the new one.

    Raises:
      ConfigError: it cannot be written; the old one is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path), open(temporary, "w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        with writing(path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of something else by that name
            temporary.unlink(missing_ok=True)
        raise


def write_checksums(directory: Path, skip: tuple[str, ...] = ()) -> None:
    """Writes CHECKSUMS: relative path -> [bytes, CRC-32] of every file but those named `skip`."""
    sums = {str(path.relative_to(directory)): [path.stat().st_size, crc32(path)]
            for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in skip}
    write_atomically(directory / CHECKSUMS, json.dumps(sums))


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file's bytes."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def damage(directory: Path, contents: bool = True) -> str | None:
    """Returns what is wrong with the files that CHECKSUMS lists; None if nothing is. Without
    `contents`, only names and sizes are compared. The directory may have been renamed."""
    try:
        sums = json.loads((directory / CHECKSUMS).read_bytes())
        expected = [(name, int(size), int(crc)) for name, (size, crc) in sums.items()]
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{CHECKSUMS} is not readable ({error})"
    for name, size, crc in expected:
        path = directory / name
        try:
            actual = path.stat().st_size
            if actual != size:
                return f"{name} has {actual} bytes instead of {size}"
            if contents and crc32(path) != crc:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} is not readable ({error})"
    return None
