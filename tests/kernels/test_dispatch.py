"""Choosing an implementation, and whose heuristic or configuration it then takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from specrl_kernels import dispatch
from specrl_kernels.dispatch import Unsupported, choose
from specrl_kernels.narrow_matmul import narrow_matmul
from specrl_kernels.tree_attention import gpu, pallas, pallas_triton
from tree_attention_cases import call, make


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


@pytest.mark.parametrize("platform,kind,chosen", [
    ("tpu", "TPU v5 lite", "tpu"), ("gpu", "NVIDIA H100", "gpu"), ("cuda", "NVIDIA H200", "gpu")])
def test_the_mesh_in_scope_decides_not_the_default_device(
        platform: str, kind: str, chosen: str) -> None:
    assert dispatch.traced_for().platform == jax.default_backend()
    with use_abstract_mesh(no_device(platform, kind)):
        assert dispatch.traced_for() == (chosen, kind)
        assert dispatch.target(None)[:2] == (chosen, kind)
        assert dispatch.target(None, platform="cpu")[:2] == ("cpu", "some cpu")
        with pytest.raises(Unsupported, match=f"{chosen}: CPUs only"):
            narrow_matmul(jnp.zeros((4, 16)), jnp.zeros((16, 2)), implementation="machine")


def test_choose_takes_the_first_that_can_or_raises_all_reasons() -> None:
    assert choose({"refuse": refuse, "double": double, "same": lambda x: x}, None)(3) == 6
    with pytest.raises(ExceptionGroup) as actual:
        choose({"a": refuse, "b": refuse}, None)(3)
    assert [str(reason) for reason in actual.value.exceptions] == ["a: not 3", "b: not 3"]
    with pytest.raises(TypeError):  # which is no refusal
        choose({"broken": lambda x: x + None, "double": double}, None)(3)


@pytest.mark.parametrize("target,reason", [
    (dispatch.Target("tpu", "", named=False), None),
    (dispatch.Target("cpu", "", named=True), "needs a tpu, this is a cpu"),
    (dispatch.Target("cpu", "", named=True, interpret=True), None),
    (dispatch.Target("cpu", "", named=False, interpret=True), "interpretation is slow")])
def test_kernel_runs_on_its_platform_or_interpreted_by_name(
        target: dispatch.Target, reason: str | None) -> None:
    run = dispatch.kernel("tree_attention", "pallas", "tpu", function="heuristic")
    if reason is None:
        with pytest.raises(TypeError, match="target"):  # the function that it imports was called
            run(target=target)
    else:
        with pytest.raises(Unsupported, match=reason):
            run(target=target)


@pytest.mark.parametrize("kernel,given,heuristic", [
    (pallas, pallas.Config(block=256, tile=32), pallas.Config(block=1024)),
    (pallas_triton, gpu.Config(block=32, tile=16, stages=1),
     gpu.Config(block=32, tile=16, splits=1, warps=8))])
def test_kernel_takes_the_given_configuration_else_its_heuristic(
        kernel: Any, given: Any, heuristic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], kernel._attend
    monkeypatch.setattr(kernel, "_attend", lambda *args, **kwargs: (
        seen.append(kwargs["config"]), real(*args, **kwargs))[1])
    name = kernel.__name__.rpartition(".")[2]
    for config in (dataclasses.asdict(given), None):
        call(make(lengths=(3, 30), nodes=5), name, config=config)
    assert seen == [given, heuristic]
