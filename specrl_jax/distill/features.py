"""Features of finished rollouts on the host: preallocated, within a byte budget, newest first.

What is kept: the sequences of the newest `rollouts` rollouts, and of those as many as the budget
holds. The oldest sequences make room. With the features of a policy version the head that makes
logits of them is kept, counted in the same budget; a version whose head made room goes whole.

Letters as in rl/distill.py; `R` kept sequences, `H` kept policy versions.
"""

from typing import Any

import numpy as np

from specrl_jax.config import DistillConfig, check
from specrl_jax.distill.update import Lessons, Texts
from specrl_jax.draft.eagle_model import EagleArch

EMPTY = -1
MEGABYTE = 2**20
HEADS, VERSIONS, VERSION, NEXT = "heads", "versions", "version", "next"
_TEXTS = ("tokens", "length", "first", "temperature", "reward", "advantage")
_LESSONS = ("taps", "hidden", "normalizer", "best", "entropy")  # a row of each sequence


def row_shapes(arch: EagleArch, columns: int, window: int) -> dict[str, tuple[Any, ...]]:
    """Name -> (shape, dtype) of what is kept of one sequence; S = `columns`, T = `window`."""
    f = arch.actor.hidden_size
    return {
        "tokens": ((columns,), np.int32), "length": ((), np.int32), "first": ((), np.int32),
        "temperature": ((), np.float32), "reward": ((), np.float32), "advantage": ((), np.float32),
        "taps": ((len(arch.taps) * f, columns), np.float32), "hidden": ((f, window), np.float32),
        "normalizer": ((window,), np.float32), "best": ((window,), np.int32),
        "entropy": ((window,), np.float32), VERSION: ((), np.int32)}


class Features:
    """The buffer. Its arrays never change size.

    Args:
      sequences: of a rollout that may be kept.
      columns, window: S and T.
      heads: H.

    Raises:
      ConfigError: not even one update's sequences can be kept.
    """

    def __init__(self, options: DistillConfig, arch: EagleArch, sequences: int, columns: int,
                 window: int, heads: int) -> None:
        described = row_shapes(arch, columns, window)
        head = (arch.draft_vocab, arch.actor.hidden_size)
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
        """Sequences held now."""
        return int((self._arrays[VERSION] != EMPTY).sum())

    @property
    def heads(self) -> np.ndarray:
        """f32[H, Vd, F]."""
        return self._arrays[HEADS]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds."""
        return self._arrays

    def restore(self, arrays: dict[str, Any]) -> None:
        self._arrays = {name: np.array(a) for name, a in arrays.items()}

    def add(self, texts: Texts, lessons: Lessons, version: int, head: Any) -> None:
        """Adds the sequences of n micro-batches; those of length 0 are padding.

        Args:
          version: of the policy that said them.
          head: f32[Vd, F] its rows of the draft vocabulary.
        """
        kept = self._arrays
        slot = self._slot(version)
        kept[HEADS][slot] = head
        found = {name: np.asarray(getattr(texts, name)) for name in _TEXTS}
        found |= {name: np.asarray(getattr(lessons, name)) for name in _LESSONS}
        found |= {name: np.moveaxis(found[name], 2, 1) for name in ("taps", "hidden")}
        flat = {name: a.reshape(-1, *a.shape[2:]) for name, a in found.items()}
        real = np.flatnonzero(flat["length"])[-self.rows :]
        at = (int(kept[NEXT]) + np.arange(len(real))) % self.rows
        for name, values in flat.items():
            kept[name][at] = values[real]
        kept[VERSION][at] = version
        kept[NEXT][...] = (int(kept[NEXT]) + len(real)) % self.rows

    def _slot(self, version: int) -> int:
        """Where the head of `version` goes. The oldest version leaves if there is no room."""
        versions = self._arrays[VERSIONS]
        same = np.flatnonzero(versions == version)
        slot = int(same[0]) if len(same) else int(np.argmin(versions))
        if versions[slot] not in (EMPTY, version):
            self._arrays[VERSION][self._arrays[VERSION] == versions[slot]] = EMPTY
        versions[slot] = version
        return slot

    def draw(self, rng: np.random.Generator, batch: int, rows: int, newest: bool = False
             ) -> tuple[Texts, Lessons]:
        """Random sequences as micro-batches of `rows`, each of one policy version.

        Args:
          batch: sequences; a multiple of `rows`. Where fewer are held, some are padding.
          newest: only those of the newest version.
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

    def _take(self, rows: np.ndarray, versions: list[int]) -> tuple[Texts, Lessons]:
        """Kept rows i64[n, b] as micro-batches; EMPTY pads."""
        def pick(name: str) -> np.ndarray:
            return self._arrays[name][rows]

        texts = Texts(**{name: pick(name) for name in _TEXTS})
        used = rows != EMPTY
        texts = texts.replace(length=np.where(used, texts.length, 0),
                              first=np.where(used, texts.first, 1),
                              temperature=np.where(used, texts.temperature, np.float32(1)))
        lessons = {name: pick(name) for name in _LESSONS}
        lessons |= {name: np.moveaxis(lessons[name], 1, 2) for name in ("taps", "hidden")}
        slots = [int(np.flatnonzero(self._arrays[VERSIONS] == v)[0]) for v in versions]
        return texts, Lessons(**lessons, teacher=np.asarray(slots, np.int32))


