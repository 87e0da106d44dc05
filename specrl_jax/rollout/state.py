"""What a rollout reads and returns besides its programs: weights, and what speculation has learned.

All of it is a value. A caller passes its own, keeps what comes back or drops it, and may share
leaves between values: a rollout never donates them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from flax import struct

from specrl_jax.control.acceptance import Acceptance
from specrl_jax.draft.response_cache import ResponseCache, blank
from specrl_jax.structs import ControlState, DrafterParams, Params


class PublishedPolicy(struct.PyTreeNode):
    """The policy's weights as rollouts read them: cast and sharded for decoding."""

    params: Params
    version: int = struct.field(pytree_node=False, default=0)


class PublishedDrafter(struct.PyTreeNode):
    """The drafter's weights as rollouts read them.

    `weights` are those of each part, `params` the same bound to the published policy (see
    `DrafterSet.bind`). Nothing is drafted while `enabled` is False.
    """

    weights: tuple[DrafterParams, ...]
    params: DrafterParams
    version: int = struct.field(pytree_node=False, default=0)
    enabled: bool = struct.field(pytree_node=False, default=True)


class Speculation(struct.PyTreeNode):
    """What speculation has learned: it changes which tokens are drafted, never which are sampled.

    `control` is the controller's state, which measured costs replace while it is `fresh`.
    `acceptance` counts the outcomes of earlier rollouts, `plain_round_seconds` is the measured time
    of a plain round by batch size ({} if unknown), and `responses` holds earlier responses by
    prompt, which the caller reads and extends.
    """

    control: ControlState
    acceptance: Acceptance
    plain_round_seconds: Mapping[int, float] = struct.field(default_factory=dict)
    responses: ResponseCache = struct.field(default_factory=lambda: blank(0, 0))
    fresh: bool = struct.field(pytree_node=False, default=True)


class RolloutInputs(NamedTuple):
    """What a rollout reads: `sampler.generate(batch, *inputs)`."""

    policy: PublishedPolicy
    drafter: PublishedDrafter
    speculation: Speculation
