"""The loads that controllers are compared on."""

from collections.abc import Sequence
from typing import NamedTuple

from specrl_jax.config import ConfigError

LENGTHS = ("uniform", "heavy")


class Cell(NamedTuple):
    """`corruption` is that of replayed streams; None drafts with config.spec.drafter. `lengths` are
    one of LENGTHS, or `stop`: rows end at stop tokens, wherever the actor says them."""

    rows: int
    context: int
    corruption: float | None
    lengths: str

    @property
    def name(self) -> str:
        drafter = "own" if self.corruption is None else f"{self.corruption:g}"
        return f"{self.rows}x{self.context}-{drafter}-{self.lengths}"


SMALL = tuple(Cell(rows, context, corruption, lengths)
              for rows in (1, 4, 16, 64) for context in (64, 1024)
              for corruption in (0.0, 0.4, 1.0) for lengths in LENGTHS)
SMOLLM2 = tuple(Cell(rows, 64, None, lengths) for rows in (1, 4, 16) for lengths in LENGTHS) + (
    Cell(4, 512, None, "heavy"), Cell(64, 64, None, "heavy"), Cell(64, 64, None, "stop"))


def pick(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of these names; all where none is given.

    Raises:
      ConfigError: there is no such cell.
    """
    known = {cell.name: cell for cell in cells}
    for name in names:
        if name not in known:
            raise ConfigError(f"--cells={name}: choose of {', '.join(known)}")
    return [known[name] for name in names] if names else list(cells)
