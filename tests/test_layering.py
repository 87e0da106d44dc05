"""A file imports only from rooms on lower floors; rooms of one floor do not know each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"specrl_jax": ROOT / "specrl_jax",
            "specrl_kernels": ROOT / "kernels" / "specrl_kernels"}
FLOORS = (  # from the ground up
    ("specrl_kernels", "config"),
    ("structs",),
    ("prng", "sharding"),
    ("runtime",),
    ("checkpoint", "metrics"),
    ("model",),
    ("data", "draft", "verify", "control"),
    ("rollout", "rl", "rewards"),
    ("distill",),
    ("evaluation",),
    ("training",),
    ("specrl_jax",),  # the public names
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OUR_ROOTS = {"specrl_jax", "specrl_kernels", "experiments", "tests", "kernels"}


def room(module: str) -> str:
    """`specrl_jax.data.examples` -> `data`; anything of specrl_kernels -> `specrl_kernels`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "specrl_jax" and len(parts) > 1 else parts[0]


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
    own = room(module)
    assert own in FLOOR, f"{module} is in no room: give it its place in FLOORS"
    return [f"{module} imports {name}" for name in imported(source, module)
            if room(name) != own and FLOOR.get(room(name), len(FLOORS)) >= FLOOR[own]]


def files() -> list[tuple[str, Path]]:
    actual = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            actual.append((".".join([package, *(p for p in parts if p != "__init__")]), path))
    return actual


@pytest.mark.parametrize("module,path", files(), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_point_down(module: str, path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop; [] if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module):]
        if module in done:
            return []
        actual = next(filter(None, (visit(to, [*path, module]) for to in graph[module])), [])
        done.add(module)
        return actual

    return next(filter(None, (visit(module, []) for module in graph)), [])


def test_modules_import_each_other_in_no_loop() -> None:
    modules = dict(files())
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {*imported(path.read_text(encoding="utf-8"), module)}
        names |= {name.rpartition(".")[0] for name in names}
        graph[module] = {n for n in names if n in modules and modules[n].name != "__init__.py"}
    assert cycle(graph) == []
    assert cycle(graph | {"specrl_jax.structs": {"specrl_jax.training.trainer"}})


def test_every_room_exists_and_there_are_few() -> None:
    assert {room(module) for module, _ in files()} == set(FLOOR)
    top = [p for p in PACKAGES["specrl_jax"].iterdir()
           if p.name not in ("__init__.py", "py.typed", "__pycache__")]
    assert len(top) <= 19, sorted(p.name for p in top)


@pytest.mark.parametrize("module,line", [
    ("specrl_jax.verify.match", "from specrl_jax.draft.tree import compact"),
    ("specrl_jax.draft.history", "from specrl_jax import control"),
    ("specrl_jax.control.protocol", "import specrl_jax.verify.sampling"),
    ("specrl_jax.model.tiny", "def f():\n    from ..rollout import engine"),
    ("specrl_jax.evaluation.evaluate", "from specrl_jax.training.run import train"),
    ("specrl_jax.training.trainer", "import experiments.config_flags"),
    ("specrl_kernels.noise", "from specrl_jax import structs"),
])
def test_import_that_points_up_is_found(module: str, line: str) -> None:
    assert violations(line, module)
