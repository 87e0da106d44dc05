"""Prints what the project and the extras given as arguments require, one requirement a line."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(project: dict, extra: str) -> Iterator[str]:
    """Yields the requirements of an extra; extras of the project itself are expanded."""
    own = project["name"] + "["
    for line in project["optional-dependencies"][extra]:
        if line.startswith(own):
            for other in line.removeprefix(own).removesuffix("]").split(","):
                yield from requirements(project, other)
        else:
            yield line


if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in sys.argv[1:]:
        found += requirements(project, extra)
    print("\n".join(dict.fromkeys(found)))
