"""Flags and results of scripts that run from a checkout with nothing installed but JAX.

Import it first: it puts the packages of the checkout on the path.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]
for _place in (ROOT, ROOT / "kernels", ROOT / "experiments"):
    if str(_place) not in sys.path:
        sys.path.append(str(_place))

from . import hardware, json_file  # noqa: E402


def parser(text: str, default: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all of them have: --out, --seconds, --tiny."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file; its cases are not run again "
                        f"(default: {default} in experiments/results)")
    parser.add_argument("--seconds", type=float, default=420.0,
                        help="no case starts later than this")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on any machine")
    return parser


class Results:
    """A result file, rewritten after each case and continued by the next run.

    Args:
      out: the file; None is `default` in experiments/results.
      head: entries besides the cases.
      seconds: after which no case starts.
    """

    def __init__(self, out: Path | None, default: str, head: dict[str, Any], seconds: float
                 ) -> None:
        self.path = ROOT / "experiments" / "results" / default if out is None else out
        self.began, self.seconds = time.monotonic(), seconds
        self.record = head | {"cases": self._earlier(head)}

    def _earlier(self, head: dict[str, Any]) -> dict[str, Any]:
        """Returns the cases that this machine and these versions made.

        Raises:
          SystemExit: the file is of another machine.
        """
        if not self.path.exists():
            return {}
        earlier = json.loads(self.path.read_text(encoding="utf-8"))
        if earlier["machine"] != head["machine"]:
            raise SystemExit(f"--out={self.path}: its cases are of another machine or of other "
                             "versions; remove it or name another file")
        return earlier["cases"]

    def left(self, names: Iterable[str]) -> list[str]:
        """Returns the names without a case."""
        return [name for name in names if name not in self.record["cases"]]

    def in_time(self) -> bool:
        return time.monotonic() - self.began < self.seconds

    def add(self, name: str, case: dict[str, Any]) -> None:
        self.record["cases"][name] = case
        json_file.write(self.path, self.record)

    def finish(self, names: Iterable[str]) -> int:
        """Prints how many cases are left and which failed; returns 1 if one did, else 0."""
        left = self.left(names)
        more = f"; {len(left)} cases are left, run it again" if left else ""
        print(f"wrote {self.path}{more}")
        failed = [name for name, case in self.record["cases"].items() if case.get("failed")]
        for name in failed:
            print(f"failed: {name}: {self.record['cases'][name]['failed']}", file=sys.stderr)
        return 1 if failed else 0


def run_cases(args: argparse.Namespace, default: str, names: Iterable[str],
              measure: Callable[[str, Results, hardware.Probes], dict[str, Any]],
              line: Callable[[str, dict[str, Any]], str]) -> int:
    """Measures the cases that the result file lacks while there is time; returns the exit status.

    Args:
      args: of `parser`.
      default: name of the result file.
      names: of all cases.
      measure: returns the case of a name.
      line: describes a case on the terminal.
    """
    results = Results(args.out, default, {"command": command(), "machine": hardware.machine()},
                      args.seconds)
    left = results.left(names)
    probes = hardware.probes_here(args.tiny) if left else None
    for name in left:
        if not results.in_time():
            break
        case = measure(name, results, probes)
        results.add(name, case)
        print(line(name, case), flush=True)
        jax.clear_caches()
    return results.finish(names)


def command() -> str:
    """Returns the command line as it is typed in the repository, without paths."""
    kept = [arg for arg in sys.argv[1:] if "/" not in arg and not arg.startswith("--out")]
    return " ".join(["python", f"experiments/{Path(sys.argv[0]).name}", *kept])
