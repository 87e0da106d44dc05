"""The Triton programs without a GPU, where Triton is installed: by its interpreter, and compiled.

jax-triton does not interpret, nor lower without JAX's CUDA plugin, so the programs are run apart
from it, on the arrays and constants that jax-triton would be handed.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from specrl_kernels.dispatch import Target, Unsupported
from specrl_kernels.tree_attention import triton as wrapper
from specrl_kernels.tree_attention.operands import Operands
from specrl_kernels.triton_call import Launch, check_versions, program_call
from tree_attention_cases import assert_near, make, oracle

KERNELS, TESTS = Path(wrapper.__file__).parents[2], Path(__file__).parents[1] / "support"
CASES = {
    "every length": (dict(lengths=(0, 1, 15, 16, 17, 31, 33, 48), nodes=3, cache=48), None, 1),
    "segments": (dict(lengths=(0, 63, 64, 65, 120), nodes=2, segments=(64, 32, 24), slots=6),
                 None, 1),
    "splits": (dict(lengths=(0, 63, 64, 120), nodes=2, segments=(64, 64), repeats=7), None, 3),
    "splits of one segment": (dict(lengths=(0, 63, 9, 120), nodes=2, cache=128), None, 4),
    "a shared prefix": (dict(lengths=(0, 5, 20), nodes=3, groups=1, prefix=(33, 40),
                             members=[[2, 0], [1, -1]]), None, 3),
    "window and dead nodes": (dict(lengths=(20, 3, 40), nodes=40, groups=1, cache=50, slots=4,
                                   packed=70), 7, 2)}

@pytest.mark.parametrize("name", CASES)
def test_program_by_interpreter_equals_the_oracle(name: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    subprocess.run([sys.executable, __file__, name], check=True, env=os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(str(x) for x in (KERNELS, TESTS, TESTS / "kernels"))})


def check(name: str) -> None:
    """One of CASES, by Triton's interpreter."""
    sizes, window, splits = CASES[name]
    case = make(**sizes)
    wrapper.program_call = interpreted
    config = dict(block=16, tile=16, splits=splits, least=1)
    target = Target("gpu", "", True, config=config)
    cache = {name: tuple(case[name]) for name in ("cache_k", "cache_v")}
    actual = wrapper.tree_attention_triton(Operands(**case | cache), scale=0.25, window=window,
                                           target=target)
    assert_near(np.asarray(actual), oracle(case, window), case)


class Tensor:
    """As much of a torch tensor as Triton's interpreter asks for, over a numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def copy_(self, other: "Tensor") -> None:
        """The memory is the same."""

    def new_empty(self, size: int, device: str) -> "Tensor":
        return Tensor(self.array)

    def set_(self, storage: "Tensor", *layout: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> None:
        return None


def interpreted(launch: Launch, warps: int, stages: int) -> list[Any]:
    """In place of program_call; what is never written is NaN."""
    program = getattr(importlib.import_module(launch.module), launch.name)
    arrays = [np.array(x, order="C") for x in launch.inputs]
    actual = [np.full(x.shape, np.nan, x.dtype) for x in launch.outputs]
    if launch.onto:
        actual[0] = arrays[-1]
    program[launch.grid](*map(Tensor, [*arrays, *actual]), **launch.constants)
    return [jnp.asarray(x) for x in actual]


COMPILE = """
import sys
import jax
from specrl_kernels.tree_attention import gpu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from specrl_kernels.tree_attention.triton_kernel import attend, join
dtype, size = sys.argv[1], int(sys.argv[2])
kind = "bfloat16" if dtype == "bf16" else "float32"
config = gpu.heuristic(jax.ShapeDtypeStruct((64, 4, 56, size), kind), 4096)
floats = dict.fromkeys(("q", "tree_k", "tree_v", "k", "v", "old", "out"), "*" + dtype)
sums = dict.fromkeys(("out_top", "out_total", "out_sums", "top", "total", "sums"), "*fp32")
for program, constants in (
        (attend, dict(heads=4, queries=64, E=size, nodes=16, word_count=1, size=4096, start=0,
                      block=config.block, tile=config.tile, scale=0.1, has_tree=True,
                      has_window=True, by_row=False, direct=True)),
        (join, dict(heads=4, queries=64, E=size, tile=config.tile, shares=192, launches=1,
                    whole=True, least=2, few=gpu.JOIN_QUERIES, some=gpu.JOIN_SHARES))):
    names = program.arg_names
    kinds = {n: "constexpr" if n in constants else (floats | sums).get(n, "*i32") for n in names}
    source = ASTSource(fn=program, signature=kinds,
                       constexprs={(names.index(n),): x for n, x in constants.items()})
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(
        num_warps=config.warps, num_stages=config.stages))
    assert found.asm["cubin"] and found.metadata.shared <= 227 << 10
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_attention_program_compiles_for_hopper(size: int, dtype: str, tmp_path: Path) -> None:
    compile_for_hopper(COMPILE, tmp_path, dtype, str(size))


def compile_for_hopper(script: str, cache: Path, *args: str) -> None:
    """In a process of its own: a program that was defined for interpretation cannot be compiled."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(KERNELS), "TRITON_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", script, *args], check=True, env=environment)


def jax_triton_0_3(*inputs: Any, kernel: Any, out_shape: Any, input_output_aliases: dict[int, int],
                   **_: Any) -> None:
    """What a program is handed: all inputs, then all outputs."""
    memory = {out: inputs[at] for at, out in input_output_aliases.items()}
    kernel(*inputs, *(memory.get(i, out) for i, out in enumerate(out_shape)))


def jax_triton_0_4(*inputs: Any, kernel: Any, out_type: Any, input_output_aliases: dict[int, int],
                   **_: Any) -> None:
    """What a program is handed: all inputs, then the outputs that have memory of their own."""
    aliased = input_output_aliases.values()
    kernel(*inputs, *(out for i, out in enumerate(out_type) if i not in aliased))


@pytest.mark.parametrize("version", [jax_triton_0_3, jax_triton_0_4])
def test_program_call_hands_over_outputs_by_version(
        version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """(a, old, out, other): `out` is the memory of `old` where a launch asks for that."""
    seen = []

    def program(a: str, old: str, out: str, other: str) -> None:
        seen.append((a, out, other))

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=version))
    monkeypatch.setitem(sys.modules, "programs", SimpleNamespace(program=program))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    for onto in (False, True):
        program_call(Launch("programs", "program", ["a", "old"], ["out", "other"], (1,), {}, onto),
                     warps=1, stages=1)
    assert seen == [("a", "out", "other"), ("a", "old", "other")]


def test_versions_that_fail_together_are_refused() -> None:
    check_versions("0.11.2", "0.4.1")
    check_versions("0.12.0.1", "0.5.0")
    with pytest.raises(Unsupported, match="jax-triton 0.4.1 is not traced by JAX 0.12.0.1"):
        check_versions("0.12.0.1", "0.4.1")


if __name__ == "__main__":
    check(sys.argv[1])
