"""The cells that controllers are compared on, and the config of their engines."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from specrl_jax.config import Config, ConfigError
from specrl_jax.control import respec

LENGTHS = ("uniform", "heavy")
STOP = "stop"
DEPTH = 4
CONTEXTS = (64, 1024)  # of replayed streams; one engine holds both, as a run's holds any prompt
VERSION = 2  # of what cells are: cases of another one are no occasions of these
Sizes = tuple[int, tuple[int, ...], bool]
"""What cells with the same engines share: rows, contexts, whether rows end at stop tokens."""


class Cell(NamedTuple):
    """`corruption` is that of replayed streams; None drafts with config.spec.drafter. `lengths` are
    one of LENGTHS, or STOP: rows end at stop tokens, wherever the actor says them."""

    rows: int
    context: int
    corruption: float | None
    lengths: str

    @property
    def name(self) -> str:
        drafter = "own" if self.corruption is None else f"{self.corruption:g}"
        return f"{self.rows}x{self.context}-{drafter}-{self.lengths}"

    @property
    def sizes(self) -> Sizes:
        contexts = (self.context,) if self.corruption is None else CONTEXTS
        return self.rows, contexts, self.lengths == STOP


SMALL = tuple(Cell(rows, context, corruption, lengths)
              for rows in (1, 4, 16, 64) for context in CONTEXTS
              for corruption in (0.0, 0.4, 1.0) for lengths in LENGTHS)
SMOLLM2 = tuple(Cell(rows, 64, None, lengths) for rows in (1, 4, 16) for lengths in LENGTHS) + (
    Cell(4, 512, None, "heavy"), Cell(64, 64, None, "heavy"), Cell(64, 64, None, STOP))


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


def shaped(config: Config, rows: int, longest: int, group: int, drafter: str, policy: str,
           stops: bool) -> Config:
    """`config` for one number of rows, and prompts of at most `longest` tokens.

    Where rows end at their limits, they weigh alike, as weights would be an oracle's; limits do
    tell policies how much is to come when a rollout begins. Where they end at stop tokens, `stops`,
    nobody knows that, and weights and the smallest batch are those of `config`.
    """
    new = config.rollout.max_new_tokens
    rollout = dataclasses.replace(
        config.rollout, batch_size=rows, max_prompt_tokens=max(2, longest), max_new_tokens=2 * new,
        min_batch=min(config.rollout.min_batch, rows) if stops else _least(rows))
    branch = 1 if drafter == "replay" else config.spec.max_branch
    spec = dataclasses.replace(
        config.spec, drafter=drafter, history_past=group, max_depth=DEPTH, max_branch=branch,
        max_nodes=1 + DEPTH * branch, depth=1, branch=1, nodes=2, budget=0,
        max_packed=max(2 * rows, min(rows * (1 + DEPTH * branch), 64)))
    settings = respec.settings_of(config.control.settings, DEPTH, branch, spec.max_nodes)
    accept = tuple(1.0 for _ in settings) if policy == "oracle" else ()
    control = dataclasses.replace(config.control, policy=policy, min_survival=0.0, accept=accept,
                                  length_weight=config.control.length_weight if stops else 0.0)
    return dataclasses.replace(config, rollout=rollout, spec=spec, control=control)


def _least(rows: int) -> int:
    """The smallest batch. Each further one is a program more in the engine of every arm, and Linux
    maps 65,530 pieces of code and data at most into a process."""
    return max(min(4, rows), rows // 4)
