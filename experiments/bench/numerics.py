"""What differs between rollouts, and what invariant numerics cost them."""

from typing import Any

import numpy as np

from .speculation import Run
from .timing import ratio, spread

MODES = ("default", "invariant")
BITS = ("logprob", "raw_logprob", "top_p_mass")


def compared(found: dict[tuple[str, str], list[Run]], name: str) -> dict[str, Any]:
    """What an arm cost in both modes, and how it differs from plain decoding in each."""
    seconds = {mode: [run.seconds for run in found[name, mode]] for mode in MODES}
    last = {mode: found[name, mode][-1].result for mode in MODES}
    plain = {mode: found["off", mode][-1].result.sequences for mode in MODES}
    counters = last["invariant"].counters
    sure = last["invariant"].sequences
    tokens, equal = same_tokens(last["default"].sequences, plain["default"])
    return {
        "seconds": {mode: spread(values) for mode, values in seconds.items()},
        "invariant over default": ratio(seconds["invariant"], seconds["default"]),
        "accept_length": counters["committed"] / max(counters["row_rounds"], 1),
        "tokens": int(sure.length.sum()),
        "equal_bits": same_bits(sure, plain["invariant"]),
        "default": {"tokens until one differs": tokens,
                    "sequences that differ": int((~equal).sum())}}


def same_bits(one: Any, other: Any) -> bool:
    """Whether two rollouts' tokens and log-probabilities are equal bit for bit."""
    if not (np.array_equal(one.length, other.length) and same_tokens(one, other)[1].all()):
        return False
    within = np.arange(one.tokens.shape[1])[None] < one.length[:, None]
    return all(np.array_equal(getattr(one, name)[within].view(np.uint32),
                              getattr(other, name)[within].view(np.uint32)) for name in BITS)


def same_tokens(one: Any, other: Any) -> tuple[int, np.ndarray]:
    """Tokens up to each sequence's first difference, and bool[Q] of sequences without one."""
    shortest = np.minimum(one.length, other.length)
    differ = (one.tokens != other.tokens) & (
        np.arange(one.tokens.shape[1])[None] < shortest[:, None])
    first = np.where(differ.any(1), differ.argmax(1), shortest)
    return int(first.sum()), ~differ.any(1) & (one.length == other.length)
