"""The machine code that a TPU's compiler makes of each kernel, as it dumps it.

A bundle is what a core starts in one cycle. A dump has a line for each bundle, with as many > as
there are loops around it.
"""

import re
from pathlib import Path
from typing import NamedTuple

_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ([> ]*)\{", re.MULTILINE)


class Bundles(NamedTuple):
    """How many bundles a kernel has, by the loops around them. All branches count."""

    outside: int  # of the loop over the grid
    step: int  # of a grid step
    inner: int  # of the loops inside of a step

    def cycles(self, steps: int, trips: int) -> int:
        """Returns the cycles of a call, if nothing waits."""
        return self.outside + steps * (self.step + trips * self.inner)


def flags(folder: str) -> str:
    """Returns the flags with which libtpu dumps the machine code of what it compiles."""
    return (f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$")


def take(folder: Path) -> dict[str, Bundles]:
    """Returns the bundles by instruction of what was dumped into a folder; removes its files."""
    bundles = {}
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        if match := _FILE.fullmatch(file.name):
            bundles[match[1]] = count(file.read_text(encoding="utf-8"))
        file.unlink()
    return bundles


def count(text: str) -> Bundles:
    """Returns the bundles of one kernel's dump."""
    depths = [marks.count(">") for marks in _BUNDLE.findall(text)]
    return Bundles(depths.count(0), depths.count(1), sum(depth > 1 for depth in depths))
