"""Drafts of hand-made corpora."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_slots import check_tree

from specrl_jax.control import acceptance
from specrl_jax.control.protocol import make_spec
from specrl_jax.draft.history import history
from specrl_jax.draft.protocol import Drafter, DraftRequest, RolloutInfo
from specrl_jax.structs import Frontier, Path, Verdict

DEPTH, BRANCH, NODES, T, P = 3, 2, 7, 12, 8


@functools.cache
def compiled(match: int, group: int) -> tuple[Drafter, Any]:
    drafter = history(depth=DEPTH, branch=BRANCH, nodes=NODES, match=match, group=group)
    return drafter, jax.jit(drafter.propose, static_argnums=0)


class Corpus:
    """Rows of one prompt each, or of one group, and what was said."""

    def __init__(self, prompts: list[list[int]], said: list[list[int]], group: int = 1,
                 past: list[list[list[int]]] | None = None, match: int = 4) -> None:
        self.drafter, self.propose = compiled(match, group)
        earlier = np.full((len(prompts), 2, T), -1, np.int32)
        for p, responses in enumerate(past or []):
            for k, response in enumerate(responses):
                earlier[p, k, : len(response)] = response
        tokens = np.zeros((len(prompts), P), np.int32)
        for p, prompt in enumerate(prompts):
            tokens[p, : len(prompt)] = prompt
        begun = np.full((len(said), T), -1, np.int32)
        for q, response in enumerate(said):
            begun[q, : len(response)] = response
        state = self.drafter.init(RolloutInfo(
            prompt=tokens, prompt_length=np.asarray([len(p) for p in prompts], np.int32),
            past=earlier, response=begun, batch=len(said), group=group, buffer=T, cache=64))
        self.state = jax.tree.map(jnp.asarray, state)
        last = [(said[q] or prompts[q // group])[-1] for q in range(len(said))]
        self.frontier = Frontier(
            root=jnp.asarray(last), seq=jnp.arange(len(said)),
            generated=jnp.asarray([len(s) for s in said]), live=jnp.ones(len(said), bool),
            context=jnp.asarray([len(prompts[q // group]) + len(said[q]) - 1
                                 for q in range(len(said))]))

    def tree(self, steps: int = DEPTH, branch: int = BRANCH, frontier: Frontier | None = None
             ) -> Any:
        actual, _ = self.propose((), self.state, DraftRequest(
            frontier or self.frontier, None, make_spec(steps, branch, NODES, 0), believed))
        check_tree(jax.tree.map(np.asarray, actual), frontier or self.frontier, origin=0)
        return actual

    def chains(self, row: int = 0, **asked: Any) -> list[list[int]]:
        """Tokens from below the root to each live leaf."""
        tree = jax.tree.map(lambda a: np.asarray(a)[row], self.tree(**asked))
        live = [n for n in range(1, NODES) if tree.live[n]]
        leaves = [n for n in live if n not in [tree.parent[m] for m in live]]
        out = []
        for n in leaves:
            chain = []
            while n:
                chain.append(int(tree.tokens[n]))
                n = int(tree.parent[n])
            out.append(chain[::-1])
        return out


def believed(parent: Any, draft_prob: Any, depth: Any, origin: Any) -> Any:
    return parent * draft_prob


@pytest.mark.parametrize("prompt, said, options, chains", [
    ([9], [1, 2, 3, 4, 1, 2], {}, [[3, 4, 1]]), ([9], [1, 7, 1, 8, 1, 8, 1], {"match": 1}, [
        [8, 1, 8]]), ([4, 5, 6, 7, 4, 5], [], {}, [[6, 7, 4]]),
    ([4, 5, 6, 7, 3, 4], [5], {}, [[6, 7, 3]]), ([9], [1, 2, 3], {}, []),
    ([9], [5], {"past": [[[3, 5]]]}, [])],  # a token that only ends something
    ids=["itself", "votes", "prompt", "suffix in the prompt", "no match", "end"])
def test_history_finds_what_followed_the_suffix(
        prompt: list[int], said: list[int], options: dict[str, Any], chains: Any) -> None:
    assert Corpus([prompt], [said], **options).chains(branch=1) == chains


def test_history_prefers_the_longest_suffix() -> None:
    said = [1, 2, 5, 8, 7, 2, 6, 8, 1, 2]  # after (1, 2) came 5; after (2) alone, 6
    assert Corpus([[9]], [said]).chains() == [[5, 8, 7], [6, 8, 1]]
    short = Corpus([[9]], [said], match=1).chains(branch=2)  # both are now matches of one token
    assert {chain[0] for chain in short} == {5, 6}


def test_siblings_and_past_are_read_and_other_groups_are_not() -> None:
    corpus = Corpus([[9], [9]], [[1, 2], [1, 2, 3, 4, 5], [1, 2], [6, 6, 6]], group=2)
    assert corpus.chains(0)[0] == [3, 4, 5]
    assert corpus.chains(2) == []  # its sibling never said 2
    corpus = Corpus([[9], [9]], [[1, 2], [1, 2]], past=[[[0, 1, 2, 6, 7]], [[1, 2, 8]]])
    assert corpus.chains(0)[0] == [6, 7] and corpus.chains(1) == [[8]]


def test_estimates_of_siblings_sum_to_one_at_most() -> None:
    corpus = Corpus([[9]], [[1, 2, 5, 1, 2, 6, 1, 2]])  # votes for 5 and for 6 are equal
    often = jnp.full((1, DEPTH, acceptance.BINS), 0.75)
    for branch, each in ((2, 0.5), (1, 0.75)):
        tree, _ = corpus.propose((), corpus.state, DraftRequest(
            corpus.frontier, None, make_spec(DEPTH, branch, NODES, 0),
            functools.partial(acceptance.survive, often)))
        first = np.asarray(tree.live & (tree.depth == 1))
        assert first.sum() == branch
        np.testing.assert_allclose(np.asarray(tree.survival)[first], each)


def test_observed_tokens_are_drafted_from() -> None:
    corpus = Corpus([[9]], [[1, 2]])
    assert corpus.chains() == []
    real = jnp.zeros((1, 4))
    verdict = Verdict(tokens=jnp.asarray([[3, 1, 2, 77]]), logprob=real, raw_logprob=real,
                      top_p_mass=real, path=jnp.zeros((1, 4), jnp.int32), count=jnp.asarray([3]),
                      stopped=jnp.asarray([False]))
    path = Path(kv=[], taps=None, draw=jnp.zeros((1, 1), jnp.int32),
                verified=jnp.ones((1, 1), bool))
    corpus.state = corpus.drafter.observe((), corpus.state, corpus.frontier, verdict, path)
    corpus.frontier = corpus.frontier.replace(generated=jnp.asarray([5]), root=jnp.asarray([2]))
    assert corpus.chains()[0] == [3, 1, 2]
    assert 77 not in np.asarray(corpus.state.current)
