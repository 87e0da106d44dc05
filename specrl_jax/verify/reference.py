"""The match rule for one row, in plain numpy: what `match` computes for packed trees of all rows.

    noise[v] depends on the sequence and on the token's index, and on nothing that was drafted
    y = argmax_v(logp[v] + noise[v]) is the token that plain decoding would emit here
    if a child of the node holds y: go there; else stop
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np


def draw(logits: np.ndarray, noise: np.ndarray, temperature: float, top_k: int, top_p: float,
         min_p: float = 0.0) -> int:
    """Returns the actor's token: temperature, top-k, top-p of what top-k kept, min-p, noise."""
    order = np.argsort(-logits, kind="stable")  # of equal tokens the lower id comes first
    if temperature == 0:
        return int(order[0])
    scores = logits.astype(np.float64) / temperature
    kept = order[: top_k or None]
    mass = np.exp(scores[kept] - scores.max())
    if top_p < 1:
        kept = kept[np.cumsum(mass) - mass < top_p * mass.sum()]
    kept = kept[np.exp(scores[kept] - scores.max()) >= min_p]
    return int(kept[np.argmax(scores[kept] + noise[kept])])  # renormalising moves no argmax


def verify(tokens: Sequence[int], parent: Sequence[int], live: Sequence[bool],
           draw_after: Callable[[int, int], int], stop: Collection[int], left: int
           ) -> tuple[list[int], list[int], bool]:
    """Walks one tree whose node 0 is the last emitted token.

    Args:
      tokens, parent, live: of the n nodes; parents come before their children.
      draw_after: (node, index of the new token in this round) -> the actor's token, see `draw`.
      stop, left: stop tokens, and tokens until the row's limit, at least 1.

    Returns the emitted tokens, the node that each was drawn after, and whether the row has ended.
    """
    node, emitted, path = 0, [], []
    while True:
        path.append(node)
        emitted.append(draw_after(node, len(emitted)))
        if emitted[-1] in stop or len(emitted) == left:
            return emitted, path, True
        children = [n for n in range(1, len(tokens))
                    if live[n] and parent[n] == node and tokens[n] == emitted[-1]]
        if not children:
            return emitted, path, False
        node = children[0]
