"""Notebooks run from top to bottom."""

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import specrl_jax
from colab import set_repository
from specrl_jax.metrics.run_files import read_metrics

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
SECONDS_A_CELL = 300
IN_CI = ("01_quickstart", "04_tpu_or_gpu")  # the others are full tests
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@notebooks
def test_imports_public_names_only(path: Path) -> None:
    code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert "specrl_jax." not in code
    (names,) = re.findall(r"^from specrl_jax import (.*)$", code, re.MULTILINE)
    assert set(names.split(", ")) <= set(specrl_jax.__all__)


@notebooks
def test_address_is_that_of_the_citation(path: Path) -> None:
    address = set_repository.repository((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set_repository.with_address(notebook, path.name, address) == notebook


@pytest.mark.ci
@pytest.mark.parametrize("path", [
    path if path.stem in IN_CI else pytest.param(path, marks=pytest.mark.full)
    for path in NOTEBOOKS], ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("TMPDIR", "runs"), ("IPYTHONDIR", "ipython"),
                         ("JUPYTER_RUNTIME_DIR", "jupyter")):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    # The kernel is a process of its own, which pytest's pythonpath does not reach.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a reader has
    client = NotebookClient(read(path), timeout=SECONDS_A_CELL, kernel_name="python3",
                            resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    reports = list((tmp_path / "runs").rglob("report.html"))
    assert len(reports) == (path.stem == "01_quickstart")
    for report in reports:
        rewards = [row["reward/mean"] for row in read_metrics(report.parent)]
        assert rewards[-1] > rewards[0]
