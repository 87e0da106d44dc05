"""A ring of training features on the host, within a byte budget.

It holds the sequences of the newest `distill.rollouts` rollouts, or as many as the budget allows;
new sequences overwrite the oldest. Hidden states become logits only by the output head of the
policy version that made them, so each version's head is stored too, within the same budget. A
version whose head is overwritten leaves with all its sequences.

Shapes as in distill/teacher.py; `R` stored sequences, `H` stored policy versions.
"""

from typing import NamedTuple

import jax
import numpy as np
from flax import struct
from numpy.typing import DTypeLike

from specrl_jax.config import DistillConfig, check
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets, in_rows
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.structs import AnyArray, PyTree

EMPTY = -1
MEGABYTE = 2**20
_BATCH = ("tokens", "length", "first", "temperature", "reward", "advantage")
_TARGETS = ("taps", "hidden", "normalizer", "best", "entropy", "drafted")
_INTS = ("tokens", "length", "first", "best", "drafted")  # i32
_ACTORS = ("taps", "hidden")  # of the actor's dtype, as its heads are; the others f32


class Sizes(NamedTuple):
    """How much a run stores of its rollouts."""

    sequences: int  # at most, of each rollout
    columns: int  # S
    window: int  # T
    hidden: int  # F


class Features(struct.PyTreeNode):
    """R stored sequences with their teacher targets, and H heads, numpy arrays.

    A value: `FeatureRing.add` returns features that share every row and head but the new ones.
    """

    rows: tuple[dict[str, np.ndarray], ...]  # fields of SequenceBatch and TeacherTargets
    version: np.ndarray  # i32[R] of the policy that generated each; EMPTY: no sequence
    heads: tuple[np.ndarray, ...]  # f[Vd, F] of the actor's dtype
    versions: np.ndarray  # i32[H] of the policy that each head belongs to, or EMPTY
    next: np.ndarray  # i32[] row that is written next

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint, which holds no empty ones, as taps may be."""
        named = {name: np.stack([row[name] for row in self.rows]) for name in self.rows[0]}
        named |= {"version": self.version, "heads": np.stack(self.heads),
                  "versions": self.versions, "next": self.next}
        return {name: a for name, a in named.items() if a.size}


class FeatureRing:
    """The shapes of a run's features, and how new sequences replace old ones.

    Hidden states and heads have `dtype`, the actor's.

    Raises:
      ConfigError: the budget does not hold one update's sequences.
    """

    def __init__(self, options: DistillConfig, drafter: TrainableDrafter, sizes: Sizes,
                 dtype: np.dtype) -> None:
        heads = 1 if options.when == "once" else options.rollouts  # H
        shapes = {"tokens": (sizes.columns,),
                  "taps": (len(drafter.taps) * sizes.hidden, sizes.columns),
                  "hidden": (sizes.hidden, sizes.window)} | dict.fromkeys(
                      ("normalizer", "best", "entropy", "drafted"), (sizes.window,))
        types: dict[str, DTypeLike] = {**dict.fromkeys(_INTS, np.int32),
                                       **dict.fromkeys(_ACTORS, dtype)}
        self._rows = {name: (shapes.get(name, ()), np.dtype(types.get(name, np.float32)))
                      for name in (*_BATCH, *_TARGETS)}
        self._heads = ((heads, drafter.vocab_size, sizes.hidden), dtype)
        row_bytes = 4 + sum(_nbytes(*of) for of in self._rows.values())  # with its version
        fixed = _nbytes(*self._heads) + 4 * heads + 4  # with versions, and the next row
        fit = (options.megabytes * MEGABYTE - fixed) // row_bytes
        check(fit >= options.batch, "distill.megabytes", options.megabytes,
              f"an update of {options.batch} sequences and {heads} heads take "
              f"{-(-(options.batch * row_bytes + fixed) // MEGABYTE)}; raise it, or lower "
              f"distill.batch")
        self.rows = min(fit, options.rollouts * sizes.sequences)  # R
        check(self.rows >= options.batch, "distill.batch", options.batch,
              f"{options.rollouts} x {sizes.sequences} sequences are kept; lower it")
        self.sizes = sizes._replace(sequences=min(sizes.sequences, self.rows))
        self.nbytes = self.rows * row_bytes + fixed

    @property
    def heads(self) -> jax.ShapeDtypeStruct:
        """The shape of f[H, Vd, F]."""
        return jax.ShapeDtypeStruct(*self._heads)

    @property
    def width(self) -> int:
        """Values at a position of Records.states."""
        return self._rows["taps"][0][0] + self.sizes.hidden

    def empty(self) -> Features:
        """Returns features without a sequence."""
        (count, *shape), dtype = self._heads
        blank = {name: np.zeros(*of) for name, of in self._rows.items()}
        return Features(
            rows=(blank,) * self.rows, version=np.full(self.rows, EMPTY, np.int32),
            heads=(np.zeros(shape, dtype),) * count, versions=np.full(count, EMPTY, np.int32),
            next=np.zeros((), np.int32))

    def restore(self, arrays: dict[str, PyTree]) -> Features:
        """Returns the features of a checkpoint, see `Features.arrays`."""
        blank = self.empty().rows[0]
        rows = tuple({name: np.array(arrays[name][i], a.dtype) if name in arrays else a
                      for name, a in blank.items()} for i in range(self.rows))
        return Features(
            rows=rows, heads=tuple(np.array(head, self._heads[1]) for head in arrays["heads"]),
            **{name: np.asarray(arrays[name], np.int32) for name in ("version", "versions", "next")}
        )

    def add(self, features: Features, batch: SequenceBatch, targets: TeacherTargets, version: int,
            head: AnyArray) -> Features:
        """Returns the features with the sequences of n micro-batches added; length 0 is padding.

        `head` f[Vd, F] is the output head, rows of the draft vocabulary, of policy `version`.
        """
        features = _with_head(features, version, head)
        real = np.flatnonzero(np.asarray(batch.length))[-self.rows:]
        at = (int(features.next) + np.arange(len(real))) % self.rows
        fields = {name: _by_row(name, batch if name in _BATCH else targets) for name in self._rows}
        rows = list(features.rows)
        for row, i in zip(at, real, strict=True):  # copies, which keep no other row alive
            rows[row] = {name: np.array(values[i], self._rows[name][1])
                         for name, values in fields.items()}
        owner = features.version.copy()
        owner[at] = version
        then = (int(features.next) + len(real)) % self.rows
        return features.replace(rows=tuple(rows), version=owner, next=np.asarray(then, np.int32))


def draw(features: Features, rng: np.random.Generator, batch: int, rows: int,
         newest: bool = False) -> tuple[SequenceBatch, TeacherTargets]:
    """Draws `batch` random sequences as micro-batches of `rows`, each of one policy version.

    They are padded if fewer are stored; `newest` draws from the newest version only.
    """
    version = features.version
    stored = np.unique(version[version != EMPTY])
    parts = []
    for v in stored[-1:] if newest else stored:
        mine = rng.permutation(np.flatnonzero(version == v))
        parts += [(int(v), part) for part in in_rows(mine, rows)]
    chosen = [parts[i] for i in rng.permutation(len(parts))[: batch // rows]]
    chosen += [(int(stored[-1]), np.full(rows, EMPTY))] * (batch // rows - len(chosen))
    at = np.stack([part for _, part in chosen])  # i64[n, b]
    chosen_rows, used = [features.rows[i] for i in at.reshape(-1)], at != EMPTY
    drawn = {name: np.stack([row[name] for row in chosen_rows]).reshape(*at.shape, *a.shape)
             for name, a in chosen_rows[0].items()}
    drawn |= {name: np.where(used, drawn[name], np.asarray(pad, drawn[name].dtype))
              for name, pad in (("length", 0), ("first", 1), ("temperature", 1))}
    drawn |= {name: np.moveaxis(drawn[name], 1, 2) for name in _ACTORS}
    slots = [int(np.flatnonzero(features.versions == v)[0]) for v, _ in chosen]
    return (SequenceBatch(**{name: drawn[name] for name in _BATCH}), TeacherTargets(
        **{name: drawn[name] for name in _TARGETS}, teacher=np.asarray(slots, np.int32)))


def _with_head(features: Features, version: int, head: AnyArray) -> Features:
    """Returns the features with a version's head; without room the oldest version leaves."""
    versions, owner = features.versions.copy(), features.version
    same = np.flatnonzero(versions == version)
    slot = int(same[0]) if len(same) else int(np.argmin(versions))
    if versions[slot] != version:
        owner = np.where(owner == versions[slot], EMPTY, owner)
    versions[slot] = version
    heads = tuple(np.array(head, old.dtype) if i == slot else old
                  for i, old in enumerate(features.heads))
    return features.replace(version=owner, heads=heads, versions=versions)


def _by_row(name: str, source: SequenceBatch | TeacherTargets) -> np.ndarray:
    """Returns a field of n micro-batches of b sequences as [n * b, ...]."""
    values = np.asarray(getattr(source, name))
    values = np.moveaxis(values, 2, 1) if name in _ACTORS else values
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def _nbytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
