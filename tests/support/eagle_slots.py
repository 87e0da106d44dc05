"""Slots that a drafter follows; a tiny EAGLE drafter, and a full recompute of what it says."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import tiny_arch, tiny_params
from jax.sharding import PartitionSpec

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.control.protocol import make_spec
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.protocol import Drafter, DraftRequest, RolloutInfo
from specrl_jax.prng import gumbel
from specrl_jax.structs import DraftTree, Frontier, Path, Sampling, SlotFill, Verdict

V, F, ROWS, P, SLOTS = 24, 16, 4, 10, 48
DEPTH, BRANCH, NODES = 3, 2, 11  # room for all candidates: 2 + 4 + 4 and the root
ACTOR = tiny_arch()
ARCH = EagleArch(ACTOR, draft_vocab=16, own_head=False, like=dataclasses.replace(
    ACTOR, num_heads=2, num_kv_heads=1, intermediate_size=20))
VOCAB = np.sort(np.random.default_rng(5).permutation(V)[:16]).astype(np.int32)
FULL = make_spec(DEPTH, BRANCH, NODES, 0)
TEMPERATURE = (1.0, 0.6, 0.0, 1.3)
MESH = sharding.make_mesh(MeshConfig())


@functools.cache
def parameters(arch: EagleArch = ARCH) -> dict[str, Any]:
    params = jax.tree.map(lambda a: jnp.asarray(a * (1 if a.ndim == 1 else 8)),
                          eagle_model.initialize(arch, 3))
    return {"weights": params, "vocab": jnp.asarray(VOCAB)}


ACTOR_PARAMS = tiny_params(ACTOR)


def contrary(parent: Any, draft_prob: Any, depth: Any, origin: Any) -> Any:
    """Prefers the less likely below the first level, so that children of both are expanded."""
    return parent * (0.5 - 0.1 * jnp.where(depth > 1, draft_prob, 0))


@functools.cache
def compiled(make: Callable[..., Drafter], own: Callable[[], Any], children: str,
             branch: int = BRANCH, nodes: int = NODES, **more: Any) -> tuple[Drafter, Any, Any]:
    """The drafter, compiled, its bound parameters, and `propose` as it runs, inside shard_map."""
    drafter = make(depth=DEPTH, branch=branch, nodes=nodes, children=children, origin=2, **more)
    everywhere = PartitionSpec()
    propose = jax.shard_map(
        lambda params, state, *round: drafter.propose(
            params, state, DraftRequest(*round, contrary)),
        in_specs=everywhere, out_specs=everywhere, mesh=MESH, axis_names=set(sharding.ROWS),
        check_vma=False)
    bound = drafter.bind(ACTOR_PARAMS, own())
    drafter = drafter._replace(**{name: jax.jit(getattr(drafter, name))
                                  for name in ("observe", "copy_prompt", "prefill")})
    return drafter, bound, jax.jit(propose)


class Slots:
    """Slots that hold made-up sequences: what the actor thinks and says is drawn beforehand."""

    made = functools.partial(eagle, ARCH), parameters

    def __init__(self, children: str = "perturbed", seed: int = 0, **shape: Any) -> None:
        self.drafter, self.params, self.compiled = compiled(*self.made, children, **shape)
        self.temperature = np.asarray(TEMPERATURE) * shape.get("temperature", 1.0)
        rng = np.random.default_rng(seed)
        self.said = rng.integers(0, V, (ROWS, SLOTS)).astype(np.int32)
        self.thought = rng.standard_normal((ROWS, SLOTS, F)).astype(np.float32)
        # The head reads a feature of the token before the last.
        prompts = rng.integers(2, P + 1, ROWS) if self.drafter.taps else np.asarray([1, P, 4, 6])
        prompts = prompts.astype(np.int32)
        state = self.drafter.init(RolloutInfo(
            prompt=np.zeros((ROWS, P), np.int32), prompt_length=prompts,
            past=np.zeros((ROWS, 0, 9), np.int32),
            response=np.full((ROWS, SLOTS - P), -1, np.int32), batch=ROWS, group=1,
            buffer=SLOTS - P, cache=SLOTS))
        self.state = jax.tree.map(jnp.asarray, state)
        self.born = prompts - 1
        self.context = self.born.copy()
        self.live = np.ones(ROWS, bool)
        self.rows = Sampling(
            temperature=jnp.asarray(TEMPERATURE), top_p=jnp.ones(ROWS),
            top_k=jnp.zeros(ROWS, jnp.int32), limit=jnp.full(ROWS, 30), stop=jnp.full(1, -1),
            key=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32))
        self.fill(source=np.arange(ROWS))

    def fill(self, source: Any = (-1,) * ROWS, copy: Any = (-1,) * ROWS) -> None:
        """Prompts of sequences `source` enter, or those of slots are copied."""
        source, copy = np.asarray(source), np.asarray(copy)
        fill = SlotFill(*map(jnp.asarray, (np.maximum(source, copy), source, copy, self.born,
                                       self.born)))
        self.state = self.drafter.copy_prompt(self.state, fill)
        thought = np.moveaxis(self.thought[:, :P], -1, 0)
        self.state = self.drafter.prefill(self.state, fill, jnp.asarray(self.said[:, :P]),
                                          jnp.asarray(thought))

    @property
    def frontier(self) -> Frontier:
        place = np.arange(ROWS)
        return Frontier(root=jnp.asarray(self.said[place, self.context]), seq=jnp.asarray(place),
                   generated=jnp.asarray(self.context - self.born),
                   context=jnp.asarray(self.context), live=jnp.asarray(self.live))

    def draft(self, spec: Any = FULL) -> DraftTree:
        args = jax.device_put((self.params, self.state, self.frontier, self.rows, spec),
                              sharding.replicated(MESH))
        tree, self.state = self.compiled(*args)
        tree = jax.tree.map(np.asarray, tree)
        check_tree(tree, self.frontier)
        return tree

    def commit(self, counts: Any) -> None:
        """What a verification of `counts` tokens a row leaves; the rest of its path is garbage."""
        index = self.context[:, None] + np.arange(DEPTH + 1)[None]
        place = np.arange(ROWS)[:, None]
        gone = np.arange(DEPTH + 1)[None] >= np.asarray(counts)[:, None]
        verdict = Verdict(jnp.where(gone, 7, self.said[place, index + 1]), *(None,) * 6)
        path = Path(kv=None, draw=None, verified=None, taps=jnp.where(
            gone[..., None], 99.0, self.thought[place, index]))
        self.state = self.drafter.observe(self.params, self.state, self.frontier, verdict, path)
        self.context = self.context + np.asarray(counts, np.int32)

    def wander(self, rounds: int, seed: int, spec: Any = FULL) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            if spec is not None:
                self.draft(spec)
            self.commit(rng.integers(0, DEPTH + 2, ROWS))


def check_tree(tree: DraftTree, frontier: Frontier, origin: int = 2) -> None:
    """What every tree must be, whatever is in it."""
    nodes = tree.tokens.shape[1]
    assert (tree.live[:, 0] == np.asarray(frontier.live)).all()
    np.testing.assert_array_equal(tree.tokens[:, 0], frontier.root)
    for b, n in np.argwhere(tree.live[:, 1:]) + [0, 1]:
        above = tree.parent[b, n]
        assert above < n and tree.live[b, above]
        assert tree.depth[b, n] == tree.depth[b, above] + 1
        assert 0 < tree.survival[b, n] <= tree.survival[b, above]
        assert tree.score_gap[b, n] >= 0 and tree.origin[b, n] == origin
        assert tree.tokens[b, n] >= 0 and tree.logq[b, n] <= 0
        twins = [m for m in range(1, nodes) if tree.live[b, m] and tree.parent[b, m] == above]
        assert len({tree.tokens[b, m] for m in twins}) == len(twins)
        assert len({tree.rank[b, m] for m in twins}) == len(twins)


def check_nodes(slots: "Slots", tree: DraftTree, logq: np.ndarray, *, vocab: np.ndarray = VOCAB,
                children: str = "perturbed", rows: Sequence[int] = range(ROWS)) -> None:
    """Every node is there, and its scores and children are those of log-probabilities [B, N, Vd]
    after each node, as a full forward has them."""
    for b in rows:
        assert tree.live[b].all()
        index = np.searchsorted(vocab, tree.tokens[b, 1:])
        np.testing.assert_allclose(tree.logq[b, 1:], logq[b, tree.parent[b, 1:], index], atol=1e-4)
        for above in np.unique(tree.parent[b, 1:]):
            below = np.flatnonzero(tree.parent[b, 1:] == above) + 1
            drawn = int(slots.context[b] - slots.born[b]) + int(tree.depth[b, above])
            noise = np.asarray(gumbel(slots.rows.key[b], jnp.int32(drawn), jnp.asarray(vocab)))
            plain = children == "top" or TEMPERATURE[b] == 0
            if children != "perturbed":
                np.testing.assert_allclose(tree.draft_prob[b, below], np.exp(tree.logq[b, below]),
                                           rtol=1e-5)
            if children == "sampled" and not plain:
                continue
            score = logq[b, above] + (0 if plain else noise)
            best = np.argsort(-score)[:BRANCH]
            actual = tree.tokens[b, below[np.argsort(tree.rank[b, below])]]
            np.testing.assert_array_equal(actual, vocab[best])
            np.testing.assert_allclose(np.sort(tree.score_gap[b, below]),
                                       score[best[0]] - score[best], atol=2e-4)


def path_to(tree: DraftTree, b: int, n: int) -> list[int]:
    out = []
    while n:
        out.insert(0, int(tree.tokens[b, n]))
        n = int(tree.parent[b, n])
    return out


UNROLL = jax.jit(functools.partial(eagle_model.unroll, ARCH, steps=DEPTH))
PROCESSED = jax.jit(lambda weights, head, hidden, heat: jax.nn.log_softmax(
    jnp.moveaxis(eagle_model.logits(ARCH, weights, head, hidden), 0, -1) / heat, -1))


def recomputed(slots: Slots, tree: DraftTree) -> np.ndarray:
    """Log-probabilities f32[B, N, Vd] after each live node, each path by a full forward."""
    nodes = tree.tokens.shape[1]
    width = SLOTS + DEPTH
    tokens = np.zeros((ROWS, nodes, width), np.int32)
    for b, n in np.ndindex(ROWS, nodes):
        whole = [*slots.said[b, : slots.context[b] + 1],
                 *(path_to(tree, b, n) if tree.live[b, n] else [])]
        tokens[b, n, : len(whole)] = whole
    features = np.zeros((ROWS, nodes, width, F), np.float32)
    for b, context in enumerate(slots.context):
        features[b, :, :context] = slots.thought[b, None, :context]
    flat = (ROWS * nodes, width)
    outputs = UNROLL(parameters()["weights"], ACTOR_PARAMS["embed"],
                     np.moveaxis(features.reshape(*flat, F), -1, 0), tokens.reshape(flat),
                     np.full(flat[0], width), np.repeat(slots.context - 1, nodes)[:, None])
    outputs = np.stack(outputs).reshape(DEPTH, F, ROWS, nodes)
    last = np.zeros((F, ROWS, nodes), np.float32)
    for b, n in np.ndindex(ROWS, nodes):
        last[:, b, n] = outputs[min(tree.depth[b, n], DEPTH - 1), :, b, n]
    heat = np.where(slots.temperature == 0, 1, slots.temperature)[:, None, None]
    return np.asarray(PROCESSED(parameters()["weights"], slots.params.head, last, heat))
