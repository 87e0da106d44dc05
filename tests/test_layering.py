"""A file imports only from layers to its left; draft, spec and control are strangers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"specrl_jax": ROOT / "specrl_jax",
            "specrl_kernels": ROOT / "kernels" / "specrl_kernels"}
BASE = {"kernels", "structs", "config", "prng", "sharding", "rows"}
SEES = {
    "kernels": set(), "options": set(), "drafter_options": {"options"},
    "config": {"options", "drafter_options"},
    "structs": {"kernels", "config"},
    "prng": {"kernels", "structs", "config"}, "rows": {"structs"},
    "sharding": {"kernels", "structs", "config", "prng"},
    "model": BASE,
    "draft": BASE | {"model"}, "spec": BASE | {"model"}, "control": BASE | {"model"},
    "processor": set(),
    "rollout": BASE | {"model", "draft", "spec", "control", "processor"},
    "rl": {"kernels", "structs", "config", "model", "draft"},
    "host": {"structs", "config"},
}
ALL = BASE | {"model", "draft", "spec", "control", "rollout", "rl", "host"}
SEES |= {
    "specrl_jax": set(),
    "intervals": set(),
    "checksum": {"structs"},
    "sampler": ALL | {"drafters", "checksum"},
    "actor": BASE | {"model", "host"},
    "drafters": ALL,
    "distill_programs": BASE | {"model", "draft", "rl"},
    "drafter_life": BASE | {"draft", "sampler", "checksum"},
    "evolution": ALL | {"sampler", "distill_programs", "drafter_life"},
    "loop": ALL | {"sampler", "drafters", "drafter_life", "evolution", "checksum"},
    "run": BASE | {"host", "model", "loop"},
    "drafter_data": ALL | {"sampler", "loop", "evaluate"},
    "drafter_score": ALL,
    "drafter_training": ALL | {"sampler", "loop", "actor", "drafter_data", "drafter_score",
                               "distill_programs", "checksum"},
    "generate": ALL | {"sampler", "actor"},
    "compare": {"config", "host"},
    "evaluate": ALL | {"intervals", "sampler", "actor", "loop"},
    "replay": ALL | {"sampler", "actor", "compare", "loop"},
}
OUR_ROOTS = {"specrl_jax", "specrl_kernels", "experiments", "tests", "kernels"}


def layer(module: str) -> str:
    """`specrl_jax.host.data` -> `host`; anything of specrl_kernels -> `kernels`."""
    parts = module.split(".")
    if parts[0] == "specrl_jax":
        return parts[1] if len(parts) > 1 else "specrl_jax"
    return {"specrl_kernels": "kernels"}.get(parts[0], parts[0])


def imported(source: str, module: str) -> Iterator[str]:
    """Full names of our own modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            above = ".".join([*package, *filter(None, [node.module])])
            names = [f"{above}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in OUR_ROOTS)


def violations(source: str, module: str) -> list[str]:
    own = layer(module)
    assert own in SEES, f"{module} belongs to no layer: give it its place in this file"
    allowed = SEES[own] | {own}
    return [f"{module} imports {name}" for name in imported(source, module)
            if layer(name) not in allowed]


def files() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join([package, *(p for p in parts if p != "__init__")]), path))
    return found


@pytest.mark.parametrize("module,path", files(), ids=lambda x: x if isinstance(x, str) else "")
def test_no_arrow_goes_back(module: str, path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module) == []


def test_every_package_is_found() -> None:
    assert {layer(module) for module, _ in files()} >= ALL | {"sampler", "loop"}


@pytest.mark.parametrize("module,line", [
    ("specrl_jax.spec.verify", "from specrl_jax.draft.tree import compact"),
    ("specrl_jax.draft.history", "from specrl_jax import control"),
    ("specrl_jax.control.policies", "import specrl_jax.spec.sampling"),
    ("specrl_jax.rl.learner", "from specrl_jax.rollout import engine"),
    ("specrl_jax.host.data", "from specrl_jax.model import tokenizer"),
    ("specrl_jax.model.tiny", "def f():\n    from ..rollout import engine"),
    ("specrl_jax.sampler", "from specrl_jax.run import train"),
    ("specrl_jax.loop", "import experiments.config_flags"),
    ("specrl_kernels.noise", "from specrl_jax import structs"),
    ("specrl_jax.config", "from specrl_jax import structs"),
])
def test_an_arrow_that_goes_back_is_found(module: str, line: str) -> None:
    assert violations(line, module)
