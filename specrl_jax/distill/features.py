"""A ring buffer of training features on the host: preallocated, within a byte budget.

It holds the sequences of the newest `distill.rollouts` rollouts, or as many as the budget allows;
new sequences overwrite the oldest. Hidden states become logits only by the output head of the
policy version that made them, so each version's head is stored too, within the same budget. A
version whose head is overwritten leaves with all its sequences.

Shapes as in distill/teacher.py; `R` stored sequences, `H` stored policy versions.
"""


import numpy as np

from specrl_jax.config import DistillConfig, check
from specrl_jax.distill.data import in_rows
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.structs import AnyArray, PyTree

EMPTY = -1
MEGABYTE = 2**20
HEADS, VERSIONS, VERSION, NEXT = "heads", "versions", "version", "next"
_BATCH = ("tokens", "length", "first", "temperature", "reward", "advantage")
_TARGETS = ("taps", "hidden", "normalizer", "best", "entropy")
_INTS = ("tokens", "length", "first", "best", VERSION)  # i32
_ACTORS = ("taps", "hidden")  # of the actor's dtype, as its heads are; the others f32


class FeatureBuffer:
    """Stores sequences with their teacher targets in arrays that never change size.

    F = `hidden_size`, at most `sequences` per rollout, S = `columns`, T = `window`, H = `heads`;
    hidden states and heads have `dtype`, the actor's.
    Raises a ConfigError if the budget does not hold one update's sequences.
    """

    def __init__(self, options: DistillConfig, drafter: TrainableDrafter, hidden_size: int,
                 sequences: int, columns: int, window: int, heads: int,
                 dtype: np.dtype) -> None:
        shapes = {"tokens": (columns,), "taps": (len(drafter.taps) * hidden_size, columns),
                  "hidden": (hidden_size, window), "normalizer": (window,), "best": (window,),
                  "entropy": (window,)}
        shapes = {name: shapes.get(name, ()) for name in (*_BATCH, *_TARGETS, VERSION)}
        types = {name: np.dtype(np.int32 if name in _INTS else dtype if name in _ACTORS
                                else np.float32) for name in shapes}
        row_bytes = sum(int(np.prod(shape)) * types[name].itemsize
                        for name, shape in shapes.items())
        # The heads with their versions, and the next row.
        fixed = heads * (drafter.vocab_size * hidden_size * dtype.itemsize + 4) + 4
        fit = (options.megabytes * MEGABYTE - fixed) // row_bytes
        check(fit >= options.batch, "distill.megabytes", options.megabytes,
              f"an update of {options.batch} sequences and {heads} heads take "
              f"{-(-(options.batch * row_bytes + fixed) // MEGABYTE)}; raise it, or lower "
              f"distill.batch")
        self.rows = min(fit, options.rollouts * sequences)  # R
        check(self.rows >= options.batch, "distill.batch", options.batch,
              f"{options.rollouts} x {sequences} sequences are kept; lower it")
        self._arrays = {name: np.zeros((self.rows, *shape), types[name])
                        for name, shape in shapes.items()}
        self._arrays |= {HEADS: np.zeros((heads, drafter.vocab_size, hidden_size), dtype),
                        VERSIONS: np.full(heads, EMPTY, np.int32), NEXT: np.zeros((), np.int32)}
        self._arrays[VERSION][:] = EMPTY

    @property
    def heads(self) -> np.ndarray:
        """f[H, Vd, F] of the actor's dtype."""
        return self._arrays[HEADS]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint, which holds no empty ones, as taps may be."""
        return {name: a for name, a in self._arrays.items() if a.size}

    def restore(self, arrays: dict[str, PyTree]) -> None:
        self._arrays |= {name: np.array(a, self._arrays[name].dtype) for name, a in arrays.items()}

    def add(self, batch: SequenceBatch, targets: TeacherTargets, version: int, head: AnyArray
            ) -> None:
        """Stores the sequences of n micro-batches; those of length 0 are padding.

        `head` f[Vd, F] is the output head, rows of the draft vocabulary, of policy `version`.
        """
        kept = self._arrays
        kept[HEADS][self._slot(version)] = head
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
        versions, owner = self._arrays[VERSIONS], self._arrays[VERSION]
        same = np.flatnonzero(versions == version)
        slot = int(same[0]) if len(same) else int(np.argmin(versions))
        if versions[slot] != version:
            owner[owner == versions[slot]] = EMPTY
        versions[slot] = version
        return slot

    def draw(self, rng: np.random.Generator, batch: int, rows: int, newest: bool = False
             ) -> tuple[SequenceBatch, TeacherTargets]:
        """Draws `batch` random sequences as micro-batches of `rows`, each of one policy version.

        They are padded if fewer are stored; `newest` draws from the newest version only.
        """
        version = self._arrays[VERSION]
        held = np.unique(version[version != EMPTY])
        parts = []
        for v in held[-1:] if newest else held:
            mine = rng.permutation(np.flatnonzero(version == v))
            parts += [(int(v), part) for part in in_rows(mine, rows)]
        chosen = [parts[i] for i in rng.permutation(len(parts))[: batch // rows]]
        chosen += [(int(held[-1]), np.full(rows, EMPTY))] * (batch // rows - len(chosen))
        at = np.stack([part for _, part in chosen])  # i64[n, b]
        found, used = {name: self._arrays[name][at] for name in (*_BATCH, *_TARGETS)}, at != EMPTY
        found |= {name: np.where(used, found[name], np.asarray(pad, found[name].dtype))
                  for name, pad in (("length", 0), ("first", 1), ("temperature", 1))}
        found |= {name: np.moveaxis(found[name], 1, 2) for name in ("taps", "hidden")}
        slots = [int(np.flatnonzero(self._arrays[VERSIONS] == v)[0]) for v, _ in chosen]
        return (SequenceBatch(**{name: found[name] for name in _BATCH}), TeacherTargets(
            **{name: found[name] for name in _TARGETS}, teacher=np.asarray(slots, np.int32)))
