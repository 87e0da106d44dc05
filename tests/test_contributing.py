"""CONTRIBUTING's table of guarantees names tests that exist, in the tiers that they have."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [\w -]+ \| `(tests/[\w/]+\.py)::(\w+)` \| (\w+) \|$", TEXT, re.MULTILINE)


@functools.cache
def tiers(path: str) -> dict[str, str]:
    """Returns the tier of each test function of a file by name; a parameter may be of a later one.
    """
    actual, whole = {}, set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = {ast.unparse(node.value)}
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = whole | {ast.unparse(decorator) for decorator in node.decorator_list}
            actual[node.name] = next((tier for tier in ("full", "ci")
                                      if f"pytest.mark.{tier}" in marks), "fast")
    return actual


def test_every_row_of_the_table_names_a_test() -> None:
    assert 0 < len(ROWS) == len(re.findall(r"^\|.*::.*\|$", TEXT, re.MULTILINE))


@pytest.mark.parametrize(("path", "name", "tier"), ROWS)
def test_named_test_exists_in_its_tier(path: str, name: str, tier: str) -> None:
    assert tiers(path)[name] == tier
    assert tier != "full"  # CI runs it
