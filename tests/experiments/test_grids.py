"""The worth of adapting: the paper's own figures, and a grid whose noise must not be chosen."""

import math

import pytest

from experiments.bench import grids, tables
from experiments.bench.grids import PAPER


def test_adapting_papers_grid_equals_hand_computed_means() -> None:
    """Harmonic and geometric means of its seven loads, worked out by hand from Fig. 7."""
    actual = grids.adapting(PAPER)
    for way, harmonic, geometric in (("best static", 1.147, 1.163),
                                     ("best static or off", 1.190, 1.200),
                                     ("per load", 1.259, 1.270)):
        assert actual["harmonic"][way]["speed"] == pytest.approx(harmonic, abs=5e-4)
        assert actual["geometric"][way]["speed"] == pytest.approx(geometric, abs=5e-4)
    assert actual["geometric"]["per load"]["chosen"][64] == "off"
    assert 42 < actual["break_even"]["best of each load"] < 43


NOISY = {1: {"a": [2.0, 1.0] * 3, "b": [1.4, 1.5] * 3, "budget": [1.6, 1.5, 1.6, 1.6, 1.6, 1.7]},
         4: {"a": [0.9, 2.0] * 3, "b": [0.8, 0.8] * 3, "budget": [1.0] * 6}}


def test_adapting_chooses_and_judges_on_other_repeats() -> None:
    actual = grids.adapting(NOISY, ["budget"])["geometric"]
    assert actual["per load"]["chosen"] == {1: "a", 4: "off"}
    assert actual["per load"]["speed"] == pytest.approx(1.0)  # of a, in odd repeats, and of off
    assert actual["best static"]["speed"] == pytest.approx(math.sqrt(1.0 * 2.0))
    assert set(actual["best static"]["chosen"].values()) == {"a"}


@pytest.mark.parametrize("speed,load", [
    ({1: 1.5, 4: 1.2}, None), ({1: 0.9, 4: 0.8}, 0.0), ({1: 1.2, 4: 0.8}, 2.0),
    ({1: 0.9, 4: 1.0, 16: 0.5}, 4.0)])
def test_break_even_is_interpolated(speed: dict[int, float], load: float | None) -> None:
    assert grids.break_even(speed) == (load if load is None else pytest.approx(load))


def test_grid_holds_common_arms() -> None:
    def case(*arms: str) -> dict:
        return {"arms": {name: {"speedup": {"values": [1.5, 1.5]}} for name in arms}}

    cases = {"16": case("off", "eagle 0", "eagle 1x1x2", "history 1x1x2"),
             "2": case("off", "eagle 0", "eagle 1x1x2", "eagle budget", "history 1x1x2")}
    grid = grids.grid_of(cases, "eagle")
    assert grid == {2: {"1x1x2": [1.5, 1.5]}, 16: {"1x1x2": [1.5, 1.5]}}
    assert list(grid) == [2, 16]
    table = tables.adapting_table({"eagle": grids.adapting(grid)})
    assert table.row_count == 1
