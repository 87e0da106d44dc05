"""Quality of drafts: acceptance by depth, and rounds replayed over recorded responses."""

import numpy as np

from specrl_jax.distill.update import Evaluation


def summarize(parts: list[Evaluation]) -> dict[str, float]:
    """Returns means over all held-out anchors by depth, and accept lengths by depth of the chain.

    alpha: acceptance rate of rejection sampling; agree: share of anchors at which drafter and actor
    find the same token most likely; match: share at which the draft made with the actor's noise is
    the response's token. Each assumes that the drafts before it were right.
    accept_length/d: tokens of a round with a chain of d drafts under the match rule, from rounds
    replayed over the recorded responses.
    """
    out: dict[str, float] = {}
    for name in ("alpha", "agree", "match"):
        sums = np.sum([np.where(p.live, getattr(p, name), 0).sum((1, 2)) for p in parts], axis=0)
        out |= by_depth(name, sums / np.sum([p.live.sum((1, 2)) for p in parts], axis=0))
    depths = len(parts[0].match)
    walks = [walk(np.asarray(p.match[:, row] & p.live[:, row]), int(p.live[0, row].sum()))
             for p in parts for row in range(p.match.shape[1])]
    tokens = sum(total for total, _ in walks)
    rounds = np.sum([counts for _, counts in walks], axis=0)
    return out | {f"accept_length/{d + 1}": float(tokens / rounds[d]) for d in range(depths)}


def walk(match: np.ndarray, length: int) -> tuple[int, list[int]]:
    """Returns the tokens of one response, and its rounds with chains of 1, 2, ... drafts.

    Args:
      match: bool[J, T], whether the draft of depth j from anchor k is right.
    """
    reach = np.cumprod(match, axis=0).cumsum(0)  # [J, T] drafts accepted by chains of j + 1
    rounds = []
    for accepted in reach:
        at = count = 0
        while at < length:
            at, count = at + 1 + int(accepted[at]), count + 1
        rounds.append(count)
    return length, rounds


def by_depth(name: str, values: np.ndarray) -> dict[str, float]:
    """Returns name/0, name/1, ... for the values of each depth."""
    return {f"{name}/{depth}": float(x) for depth, x in enumerate(np.asarray(values))}


def table(found: dict[str, float]) -> str:
    """Formats the result of `summarize`, one line for each depth."""
    depths = sum(name.startswith("alpha/") for name in found)
    lines = ["held out: depth  alpha  agree  match  accept length of a chain"]
    lines += [f"          {d + 1:5d}  {found[f'alpha/{d}']:.3f}  {found[f'agree/{d}']:.3f}  "
              f"{found[f'match/{d}']:.3f}  {found[f'accept_length/{d + 1}']:.3f}"
              for d in range(depths)]
    return "\n".join(lines)
