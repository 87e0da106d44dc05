"""How often the actor's draw is among a root's children, by how they are chosen and how many."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import RolloutConfig
from specrl_jax.distill import update
from specrl_jax.distill.data import Corpus, make_plans, texts_of
from specrl_jax.distill.programs import Programs
from specrl_jax.distill.update import Lent, Lessons, Texts
from specrl_jax.draft.grow import highest
from specrl_jax.evaluation.statistics import bootstrap
from specrl_jax.model import transformer
from specrl_jax.structs import Array
from specrl_jax.verify.rejection import lossless
from specrl_jax.verify.sampling import process

PLAIN = ("top", "sampled", "rejection")
TOKENS, MICRO_TOKENS = 4096, 2048
AT_ONCE = 64  # anchors
DRAWS = 4  # of the noise, at each anchor
CUTS = {", cut": -jnp.inf, ", cut last": -1e6}  # added to the scores of removed tokens


def kinds(temperatures: Sequence[float], truncated: bool) -> tuple[str, ...]:
    """Names of what `accepted` tells."""
    return (*(f"perturbed {temperature:g}{cut}" for temperature in temperatures
              for cut in (("", *CUTS) if truncated else ("",))), *PLAIN)


def accepted(counts: Sequence[int], temperatures: Sequence[float], log_p: Array, log_q: Array,
             keep: Array | None, key: Array) -> Array:
    """Chance that a child is accepted, f32[kinds, counts], with one draw of the noise.

    `perturbed`, `top` and `sampled` are verified by the match rule: the best of log q / t + G with
    the noise of the actor's own draw, where t is the drafter's temperature over the actor's; the
    best of log q; and the best of log q with noise of their own. `perturbed` ones may be of what
    truncation keeps of q alone ("cut"), or of those before the rest ("cut last"). `rejection` tests
    children drawn without replacement from q one by one (spec/rejection.py).

    Args:
      counts: of children, ascending.
      log_p: f32[Vd] of the actor, over the whole vocabulary; the rest of it is one more token that
        no drafter says.
      log_q: f32[Vd] of the drafter.
      keep: bool[Vd] what truncation keeps of q; None if nothing is truncated.
    """
    p = jnp.exp(log_p)
    p = jnp.append(p, jnp.maximum(1 - p.sum(), 0))
    shared, own = jax.random.gumbel(key, (2, p.shape[0]))
    drawn = (jnp.log(p) + shared).argmax()
    offsets = [0.0]
    if keep is not None:
        offsets += [jnp.where(keep, 0.0, away) for away in CUTS.values()]
    hits = []
    for t in temperatures:
        for offset in offsets:
            best, token = highest(log_q / t + offset + shared[:-1], counts[-1])
            hits.append((token == drawn) & (best > -jnp.inf))
    top = highest(log_q, counts[-1])[1]
    sampled = highest(log_q + own[:-1], counts[-1])[1]

    def test(left: tuple[Array, Array, Array], token: Array) -> tuple[Any, Array]:
        p, q, refused = left
        chance, p, q = lossless(p[None], q[None], token[None])
        refused *= 1 - jnp.minimum(chance[0], 1)
        return (p[0], q[0], refused), 1 - refused

    start = (p, jnp.append(jnp.exp(log_q), 0), jnp.float32(1))
    _, rejection = jax.lax.scan(test, start, sampled)
    found = jnp.stack([*(jnp.cumsum(hit).astype(jnp.float32) for hit in hits),
                       jnp.cumsum(p[top]), jnp.cumsum(p[sampled]), rejection])
    return found[:, np.asarray(counts) - 1]


def of_batch(programs: Programs, counts: Sequence[int], temperatures: Sequence[float],
             rollout: RolloutConfig, params: Any, actor: Any, lent: Lent, texts: Texts,
             lessons: Lessons, key: Array) -> tuple[Array, Array]:
    """`accepted` at the first draft of all anchors of a micro-batch, and which of them are live.

    Returns:
      f32[kinds, counts, b, T], the mean of DRAWS; bool[b, T].
    """
    arch, window = programs.arch, lessons.hidden.shape[2]
    (hidden,) = update.drafts(arch, 1, window, params, lent, texts, lessons)
    log_q = update.log_draft(arch, params, lent, texts.temperature, hidden)
    shape = log_q.shape[1:]
    truncated = is_truncated(rollout)

    def processed(logits: Array, temperature: float) -> Array:
        return process(logits[:, None], jnp.full(1, temperature), jnp.full(1, rollout.top_k),
                       jnp.full(1, rollout.top_p)).logp[0]

    def one(at: tuple[Array, Array, Array]) -> Array:
        hidden, log_q, key = at
        logits = transformer.logits(arch.actor, actor, hidden[:, None])[:, 0]
        log_p = processed(logits, rollout.temperature)[lent.vocab]
        keep = processed(log_q, 1.0) > -jnp.inf if truncated else None
        many = jax.vmap(functools.partial(accepted, counts, temperatures, log_p, log_q, keep))
        return many(jax.random.split(key, DRAWS)).mean(0)

    flat = (lessons.hidden.reshape(len(lessons.hidden), -1).T, log_q.reshape(len(log_q), -1).T,
            jax.random.split(key, shape[0] * shape[1]))
    found = jax.lax.map(one, flat, batch_size=min(AT_ONCE, len(flat[0])))
    live = update.live(texts.length, texts.first, window, 1)[0]
    return jnp.moveaxis(found, 0, -1).reshape(*found.shape[1:], *shape), live


def is_truncated(rollout: RolloutConfig) -> bool:
    """Whether top-k or top-p may remove something."""
    return rollout.top_k > 0 or rollout.top_p < 1


def measure(programs: Programs, counts: Sequence[int], temperatures: Sequence[float],
            rollout: RolloutConfig, actor: Any, own: Any, corpus: Corpus, seed: int
            ) -> dict[str, Any]:
    """Means over the corpus's prompts, their 95 % intervals, and paired differences of kinds.

    Args:
      rollout: temperature, top_k and top_p of the draws.
      own: the drafter's parameters, {"weights", "vocab"}.
    """
    lent = update.lend(programs.arch, actor, jnp.asarray(own["vocab"]))
    run = jax.jit(functools.partial(of_batch, programs, counts, temperatures, rollout))
    by_prompt: dict[int, np.ndarray] = {}
    for number, plan in enumerate(make_plans(corpus, TOKENS, MICRO_TOKENS, 1, seed)):
        texts = programs.rows(texts_of(corpus, plan, rollout.temperature))
        lessons = programs.teach(plan.window, actor, texts)
        for part, rows in enumerate(plan.rows):
            key = jax.random.fold_in(jax.random.key(seed), number * len(plan.rows) + part)
            found, live = (np.asarray(a) for a in run(
                own["weights"], actor, lent,
                *jax.tree.map(lambda a, i=part: a[i], (texts, lessons)), key))
            by_prompt |= {int(row): found[:, :, i, live[i]].mean(-1)
                          for i, row in enumerate(rows) if row >= 0 and live[i].any()}
    values = np.stack([by_prompt[row] for row in sorted(by_prompt)])  # [prompts, kinds, counts]
    return summarize(kinds(temperatures, is_truncated(rollout)), counts, values)


def summarize(names: Sequence[str], counts: Sequence[int], values: np.ndarray) -> dict[str, Any]:
    """Tables of means f64[prompts, kinds, counts], and of the first kind less each other one."""

    def told(one: np.ndarray) -> dict[str, float]:
        low, high = bootstrap(one.tolist())
        return {"mean": float(one.mean()), "low": low, "high": high}

    def line(values: np.ndarray) -> dict[str, dict[str, float]]:
        return {str(count): told(values[:, c]) for c, count in enumerate(counts)}

    return {"prompts": len(values),
            "accepted": {name: line(values[:, i]) for i, name in enumerate(names)},
            "difference": {f"{names[0]} less {name}": line(values[:, 0] - values[:, i])
                           for i, name in enumerate(names) if i}}
