"""What the scripts share that run from a bare checkout: no absl, no config, paths set here.

Import it first: it puts the checkout's packages on the path.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _place in (ROOT, ROOT / "kernels", ROOT / "experiments"):
    if str(_place) not in sys.path:
        sys.path.append(str(_place))


def parser(text: str, default: str) -> argparse.ArgumentParser:
    """With the flags of all: --out, --seconds, --tiny."""
    found = argparse.ArgumentParser(description=text.splitlines()[0])
    found.add_argument("--out", type=Path, help="JSON file; what it holds already is not run again "
                       f"(default: {default} in experiments/results)")
    found.add_argument("--seconds", type=float, default=420.0,
                       help="no case is begun later than this")
    found.add_argument("--tiny", action="store_true", help="sizes that any machine can do")
    return found


class Results:
    """A result file that is rewritten after each case, and taken up again.

    Args:
      out: the file; None is `default` in experiments/results.
      head: what it holds besides cases.
      seconds: after which no case is begun.
    """

    def __init__(self, out: Path | None, default: str, head: dict[str, Any], seconds: float
                 ) -> None:
        self.path = ROOT / "experiments" / "results" / default if out is None else out
        self.began, self.seconds = time.monotonic(), seconds
        self.found = head | {"cases": self._earlier(head)}

    def _earlier(self, head: dict[str, Any]) -> dict[str, Any]:
        """Cases of the same machine and versions.

        Raises:
          SystemExit: the file is of another machine.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return {}
        earlier = json.loads(self.path.read_text(encoding="utf-8"))
        if earlier["machine"] != head["machine"]:
            raise SystemExit(f"--out={self.path}: its cases are of another machine or of other "
                             "versions; remove it or name another file")
        return earlier["cases"]

    def left(self, names: Iterable[str]) -> list[str]:
        """Those that are not there yet."""
        return [name for name in names if name not in self.found["cases"]]

    def in_time(self) -> bool:
        return time.monotonic() - self.began < self.seconds

    def add(self, name: str, case: dict[str, Any]) -> None:
        self.found["cases"][name] = case
        other = self.path.with_suffix(".part")
        other.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(other, self.path)

    def finish(self, names: Iterable[str]) -> int:
        """Says what is left; the exit status, 0 unless a case failed."""
        left = self.left(names)
        more = f"; {len(left)} cases are left, run it again" if left else ""
        print(f"wrote {self.path}{more}")
        failed = [name for name, case in self.found["cases"].items() if case.get("failed")]
        for name in failed:
            print(f"failed: {name}: {self.found['cases'][name]['failed']}", file=sys.stderr)
        return 1 if failed else 0


def command() -> str:
    """As typed in the repository, without paths."""
    kept = [arg for arg in sys.argv[1:] if "/" not in arg and not arg.startswith("--out")]
    return " ".join(["python", f"experiments/{Path(sys.argv[0]).name}", *kept])
