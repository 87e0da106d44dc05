"""What a process holds of the machine's memory."""

import mmap
import sys

import pytest

from specrl_jax.runtime.machine import maps


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's maps")
def test_maps_are_counted() -> None:
    before, most = maps()
    assert 0 < before < most
    pieces = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE * (i % 2))
              for i in range(100)]  # neighbours of other rights are not joined
    assert 90 <= maps()[0] - before <= 110 and len(pieces) == 100
