"""The drafter protocol: a record of pure functions over an opaque state.

To add a drafter, write `propose` and return a `Drafter`; every other function has a default. A
drafter without memory needs nothing else, see `tree.chain`. The order of calls in a rollout:

    bind                       host, when weights are published
    init                       host, when a rollout begins
    copy_prompt, prefill       when slots are filled
    catch_up                   before rounds that draft, once
    propose                    before each drafted round
    observe                    after every round's verification
    select_rows                when the batch shrinks

All but `bind`, `init` and `skip_to` run inside `shard_map` and see one data shard. Parameters are
arguments, because they change while training runs. A wrong or broken drafter costs time and never
changes a token: only `verify/` emits tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

from specrl_jax.structs import (
    Array,
    DrafterParams,
    DrafterState,
    DraftTree,
    Frontier,
    ModelParams,
    Path,
    Sampling,
    SlotFill,
    SpecConfig,
    Verdict,
)


class RolloutInfo(NamedTuple):
    """What a drafter may know when a rollout begins: host arrays over all data shards."""

    prompt: np.ndarray  # i32[Q / M, P] right-padded
    prompt_length: np.ndarray  # i32[Q / M]
    past: np.ndarray  # i32[Q / M, K, T] earlier responses, most recent first; -1 is padding
    response: np.ndarray  # i32[Q, T] what sequences have already; -1 is padding
    batch: int  # slots of all shards
    group: int  # M
    buffer: int  # T
    cache: int  # S
    platform: str = "cpu"  # whose layout caches have: "cpu", "gpu" or "tpu"


class Survive(Protocol):
    def __call__(self, above: Array, draft_prob: Array, depth: Array, origin: Array, /) -> Array:
        """Returns f32[..., K], the estimated probability that each of K siblings is accepted.

        It is calibrated by earlier rounds; the sum over siblings is at most their parent's.

        Args:
          above: f32[..., K or 1] the parents' survival; 1 for a root.
          draft_prob: f32[..., K] the drafter's own estimate, given the parent.
          depth, origin: i32[..., K] as in DraftTree.
        """
        ...


class DraftRequest(struct.PyTreeNode):
    """What a drafter is given in one round."""

    frontier: Frontier
    sampling: Sampling  # of the rows
    spec: SpecConfig
    survive: Survive = struct.field(pytree_node=False)


class Propose(Protocol):
    def __call__(self, params: DrafterParams, state: DrafterState, request: DraftRequest, /
                 ) -> tuple[DraftTree, DrafterState]:
        """Returns one tree per row, and the new state.

        A tree has at most `spec.depth` levels, and `spec.branch` children a node as far as the
        drafter can. It keeps the invariants of DraftTree; `live` is False in rows that are not
        live. `survive` fills `DraftTree.survival`, by which nodes compete for the budget.
        """
        ...


class Prefill(Protocol):
    def __call__(self, state: DrafterState, fill: SlotFill, tokens: Array, features: Array | None, /
                 ) -> DrafterState:
        """Returns the state in which slot b holds prompt `fill.source[b]`, where that is not -1.

        Args:
          tokens: i32[p, P'] prompts, right-padded.
          features: f[F, p, P'] of the prompts, if the drafter has `taps`.
        """
        ...


class Project(Protocol):
    def __call__(self, params: DrafterParams, taps: Array, decode: bool = False) -> Array:
        """Returns features f[F, ...] of the tapped layers' outputs f[taps * F, ...].

        It runs inside the actor's own forward passes; `decode` is as in transformer.project.
        """
        ...


def taps_as_features(params: DrafterParams, taps: Array, decode: bool = False) -> Array:
    return taps


class Drafter(NamedTuple):
    """A drafter. Fields without a default are what every drafter must give."""

    nodes: int
    """N, nodes of a tree, root included."""
    depth: int
    """D, levels below the root."""
    branch: int
    """K, most children of a node."""
    propose: Propose
    """Drafts the trees of one round, see `Propose`."""
    init: Callable[[RolloutInfo], DrafterState] = lambda info: ()
    """Returns the state of a rollout in which no slot is filled, as host arrays. The leading axis
    of each is split over the data shards, so it counts slots, sequences or prompts."""
    prefill: Prefill = lambda state, fill, tokens, features: state
    """Reads new prompts into slots, see `Prefill`."""
    copy_prompt: Callable[[DrafterState, SlotFill], DrafterState] = lambda state, fill: state
    """Returns the state in which slot b holds the prompt of slot `fill.copy[b]`, where that is not
    -1. The source may have generated tokens since; only its prompt is the copy's too."""
    observe: Callable[[DrafterParams, DrafterState, Frontier, Verdict, Path], DrafterState] = (
        lambda params, state, frontier, verdict, path: state)
    """Returns the state after a round, drafted or plain. The first `verdict.count[b]` tokens of row
    b are committed; the rest of `verdict` and `path` is garbage. `frontier` is from before."""
    select_rows: Callable[[DrafterState, Array], DrafterState] = (
        lambda state, rows: jax.tree.map(lambda a: a[rows], state))
    """Returns the state of slots i32[B'] only, in that order. The default indexes the leading axis
    of every array, which is wrong for arrays that do not count slots."""
    needs_catch_up: bool = False
    """Whether `propose` first processes what was committed since the last draft. Its cost is then
    measured, and resuming speculation after plain rounds is charged for it."""
    catch_up: Callable[[DrafterParams, DrafterState, Frontier], DrafterState] = (
        lambda params, state, frontier: state)
    """Returns the state in which `propose` need not process more than one round commits. A drafter
    may leave it to `propose`, whose loop a GPU would ask the host about in each round."""
    skip_to: Callable[[DrafterState, np.ndarray], DrafterState] = lambda state, context: state
    """Returns the state as if i32[B] positions had been processed. Called on the host, to measure
    rounds at a given context; what it makes of the skipped positions does not matter."""
    names: tuple[str, ...] = ("draft",)
    """One name per value of DraftTree.origin, for metrics."""
    bind: Callable[[ModelParams, DrafterParams], DrafterParams] = lambda actor, own: own
    """Joins the drafter's own weights with what it reads of the published actor: the `params` of
    the other functions."""
    taps: tuple[int, ...] = ()
    """Layers of the actor, 0-based, whose outputs the drafter reads."""
    project: Project = taps_as_features
    """Makes features of the taps, see `Project`. By default they are the features."""
