"""Checks the files of a complete run: one line of metrics a step, a report, no late compilation."""

import json
import sys
from pathlib import Path

workdir = Path(sys.argv[1])
config = json.loads((workdir / "config.json").read_text())
rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
assert [row["step"] for row in rows] == list(range(config["steps"])), rows
assert not any(row["compilations"] for row in rows), [row["compilations"] for row in rows]
assert (workdir / "report.html").stat().st_size > 1000
print(f"{len(rows)} steps, report.html, no compilation after warm-up")
