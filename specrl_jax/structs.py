"""Every pytree that crosses a module border.

Shape legend: `B` rows (slots of one data shard), `Q` sequences of one step, `M` samples a prompt,
`N` tree nodes a row (padded), `n` nodes a row of one bucket, `D` tree depth (padded), `W` packed
tokens of one forward, `S` cache slots, `T` response buffer, `P` prompt buffer, `L` layers, `H`
query heads, `G` key-value heads, `E` head dim, `F` model width, `V` vocabulary, `X` stop tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
from flax import struct

T = TypeVar("T")
Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
DrafterParams: TypeAlias = Any  # a drafter's own pytree of parameters
ControlState: TypeAlias = Any  # a controller's own pytree of state


def carrier(kind: Callable[..., T], **fields: Any) -> T:
    """Returns a pytree of class `kind` whose fields are something other than device arrays.

    So are numpy arrays until one `jax.device_put` places them, shapes, and partition specs.
    """
    return kind(**fields)


@struct.dataclass
class SpecConfig:
    """The speculation configuration of one round, traced: the paper's (s, t, n) and a budget.

    `steps` = 0 is off. `nodes` caps one row, `budget` all rows of a data shard, roots included.
    """

    steps: Array  # i32[]
    branch: Array  # i32[]
    nodes: Array  # i32[]
    budget: Array  # i32[]
    mix: Array  # f32[drafters]


@struct.dataclass
class Drawn:
    """What trees' tokens were drawn from, in log-probabilities; -inf: from nothing known."""

    logq: Array  # f32[B, N, Vd] of each node's successors
    vocab: Array  # i32[Vd] token ids, ascending


@struct.dataclass
class DraftTree:
    """Node 0 is the last emitted token, K/V not cached yet. parent[n] < n; siblings differ."""

    tokens: Array  # i32[B, N]
    parent: Array  # i32[B, N]
    depth: Array  # i32[B, N]
    rank: Array  # i32[B, N] place among its siblings
    origin: Array  # i32[B, N] which drafter
    survival: Array  # f32[B, N] estimated probability that the node lies on the accepted path
    logq: Array  # f32[B, N] the drafter's log-probability of the node given its parent; the
    # root's is 0, or not a number where the drafter's scores after some node are not finite
    draft_prob: (
        Array  # f32[B, N] the drafter's own probability that its parent's draw is this token
    )
    gap: Array  # f32[B, N] score lost to the best sibling
    live: Array  # bool[B, N]
    proposal: Drawn | None = None  # for rules that ask what was drawn from


@struct.dataclass
class Path:
    """What one verification leaves for `commit` and the drafter: the walked path, root first.

    Of a plain round, N is 1 and D is 0, here and in Verdict.
    """

    kv: Array  # f[D+1, L, 2, G, E, B] keys and values of each layer
    taps: Any  # f[B, D+1, F] projected by the drafter, or None
    draw: Array  # i32[B, N] the actor's own token at each node
    verified: Array  # bool[B, N]


@struct.dataclass
class Verdict:
    """What one verification decides. `count` is 0 for rows that are done."""

    tokens: Array  # i32[B, D+1]
    logprob: Array  # f32[B, D+1] of the processed, renormalised distribution; 0 at temperature 0
    raw_logprob: Array  # f32[B, D+1] with temperature, without truncation
    kept_mass: Array  # f32[B, D+1] probability that truncation kept
    path: Array  # i32[B, D+1] node indices
    count: Array  # i32[B] tokens to commit after stop and limit truncation
    stopped: Array  # bool[B] a stop token or the limit was reached


@struct.dataclass
class Cache:
    """Committed keys and values; what lies at and beyond `length` is garbage and never read."""

    kv: Any  # (k, v) of each layer, each a list of segments along S: [B, G, E, s], [B, G, s, E]
    length: Array  # i32[B] cached tokens = tokens so far - 1


@struct.dataclass
class Sampling:
    """How each sequence is sampled. All data, nothing static. A round gathers its rows' values."""

    temperature: Array  # f32[Q] 0 is greedy
    top_p: Array  # f32[Q] 1 is off
    top_k: Array  # i32[Q] 0 is off
    limit: Array  # i32[Q] most new tokens
    key: Array  # u32[Q, 2]
    stop: Array  # i32[X] -1 pads; the same for all sequences


