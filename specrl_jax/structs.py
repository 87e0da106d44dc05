"""Every pytree that crosses a module border, and the type aliases of the package.

Shape legend: `B` rows (slots of one data shard), `Q` sequences of one step, `M` samples of a
prompt, `N` tree nodes of a row (padded), `n` tree nodes of a row in one bucket, `D` tree depth
(padded), `W` packed tokens of one forward pass, `S` cache slots, `T` response buffer, `P` prompt
buffer, `L` layers, `H` query heads, `G` key-value heads, `E` head dimension, `F` model width, `V`
vocabulary, `X` stop tokens, `K` children of a node.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from flax import struct

T = TypeVar("T")
Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
"""A nested dict of arrays."""
ModelParams: TypeAlias = Params
"""The actor's weights, see model/architecture.py."""
DrafterParams: TypeAlias = Any
"""A drafter's own pytree of parameters, after `bind`; only that drafter looks inside."""
DrafterState: TypeAlias = Any
"""A drafter's own pytree of state; only that drafter looks inside."""
Metrics: TypeAlias = dict[str, Any]
"""Values by the names that metrics.jsonl uses."""
AnyArray: TypeAlias = Any
"""A host or a device array."""
PyTree: TypeAlias = Any
"""Nested containers with arrays, shapes, shardings or specs at the leaves."""
Json: TypeAlias = dict[str, Any]
"""An object of a JSON file."""
ControlState: TypeAlias = Any
"""A controller's own pytree of state; only that controller looks inside."""
KVCache: TypeAlias = Any
"""Keys and values of all layers, a pytree with the methods of model.cache.KV."""


def ignore(*args: object) -> None:
    """Does nothing: the default of callbacks."""


def carrier(kind: Callable[..., T], **fields: Any) -> T:
    """Returns a pytree of class `kind` whose fields are something other than device arrays.

    Examples are numpy arrays before `jax.device_put`, shapes and partition specs.
    """
    return kind(**fields)


class SpecConfig(struct.PyTreeNode):
    """The speculation of one round: the paper's (s, t, n) and a budget, all traced."""

    depth: Array  # i32[] draft depth; 0 is plain decoding
    branch: Array  # i32[] children of a node
    nodes: Array  # i32[] most nodes of one row, its root included
    budget: Array  # i32[] most nodes of all rows of a data shard, roots included
    mix: Array  # f32[drafters] factor of each drafter's path probabilities


class Proposal(struct.PyTreeNode):
    """The distributions that a tree's tokens were drawn from."""

    logq: Array  # f32[B, N, Vd] of each node's children; -inf where no child was drawn
    vocab: Array  # i32[Vd] token ids, ascending


class TreeNodes(struct.PyTreeNode):
    """Nodes of draft trees, with the shapes of a DraftTree; drafters also use other shapes."""

    tokens: Array  # i32[B, N]
    parent: Array  # i32[B, N] index of the parent; 0 for the root
    depth: Array  # i32[B, N] edges from the root
    rank: Array  # i32[B, N] position among the siblings, best first
    origin: Array  # i32[B, N] index of the drafter that proposed the node
    survival: Array  # f32[B, N] estimated cumulative acceptance probability of the path
    logq: Array  # f32[B, N] the drafter's log-probability of the node given its parent
    draft_prob: Array  # f32[B, N] the drafter's estimate that the draw at the parent is this token
    score_gap: Array  # f32[B, N] score of the best sibling minus the node's own
    live: Array  # bool[B, N] False for padding and pruned nodes


class DraftTree(TreeNodes):
    """The draft trees of all rows.

    Node 0 is the root: the last emitted token, whose keys and values are not cached yet. Parents
    come before their children, and siblings hold different tokens.
    """

    broken: Array  # bool[B] the drafter computed scores that are not finite
    proposal: Proposal | None = None  # for rules with `needs_proposal`


class Path(struct.PyTreeNode):
    """What one verification leaves for `commit` and the drafter: the accepted path, root first.

    In a plain round N is 1 and D is 0, here and in Verdict.
    """

    kv: Array  # f[D+1, L, 2, G, E, B] keys and values of each layer
    taps: Array | None  # f[B, D+1, F] features of the actor, projected by the drafter
    draw: Array  # i32[B, N] the actor's own token after each node
    verified: Array  # bool[B, N] the nodes that were in the forward pass
    states: Array | None = None  # f[B, D+1, (A+1) * F] as in Records


class Verdict(struct.PyTreeNode):
    """The tokens that one verification emits."""

    tokens: Array  # i32[B, D+1]
    logprob: Array  # f32[B, D+1] after truncation and renormalisation; 0 at temperature 0
    raw_logprob: Array  # f32[B, D+1] at the row's temperature, without truncation
    top_p_mass: Array  # f32[B, D+1] probability that top-k and top-p kept
    path: Array  # i32[B, D+1] the node that each token was drawn after; the last one repeats
    count: Array  # i32[B] tokens to commit, after the stop token and the limit; 0 in finished rows
    stopped: Array  # bool[B] the row has reached a stop token or its limit


class Cache(struct.PyTreeNode):
    """Committed keys and values. Slots from `length` on hold garbage and are never read."""

    kv: KVCache
    length: Array  # i32[B] cached tokens: one less than the tokens of the row


class Sampling(struct.PyTreeNode):
    """The sampling parameters of each sequence, all traced. A round gathers its rows' entries."""

    temperature: Array  # f32[Q] 0 is greedy
    top_p: Array  # f32[Q] 1 is off
    top_k: Array  # i32[Q] 0 is off
    limit: Array  # i32[Q] most new tokens
    key: Array  # u32[Q, 2] noise key
    stop: Array  # i32[X] stop tokens of all sequences; -1 is padding


