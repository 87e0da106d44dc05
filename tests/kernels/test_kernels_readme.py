"""The example in kernels/README.md runs."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")


def test_readme_example_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "kernels/README.md", "exec"), {})
