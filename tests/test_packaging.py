"""README's example, pins, versions, the wheel and the tracked files."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = {"constraints.txt": ("3.11", "3.12", "3.13"), "constraints-0.11.txt": ("3.12",)}
MOST_BYTES = 300 * 1024
# Brackets keep the patterns from finding themselves.
FOREIGN = re.compile(r"(?:^|[^\w.])/(?:work|farm|root|home|tmp)/"
                     r"|python[h]osted|\bpy[p]i\.|://[^/ ]*(?:py[p]i|hosted|np[m]|debian)")


def pins(name: str, python: str) -> dict[str, str]:
    """Package -> version that a constraints file gives for a Python version."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    actual: dict[str, str] = {}
    for pin in wanted:
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (clause,) = pin.specifier
            key = canonicalize_name(pin.name)
            assert clause.operator == "==" and key not in actual, f"{name}: {pin}"
            actual[key] = clause.version
    return actual


@pytest.mark.ci
def test_library_example_of_the_readme_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert example.count("\n") <= 10
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["rollout"].length.min() > 0 and names["stats"].accept_length > 1
    assert re.search(r"\naccept length \d\.\d\d\n$", capsys.readouterr().out)


@pytest.mark.parametrize(("name", "python"), [
    (name, python) for name, all_ in PYTHONS.items() for python in all_])
def test_every_direct_dependency_is_pinned_within_its_bounds(name: str, python: str) -> None:
    extras = PROJECT["optional-dependencies"]
    with_gpu = name == "constraints-0.11.txt"
    chosen = ("cpu", "test", "gpu") if with_gpu else ("cpu", "test", "quickstart", "docs", "peers")
    pinned = pins(name, python)
    for text in [*PROJECT["dependencies"], *(r for extra in chosen for r in extras[extra])]:
        wanted = Requirement(text)
        if wanted.name == PROJECT["name"]:
            assert wanted.extras <= set(chosen)
            continue
        version = pinned.get(canonicalize_name(wanted.name))
        assert version is not None and wanted.specifier.contains(version), f"{text}: {version}"


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    last, date = released[1]
    assert released[0] == ("Unreleased", "")
    assert (last, date) == (str(citation["version"]), str(citation["date-released"]))
    ours = Version(PROJECT["version"])
    assert ours == Version(last) or ours.is_devrelease and ours > Version(last)
    assert citation["license"] == PROJECT["license"]


def test_every_folder_of_code_is_a_package() -> None:
    # In an editable install importlib.resources, and so TFDS, cannot read namespace packages.
    folders = {path.parent for root in ("specrl_jax", "kernels/specrl_kernels")
               for path in (ROOT / root).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel that is built from a copy."""
    source = tmp_path_factory.mktemp("source")
    for name in ("specrl_jax", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
                    "--no-build-isolation", "--wheel-dir", source / "out", source], check=True)
    (built,) = (source / "out").glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_wheel_holds_the_packages_and_nothing_else(wheel: set[str]) -> None:
    modules = {str(path.relative_to(ROOT / root)) for root in (".", "kernels")
               for path in (ROOT / root).glob("specrl_*/**/*.py")}
    assert len(modules) > 100 and modules <= wheel
    assert {"specrl_jax/py.typed", "specrl_jax/metrics/report_page.html"} <= wheel
    roots = {name.partition("/")[0] for name in wheel}
    assert {root for root in roots if not root.endswith(".dist-info")} == {
        "specrl_jax", "specrl_kernels"}


needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git what is tracked")


def tracked() -> list[Path]:
    """Files that are tracked, or would be."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@needs_git
def test_no_tracked_file_is_large() -> None:
    assert [path for path in tracked() if path.stat().st_size > MOST_BYTES] == []


@needs_git
def test_no_tracked_file_names_a_machine_path_or_a_registry() -> None:
    actual = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if path.suffix != ".npz" and (match := FOREIGN.search(text)):
            actual.append(f"{path.relative_to(ROOT)}: {match[0]!r}")
    assert actual == []
