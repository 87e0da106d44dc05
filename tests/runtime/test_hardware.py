"""The table of accelerators: JAX's devices find their figures, other devices find none."""

import types

import jax
import pytest

from specrl_jax.runtime.hardware import CHIPS, GIB, chip_of


def device(kind, **attributes):
    return types.SimpleNamespace(device_kind=kind, **attributes)


@pytest.mark.parametrize("name", CHIPS)
def test_chip_of_every_kind_in_the_table_is_found(name):
    assert chip_of(device(CHIPS[name].kind)) == CHIPS[name]


def test_chip_of_one_core_of_v4_has_half_the_figures():
    core = chip_of(device("TPU v4", num_cores=1))
    assert core is not None
    assert (core.flops, core.bandwidth, core.available) == (137.5e12, 0.614e12, int(15.25 * GIB))
    assert chip_of(device("TPU v4", num_cores=2)) == CHIPS["v4"]
    assert chip_of(jax.devices()[0]) is None or jax.default_backend() != "cpu"
