"""The example in kernels/README.md runs, and its tables name what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
from specrl_kernels import gumbel_argmax, tree_attention

TEXT = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")


def test_readme_example_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "kernels/README.md", "exec"), {})


@pytest.mark.parametrize("op,heading", [
    (tree_attention.api, "## Implementations"), (gumbel_argmax, "## The perturbed argmax")])
def test_every_implementation_is_described(op: Any, heading: str) -> None:
    part = TEXT.split(heading)[1].split("\n## ")[0]
    table = part[part.index("| name |"):].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(op.IMPLEMENTATIONS)
