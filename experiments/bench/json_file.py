"""Result files: JSON that a person can read, replaced whole so that a kill leaves the old one."""

import json
import re
from pathlib import Path
from typing import Any

from specrl_jax.runtime.files import write_atomically

FLAT = re.compile(r"([\[{])\n *([^][{}]*?)\n *([]}])")


def write(path: Path, value: Any) -> None:
    """Writes `value`, indented, with each innermost list or object on one line."""
    text = json.dumps(value, indent=1)  # in which no string holds a line break
    text = FLAT.sub(lambda match: match[1] + re.sub(r"\n *", " ", match[2]) + match[3], text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text + "\n")
