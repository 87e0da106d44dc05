"""Runs the commands of the documentation: the `sh` blocks of README.md and of the pages in docs/.

    python docs/check.py            # blocks without a title: seconds each, in CI
    python docs/check.py --full     # and those titled "full: ...", before a release
    python docs/check.py --by_hand  # prints those titled "by hand: ...", which are left to a person

Blocks run page by page in the order of the site's navigation, in one temporary directory beside
links to this checkout, so a page may use what an earlier one made. The first that fails ends it.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
HOME = {"index.md": "README.md"}  # pages of the site whose commands are elsewhere
FENCE = re.compile(r'^```sh(?: title="([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LINKED = ("experiments", "specrl_jax", "kernels", "tests", "docs", "colab", "constraints.txt")
FULL, BY_HAND = "full", "by hand"


class Block(NamedTuple):
    """One fenced block of commands."""

    page: str
    title: str
    text: str

    @property
    def kind(self) -> str:
        """FULL, BY_HAND, or "" for CI."""
        return self.title.partition(":")[0]


def blocks() -> Iterator[Block]:
    """Yields the blocks of all pages, in the order of the navigation."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in leaves(yaml.safe_load(text)["nav"]):
        path = ROOT / HOME.get(page, f"docs/{page}")
        if path.exists():  # others are the hooks' pages, without commands of their own
            for title, text in FENCE.findall(path.read_text(encoding="utf-8")):
                yield Block(page, title, text)


def leaves(nav: object) -> Iterator[str]:
    """Yields the pages of a navigation of lists and mappings."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def run(block: Block, folder: str) -> bool:
    """Runs a block in a folder; returns whether it succeeded, after printing what it took."""
    began, used = time.perf_counter(), cpu_seconds()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], cwd=folder,
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    print(f"{block.page}: {block.text.strip().splitlines()[0][:70]}: "
          f"{time.perf_counter() - began:.0f} s, {cpu_seconds() - used:.0f} s of CPU", flush=True)
    if done.returncode:
        print(f"{block.text}{done.stdout}exit status {done.returncode}", file=sys.stderr)
    return done.returncode == 0


def cpu_seconds() -> float:
    """Returns the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="run the blocks titled full, too")
    parser.add_argument("--by_hand", action="store_true", help="print those titled by hand alone")
    args = parser.parse_args()
    if args.by_hand:
        for block in (block for block in blocks() if block.kind == BY_HAND):
            print(f"{block.page}, {block.title}\n{block.text}")
        return 0
    kinds = ("", FULL) if args.full else ("",)
    with tempfile.TemporaryDirectory() as folder:
        for name in LINKED:
            (Path(folder) / name).symlink_to(ROOT / name)
        return 0 if all(run(b, folder) for b in blocks() if b.kind in kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
