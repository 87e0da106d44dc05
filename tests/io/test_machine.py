"""What a process holds of the machine's memory."""

import mmap
import resource
import sys
from pathlib import Path

import pytest

from specrl_jax.io.machine import give_back, maps, peak_rss

MEGABYTE = 2**20


def held() -> int:
    """Bytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/statm")
def test_give_back_returns_freed_memory() -> None:
    """Blocks below malloc's threshold for maps of their own, behind one that is still needed."""
    blocks = [bytearray(b"x" * 20_000) for _ in range(10_000)]
    needed, kept = blocks[-1], held()
    assert peak_rss() >= kept - MEGABYTE
    del blocks
    give_back()
    assert held() < kept - 150 * MEGABYTE and len(needed) == 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's maps")
def test_maps_are_counted() -> None:
    before, most = maps()
    assert 0 < before < most
    pieces = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE * (i % 2))
              for i in range(100)]  # neighbours of other rights are not joined
    assert 90 <= maps()[0] - before <= 110 and len(pieces) == 100
