"""A ring buffer of training features on the host: preallocated, within a byte budget.

It holds the sequences of the newest `distill.rollouts` rollouts, or as many as the budget allows;
new sequences overwrite the oldest. Hidden states become logits only by the output head of the
policy version that made them, so each version's head is stored too, within the same budget. A
version whose head is overwritten leaves with all its sequences.

Shapes as in distill/teacher.py; `R` stored sequences, `H` stored policy versions.
"""

from typing import Any

import numpy as np

from specrl_jax.config import DistillConfig, check
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.structs import Array

EMPTY = -1
MEGABYTE = 2**20
HEADS, VERSIONS, VERSION, NEXT = "heads", "versions", "version", "next"
_BATCH = ("tokens", "length", "first", "temperature", "reward", "advantage")
_TARGETS = ("taps", "hidden", "normalizer", "best", "entropy")  # a row of each sequence


def row_shapes(drafter: TrainableDrafter, hidden_size: int, columns: int, window: int
               ) -> dict[str, tuple[Any, ...]]:
    """Returns name -> (shape, dtype) of one stored sequence; S = `columns`, T = `window`."""
    f = hidden_size
    return {
        "tokens": ((columns,), np.int32), "length": ((), np.int32), "first": ((), np.int32),
        "temperature": ((), np.float32), "reward": ((), np.float32), "advantage": ((), np.float32),
        "taps": ((len(drafter.taps) * f, columns), np.float32), "hidden": ((f, window), np.float32),
        "normalizer": ((window,), np.float32), "best": ((window,), np.int32),
        "entropy": ((window,), np.float32), VERSION: ((), np.int32)}


class FeatureBuffer:
    """Stores sequences with their teacher targets. Its arrays never change size.

    Args:
      hidden_size: F, the actor's.
      sequences: most sequences of one rollout.
      columns, window: S and T.
      heads: H.

    Raises:
      ConfigError: the budget does not hold one update's sequences.
    """

    def __init__(self, options: DistillConfig, drafter: TrainableDrafter, hidden_size: int,
                 sequences: int, columns: int, window: int, heads: int) -> None:
        described = row_shapes(drafter, hidden_size, columns, window)
        head = (drafter.vocab_size, hidden_size)
        row_bytes = sum(int(np.prod(shape)) * np.dtype(kind).itemsize
                        for shape, kind in described.values())
        fixed = heads * (int(np.prod(head)) + 1) * 4 + 4  # with the versions, and the next row
        fit = (options.megabytes * MEGABYTE - fixed) // row_bytes
        check(fit >= options.batch, "distill.megabytes", options.megabytes,
              f"an update of {options.batch} sequences and {heads} heads take "
              f"{-(-(options.batch * row_bytes + fixed) // MEGABYTE)}; raise it, or lower "
              f"distill.batch")
        rows = min(fit, options.rollouts * sequences)
        check(rows >= options.batch, "distill.batch", options.batch,
              f"{options.rollouts} x {sequences} sequences are kept; lower it")
        self._arrays = {name: np.zeros((rows, *shape), kind)
                        for name, (shape, kind) in described.items()}
        self._arrays[VERSION][:] = EMPTY
        self._arrays |= {HEADS: np.zeros((heads, *head), np.float32),
                         VERSIONS: np.full(heads, EMPTY, np.int32), NEXT: np.zeros((), np.int32)}

    @property
    def rows(self) -> int:
        """R."""
        return len(self._arrays[VERSION])

    @property
    def filled(self) -> int:
        """Number of sequences stored now."""
        return int((self._arrays[VERSION] != EMPTY).sum())

    @property
    def heads(self) -> np.ndarray:
        """f32[H, Vd, F]."""
        return self._arrays[HEADS]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint, which holds no empty ones, as taps may be."""
        return {name: a for name, a in self._arrays.items() if a.size}

    def restore(self, arrays: dict[str, Any]) -> None:
        self._arrays |= {name: np.array(a) for name, a in arrays.items()}

    def add(self, batch: SequenceBatch, targets: TeacherTargets, version: int,
            head: Array | np.ndarray) -> None:
        """Stores the sequences of n micro-batches; those of length 0 are padding.

        Args:
          version: of the policy that generated them.
          head: f32[Vd, F] the draft vocabulary's rows of its output head.
        """
        kept = self._arrays
        slot = self._slot(version)
        kept[HEADS][slot] = head
        found = {name: np.asarray(getattr(batch, name)) for name in _BATCH}
        found |= {name: np.asarray(getattr(targets, name)) for name in _TARGETS}
        found |= {name: np.moveaxis(found[name], 2, 1) for name in ("taps", "hidden")}
        flat = {name: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for name, a in found.items()}
        real = np.flatnonzero(flat["length"])[-self.rows :]
        at = (int(kept[NEXT]) + np.arange(len(real))) % self.rows
        for name, values in flat.items():
            kept[name][at] = values[real]
        kept[VERSION][at] = version
        kept[NEXT][...] = (int(kept[NEXT]) + len(real)) % self.rows

    def _slot(self, version: int) -> int:
        """Returns the place of a version's head; without room the oldest version leaves."""
        versions = self._arrays[VERSIONS]
        same = np.flatnonzero(versions == version)
        slot = int(same[0]) if len(same) else int(np.argmin(versions))
        if versions[slot] not in (EMPTY, version):
            self._arrays[VERSION][self._arrays[VERSION] == versions[slot]] = EMPTY
        versions[slot] = version
        return slot

    def draw(self, rng: np.random.Generator, batch: int, rows: int, newest: bool = False
             ) -> tuple[SequenceBatch, TeacherTargets]:
        """Draws random sequences as micro-batches of `rows`, each of one policy version.

        Args:
          batch: number of sequences, a multiple of `rows`; padded if fewer are stored.
          newest: draw from the newest version only.
        """
        version = self._arrays[VERSION]
        held = np.unique(version[version != EMPTY])
        parts = []
        for v in held[-1:] if newest else held:
            mine = rng.permutation(np.flatnonzero(version == v))
            padded = np.full(-(-len(mine) // rows) * rows, EMPTY)
            padded[: len(mine)] = mine
            parts += [(int(v), part) for part in padded.reshape(-1, rows)]
        chosen = [parts[i] for i in rng.permutation(len(parts))[: batch // rows]]
        chosen += [(int(held[-1]), np.full(rows, EMPTY))] * (batch // rows - len(chosen))
        return self._take(np.stack([part for _, part in chosen]), [v for v, _ in chosen])

    def _take(self, rows: np.ndarray, versions: list[int]
              ) -> tuple[SequenceBatch, TeacherTargets]:
        """Returns stored rows i64[n, b] as micro-batches; EMPTY pads."""

        def pick(name: str) -> np.ndarray:
            return self._arrays[name][rows]

        batch = SequenceBatch(**{name: pick(name) for name in _BATCH})
        used = rows != EMPTY
        batch = batch.replace(length=np.where(used, batch.length, 0),
                              first=np.where(used, batch.first, 1),
                              temperature=np.where(used, batch.temperature, np.float32(1)))
        targets = {name: pick(name) for name in _TARGETS}
        targets |= {name: np.moveaxis(targets[name], 1, 2) for name in ("taps", "hidden")}
        slots = [int(np.flatnonzero(self._arrays[VERSIONS] == v)[0]) for v in versions]
        return batch, TeacherTargets(**targets, teacher=np.asarray(slots, np.int32))
