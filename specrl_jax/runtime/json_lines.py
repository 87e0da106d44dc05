"""Files with one JSON value a line, as people have them: gzipped, with a BOM, with blank lines."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrl_jax.config import ConfigError

GZIP_MAGIC = b"\x1f\x8b"


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) of each line that is not blank.

    Raises:
      ConfigError: the file cannot be read, or a line is not UTF-8 or JSON or holds half a surrogate
        pair, which no file and no tokenizer can hold; the line is named.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            opener: Any = gzip.open if file.read(2) == GZIP_MAGIC else open
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, _parse(text, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number}: {error}; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}; give a file with one JSON object per line") from error


def _parse(text: str, where: str) -> Any:
    shown = repr(text.strip()[:60])
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {shown} holds half a surrogate pair, which is no "
                          "character; correct that line") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {shown} is not JSON ({error}); correct that line") from error
    return value