class Counters(struct.PyTreeNode):
    """Sums over the live rows of one data shard since the rollout began; i32[1] if not stated."""

    rounds: Array  # rounds of the compiled loop
    row_rounds: Array  # live rows, summed over rounds
    committed: Array  # committed tokens, after the stop token and the limit
    accepted: Array  # i32[1, drafters] committed draft tokens
    drafted: Array  # i32[1, drafters] verified draft nodes
    packed: Array  # tokens of all forward passes, padding included
    slots: Array  # rows of the batch, live or not, summed over rounds
    clamped: Array  # rounds for which the controller planned more than the padding holds
    broken: Array  # live rows with DraftTree.broken, summed over drafts
    draft_rounds: Array  # rounds that drafted
    draft_depth: Array  # drafted depth, summed over rounds


class Sequences(struct.PyTreeNode):
    """All sequences of one step, at fixed indices: nothing moves when slots do."""

    tokens: Array  # i32[Q, T]
    logprob: Array  # f32[Q, T] see Verdict
    raw_logprob: Array  # f32[Q, T]
    top_p_mass: Array  # f32[Q, T]
    commits: Array  # i32[Q, T] tokens committed by each round that the sequence was live in
    length: Array  # i32[Q] response tokens so far
    rounds: Array  # i32[Q] rounds that the sequence was live in
    done: Array  # bool[Q]
    said: Array | None = None  # bool[Q, V] tokens of prompt and response, if these are penalized


class Records(struct.PyTreeNode):
    """What verification computed of each sequence, for a drafter that learns from it.

    Positions from a sequence's length on hold garbage.
    """

    states: AnyArray  # f[Q, S', (A+1) * F] the A tapped layers of the actor, as they are, and its
    # final hidden state at each position; the latter is 0 in prompts
    depth: AnyArray  # i32[Q, T'] of the node that each response token was drawn after, where the
    # drafter drafted children of that node; -1 elsewhere


class RolloutState(struct.PyTreeNode):
    """One data shard's generation state between launches."""

    cache: Cache
    root: Array  # i32[B] last emitted token: the next tree's root
    seq: Array  # i32[B] index of the sequence in the slot; Q in an empty slot
    sampling: Sampling
    sequences: Sequences
    draft: DrafterState
    control: ControlState  # () between launches
    expected: Array  # f32[Q] expected final length of each sequence
    estimate: Array  # f32[drafters, D, bins] acceptance estimate, see control/acceptance.py
    seen: PyTree  # control.acceptance.Acceptance of this rollout, fields f32[1, drafters, D, bins]
    counters: Counters
    records: Records | None = None  # where a drafter learns from verification


class Frontier(struct.PyTreeNode):
    """Where each row of one data shard stands when a round begins."""

    root: Array  # i32[B] last emitted token
    seq: Array  # i32[B] index of the row's sequence
    generated: Array  # i32[B] response tokens so far
    context: Array  # i32[B] cached tokens, which is the root's position
    live: Array  # bool[B]


class SlotFill(struct.PyTreeNode):
    """What a refill does to each slot of one data shard; -1 leaves a slot alone."""

    seq: Array  # i32[B] sequence that enters the slot
    source: Array  # i32[B] index of the prefilled prompt to write
    copy: Array  # i32[B] slot whose prompt is copied
    root: Array  # i32[B] last token of the new prompt
    length: Array  # i32[B] tokens of the new prompt except its last


class Load(struct.PyTreeNode):
    """What a controller may read of the rows."""

    live: Array  # bool[B]
    length: Array  # i32[B] committed context
    expected_left: Array  # f32[B] expected tokens until the row ends
    room: Array  # i32[B] tokens until the row's limit
    waiting: Array  # i32[] sequences that have no slot yet


@dataclasses.dataclass
class LaunchRecord:
    """What one launch ran, counted over all shards, and how long it took. See Counters."""

    batch: int  # slots of a shard
    seconds: float
    last: bool  # whether every sequence is done
    rounds: int  # of the compiled loop
    row_rounds: int
    committed: int
    drafted: int
    packed: int
    slots: int
    draft_rounds: int
    draft_depth: int
    control: Mapping[str, float] = dataclasses.field(default_factory=dict)  # end_chunk's metrics


class Rollout(struct.PyTreeNode):
    """Sequences as host arrays, sorted by (birth, prompt id, occurrence, sample id)."""

    prompt: np.ndarray  # i32[Q, P] right-padded
    prompt_length: np.ndarray  # i32[Q]
    tokens: np.ndarray  # i32[Q, T] responses
    length: np.ndarray  # i32[Q] of the responses
    logprob: np.ndarray  # f32[Q, T] see Verdict
    raw_logprob: np.ndarray  # f32[Q, T]
    top_p_mass: np.ndarray  # f32[Q, T]
    prompt_id: np.ndarray  # i32[Q]
    birth: np.ndarray  # i32[Q] step in which the sequence began
    occurrence: np.ndarray  # i32[Q] earlier occurrences of the prompt in that step
    sample_id: np.ndarray  # i32[Q] index within the prompt's group
    stopped: np.ndarray  # bool[Q] ended by a stop token
    commits: np.ndarray  # i32[Q, T] tokens committed by each round
    rounds: np.ndarray  # i32[Q]
    version: np.ndarray  # i32[Q, T] of the policy that drew each token
    records: Records | None = None  # of P + T positions and T tokens


class Scores(NamedTuple):
    """What the reward made of a rollout of Q sequences."""

    samples: list[Json]  # as samples.jsonl holds them, one for each sequence
    rewards: np.ndarray  # f32[Q] weighted sums of the terms
    metrics: Metrics  # means of the terms, and the number of failures
