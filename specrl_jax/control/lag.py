"""How much less drafts bring than their tokens, since some rows stay behind."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.control.cost_model import Table
from specrl_jax.control.protocol import Stretch

LEARN, FORGET = 0.5, 0.02  # share of a rollout's lag that is taken up, and of it that is forgotten
LEAST = 0.25  # share of a rollout that drafts must have given, or its lag is not learned
MOST_LAG = 2.0


def straggle(lag: Mapping[str, Any], tables: Mapping[str, Table],
             trace: Sequence[Mapping[str, Any]], plain: Sequence[Stretch]) -> dict[str, np.ndarray]:
    """By batch size, how much longer rounds of drafts really have plain decoding take.

    A round's tokens are worth as many plain rounds as its live rows would have needed. But drafts
    bring some rows further than others, and the last ones then run in rounds that hardly take less:
    over a whole rollout the tokens may have been worth less, by this factor, at least 1. Batch
    sizes that mostly drafted learn it, of a rollout in which drafts gave LEAST of what it would
    have taken: of less, errors of the prices would be most of it. In others it fades.

    Args:
      trace: of a rollout, with `explain` of each launch.
      plain: stretches of what its sequences would have taken without drafts.
    """
    def seconds(batch: int, rounds: float, context: float) -> float:
        table = tables[str(batch)]
        return rounds * float(np.interp(context, table.context, table.verify[0]))

    told = {size: [0.0, 0.0] for size in lag}  # seconds with drafts, and without
    for launch in trace:
        whole = launch["tokens"] / max(launch["live"], 1e-9)
        undrafted = (1 - launch["drafting"]) * launch["launch_rounds"]
        took = seconds(launch["batch"], 1.0, launch["context"])
        told[str(launch["batch"])][0] += max(whole - undrafted, 0.0) * took
        told[str(launch["batch"])][1] += undrafted * took
    drafted, undrafted = map(sum, zip(*told.values(), strict=True))
    left = sum(seconds(*stretch) for stretch in plain) - undrafted
    learns = left > 0 and drafted >= LEAST * (drafted + undrafted)
    found = min(max(drafted / left, 1.0), MOST_LAG) if learns else 1.0
    after = {}
    for size, (with_drafts, without) in told.items():
        new, share = (found, LEARN) if learns and with_drafts > without else (1.0, FORGET)
        after[size] = np.float32((1 - share) * np.asarray(lag[size]).item() + share * new)
    return after
