"""Long tests take turns, and none is left out of all of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Any:
    """What a turn leaves of tests 0 .. 9, of which the even ones are long."""
    plugins = request.config.pluginmanager.get_plugins()
    hooks = next(p for p in plugins if getattr(p, "__file__", None) == str(CONFTEST))

    def of(turn: str | None) -> list[int]:
        items = [SimpleNamespace(number=n, get_closest_marker=lambda name, n=n: n % 2 == 0)
                 for n in range(10)]
        config = SimpleNamespace(getoption=lambda name: turn, hook=SimpleNamespace(
            pytest_deselected=lambda items: None))
        hooks.pytest_collection_modifyitems(config, items)
        return [item.number for item in items]

    return of


def test_every_long_test_has_one_turn_and_all_others_every_turn(kept: Any) -> None:
    turns = [kept(f"{index}/3") for index in range(3)]
    assert turns == [[0, 1, 3, 5, 6, 7, 9], [1, 2, 3, 5, 7, 8, 9], [1, 3, 4, 5, 7, 9]]
    assert kept(None) == list(range(10))


@pytest.mark.parametrize("turn", ["3/3", "-1/3", "1", "a/b", "0/0"])
def test_a_turn_that_does_not_exist_is_refused(kept: Any, turn: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--turn={turn}: must be I/N"):
        kept(turn)
