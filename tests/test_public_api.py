"""The public names of `specrl_jax`."""

import ast
import subprocess
import sys
from pathlib import Path

import specrl_jax

ROOT = Path(specrl_jax.__file__).parent


def test_public_names_are_those_that_type_checkers_see():
    block = next(node for node in ast.parse((ROOT / "__init__.py").read_text()).body
                 if isinstance(node, ast.If))
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom)
                for alias in node.names if not alias.name.isupper()]
    assigned = [target.id for node in block.body if isinstance(node, ast.Assign)
                for target in node.targets if isinstance(target, ast.Name)]
    assert sorted(imported + assigned) == sorted(specrl_jax.__all__)


def test_reading_a_config_imports_no_jax():
    program = ("import sys, specrl_jax; specrl_jax.load_config('tiny', seed=1); "
               "print('jax' in sys.modules)")
    actual = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            cwd=ROOT.parent, check=True)
    assert actual.stdout == "False\n"
