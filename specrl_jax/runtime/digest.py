"""The digest of host values: what hosts, runs and files compare. Of arrays, see checksum.py."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any


def digest(values: Iterable[Any]) -> str:
    """Returns the SHA-256, 64 hexadecimal digits, of values one after another: of bytes as they
    are, of others as JSON. Raises TypeError if JSON has no form for one."""
    known = hashlib.sha256()
    for value in values:
        known.update(value if isinstance(value, bytes)
                     else json.dumps(value, sort_keys=True).encode())
    return known.hexdigest()