@struct.dataclass
class Counters:
    """Sums since the rollout began, over the live rows of one data shard. i32[1] but for two."""

    rounds: Array  # rounds of the compiled loop
    row_rounds: Array  # live rows, summed over rounds
    committed: Array  # tokens committed, after stop and limit truncation
    accepted: Array  # i32[1, drafters] tokens committed beyond one a row and round
    drafted: Array  # i32[1, drafters] draft nodes verified
    packed: Array  # tokens that went through the dense layers, padding included
    slots: Array  # rows of the batch, live or not, summed over rounds
    clamped: Array  # rounds for which the controller planned more than the padding holds
    broken: Array  # live rows whose drafter's scores were not finite, summed over drafts
    draft_rounds: Array  # rounds that drafted
    draft_steps: Array  # depth that was drafted, summed over rounds


@struct.dataclass
class Sequences:
    """All that is known of one step's sequences, at fixed places: nothing moves when slots do."""

    tokens: Array  # i32[Q, T]
    logprob: Array  # f32[Q, T]
    raw_logprob: Array  # f32[Q, T]
    kept_mass: Array  # f32[Q, T]
    commits: Array  # i32[Q, T] tokens of each round that the sequence was live in
    length: Array  # i32[Q]
    rounds: Array  # i32[Q]
    done: Array  # bool[Q]


@struct.dataclass
class RolloutState:
    """One data shard's generation state between launches."""

    cache: Cache
    root: Array  # i32[B] last emitted token: the next tree's root
    seq: Array  # i32[B] which of the Q sequences the slot holds; Q where it is empty
    sampling: Sampling
    sequences: Sequences
    draft: Any  # the drafter's state
    control: ControlState  # while a launch runs, else ()
    expected: Array  # f32[Q] tokens that a sequence is expected to have in the end
    estimate: Array  # f32[drafters, D, bins], see control/acceptance.py
    seen: Any  # Acceptance: outcomes since the rollout began, fields f32[1, drafters, D, bins]
    counters: Counters


@struct.dataclass
class Frontier:
    """Where each row of one data shard stands when a round begins."""

    root: Array  # i32[B] last emitted token
    seq: Array  # i32[B] which sequence the row holds
    generated: Array  # i32[B] response tokens so far
    context: Array  # i32[B] cached tokens = the root's position
    live: Array  # bool[B]


@struct.dataclass
class SlotFill:
    """What a refill does to each slot of one data shard; -1 is nothing."""

    seq: Array  # i32[B] sequence that the slot gets
    source: Array  # i32[B] index of the prefilled prompt to write
    copy: Array  # i32[B] slot whose prompt is copied
    root: Array  # i32[B] last token of the new prompt
    length: Array  # i32[B] tokens of the new prompt but the last


@struct.dataclass
class Load:
    """What a controller may read."""

    live: Array  # bool[B]
    length: Array  # i32[B] committed context
    expected_left: Array  # f32[B] tokens still to come
    room: Array  # i32[B] tokens until its limit
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
    draft_steps: int
    control: Mapping[str, float] = dataclasses.field(default_factory=dict)  # end_chunk's metrics


@struct.dataclass
class Rollout:
    """What rl/ sees of one step, in canonical order (prompt id, occurrence, sample id)."""

    prompt: Any  # i32[Q, P] right-padded
    prompt_length: Any  # i32[Q]
    tokens: Any  # i32[Q, T]
    length: Any  # i32[Q]
    logprob: Any  # f32[Q, T]
    raw_logprob: Any  # f32[Q, T]
    kept_mass: Any  # f32[Q, T]
    prompt_id: Any  # i32[Q]
    occurrence: Any  # i32[Q]
    sample_id: Any  # i32[Q]
    stopped: Any  # bool[Q] ended by a stop token, not by its limit
    commits: Any  # i32[Q, T]
    rounds: Any  # i32[Q]
    policy_version: int = struct.field(pytree_node=False, default=0)
    drafter_version: int = struct.field(pytree_node=False, default=0)
