"""Choosing an implementation, and the tuning tables that the choice and the kernels look into."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from specrl_kernels import dispatch, tuning
from specrl_kernels.dispatch import Unsupported, choose
from specrl_kernels.gumbel_argmax import gpu as draw_gpu
from specrl_kernels.gumbel_argmax import pallas as draw_pallas
from specrl_kernels.narrow_matmul import narrow_matmul
from specrl_kernels.tree_attention import gpu, pallas, pallas_triton, tree_attention
from tree_attention_cases import call, make

from experiments.bench import tune

ROW = {"op": "tree_attention", "implementation": "pallas", "dtype": "float32",
       "shape": {"rows": 4}, "config": {"block": 256}}


def refuse(x: Any) -> Any:
    raise Unsupported(f"not {x}")


def double(x: Any) -> Any:
    return 2 * x


def test_choose_by_name_works_or_raises() -> None:
    both = {"refuse": refuse, "double": double}
    assert choose(both, "double")(3) == 6
    with pytest.raises(Unsupported, match="not 3"):
        choose(both, "refuse")(3)
    with pytest.raises(ValueError, match="'fast': choose one of refuse, double"):
        choose(both, "fast")


def no_device(platform: str, kind: str) -> AbstractMesh:
    """A mesh of a device that is not there."""
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))


@pytest.mark.parametrize("platform,kind,found", [
    ("tpu", "TPU v5 lite", "tpu"), ("gpu", "NVIDIA H100", "gpu"), ("cuda", "NVIDIA H200", "gpu")])
def test_the_mesh_in_scope_decides_not_the_default_device(
        platform: str, kind: str, found: str) -> None:
    assert dispatch.traced_for().platform == jax.default_backend()
    with use_abstract_mesh(no_device(platform, kind)):
        assert dispatch.traced_for() == (found, kind)
        assert dispatch.target(None)[:2] == (found, kind)
        assert dispatch.target(None, platform="cpu")[:2] == ("cpu", "some cpu")
        with pytest.raises(Unsupported, match=f"{found}: CPUs only"):
            narrow_matmul(jnp.zeros((4, 16)), jnp.zeros((16, 2)), implementation="machine")


def test_choose_takes_and_logs_the_first_that_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="specrl_kernels.dispatch"):
        assert choose({"refuse": refuse, "double": double, "same": lambda x: x}, None)(3) == 6
    assert caplog.messages == ["double is taken; refuse: not 3"]


def test_choose_if_none_can_raises_all_reasons() -> None:
    with pytest.raises(ExceptionGroup) as found:
        choose({"a": refuse, "b": refuse}, None)(3)
    assert [str(reason) for reason in found.value.exceptions] == ["a: not 3", "b: not 3"]


def test_other_errors_are_not_taken_for_refusals() -> None:
    with pytest.raises(TypeError):
        choose({"broken": lambda x: x + None, "double": double}, None)(3)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of tuned/."""
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    return tmp_path


def write(folder: Path, kind: str, *rows: dict[str, Any]) -> None:
    table = {"device": kind, "rows": rows}
    (folder / tuning.file_name(kind)).write_text(json.dumps(table), encoding="utf-8")


def test_tuning_row_is_found_by_all_of_its_keys(tables: Path) -> None:
    write(tables, "TPU v5 lite", ROW)
    asked = ("TPU v5 lite", "tree_attention", "pallas", tuning.shape_class(rows=3), "float32")
    assert tuning.lookup(*asked) == {"block": 256}
    for place, other in enumerate(("TPU v4", "gumbel", "triton", {"rows": 8}, "bfloat16")):
        assert tuning.lookup(*asked[:place], other, *asked[place + 1:]) is None


def test_tuning_row_without_a_field_is_named(tables: Path) -> None:
    write(tables, "TPU v9", ROW, {"op": "tree_attention"})
    with pytest.raises(ValueError, match="tpu_v9.json: row 1 lacks implementation, dtype, shape"):
        tuning.rows("TPU v9")


def test_unnamed_kernel_is_taken_only_where_measured(tables: Path) -> None:
    here = dispatch.Target("tpu", "TPU v6 lite", named=False)
    with pytest.raises(Unsupported, match="not yet run on TPU v6 lite"):
        dispatch.require(here, "tree_attention", "pallas", ("tpu",))
    dispatch.require(here._replace(named=True), "tree_attention", "pallas", ("tpu",))
    write(tables, "TPU v7x", ROW)
    measured = here._replace(kind="TPU v7x")
    dispatch.require(measured, "tree_attention", "pallas", ("tpu",))
    with pytest.raises(Unsupported, match="not yet run"):
        dispatch.require(measured, "gumbel_argmax", "pallas", ("tpu",))


@pytest.mark.parametrize("kernel,tuned,otherwise", [
    (pallas, pallas.Config(block=256, tile=32), pallas.Config()),
    (pallas_triton, gpu.Config(block=32, tile=16, stages=1),
     gpu.heuristic(rows=2, heads=2, queries=10, size=16, context=32, itemsize=4))])
def test_kernel_takes_its_tuning_row_else_its_heuristic(
        kernel: Any, tuned: Any, otherwise: Any, tables: Path, monkeypatch: pytest.MonkeyPatch
        ) -> None:
    name, seen, real = kernel.NAME, [], kernel._attend
    monkeypatch.setattr(kernel, "_attend", lambda *args, **kwargs: (
        seen.append(kwargs["config"]), real(*args, **kwargs))[1])
    shape = tuning.shape_class(rows=2, queries=6, heads=2, size=16, context=32)
    write(tables, "cpu", ROW | {"shape": shape, "implementation": name,
                                "config": dataclasses.asdict(tuned)})
    for nodes in (3, 5):
        call(make(lengths=(3, 30), nodes=nodes), name)
    assert seen == [tuned, otherwise]


def test_jax_without_pallas_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with pytest.raises(Unsupported, match="has no Pallas through Triton"):
        jax.eval_shape(lambda: tree_attention(
            **make(), scale=1.0, implementation="pallas_triton", interpret=True))


CONFIGS = {
    ("tree_attention", "pallas"): pallas.Config, ("tree_attention", "pallas_triton"): gpu.Config,
    ("tree_attention", "triton"): gpu.Config, ("gumbel_argmax", "pallas"): draw_pallas.Config,
    ("gumbel_argmax", "pallas_triton"): draw_gpu.Config,
    ("gumbel_argmax", "triton"): draw_gpu.Config}


def test_tables_that_are_shipped_are_read_by_their_kernels() -> None:
    """And what a missing row falls back on is near what was found by search."""
    for path in tuning.folder().glob("*.json"):
        for row in tuning.load(path):
            CONFIGS[row["op"], row["implementation"]](**row["config"])
            assert row["heuristic"]["microseconds"] <= 1.3 * row["microseconds"], (path.name, row)


def test_tuned_values_are_fields_of_configs() -> None:
    assert tune.VALUES.keys() == CONFIGS.keys()
    for name, values in tune.VALUES.items():
        assert values.keys() == {field.name for field in dataclasses.fields(CONFIGS[name])}
