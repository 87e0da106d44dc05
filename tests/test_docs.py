"""Generated pages are up to date."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", ["config.md", "metrics.md", "extending.md"])
def test_page_is_what_its_source_generates(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == generate.pages()[name], "run python docs/generate.py"


def test_pages_name_fields_and_metrics():
    pages = generate.pages()
    assert "| `rl.kl` | `0.0` | coefficient of the KL" in pages["config.md"]
    assert "| `learner.kl` | `rl.kl` |" in pages["config.md"]
    assert "`completions/mean_length`" in pages["metrics.md"]
