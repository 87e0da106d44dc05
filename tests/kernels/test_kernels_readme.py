"""The example in kernels/README.md runs, and its tables name what there is."""

import re
from pathlib import Path

from specrl_kernels.tree_attention.api import IMPLEMENTATIONS

TEXT = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "kernels/README.md", "exec"), {})


def test_every_implementation_is_described() -> None:
    table = TEXT.split("## Implementations")[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(IMPLEMENTATIONS)
