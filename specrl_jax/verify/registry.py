"""The rules of verification besides match, by the names that config.RULES lists."""

import types
from collections.abc import Callable
from typing import NamedTuple

from specrl_jax.structs import Array
from specrl_jax.verify import lossy, rejection
from specrl_jax.verify.rejection import Walk
from specrl_jax.verify.sampling import Processed, process


class Rule(NamedTuple):
    """How a tree is walked, what drafts are taken for, and the target's distribution.

    Drafts are tested as point masses: exact however the drafter chose them and the controller
    pruned them, since the coins are independent of both. With `drawn` they are tested as drawn from
    `DraftTree.proposal`, without replacement among siblings: exact only where nothing that chooses
    what is verified depends on them. Controllers are shown no tokens then, and nodes' survival
    follows from their places.
    """

    walk: Walk
    drawn: bool = False
    process: Callable[[Array, Array, Array | None, Array | None], Processed] = process


RULES = types.MappingProxyType({
    "rejection": Rule(rejection.walk),
    "rejection_drawn": Rule(rejection.walk, drawn=True),
    "lossy_lenient": Rule(lossy.lossy_lenient),
    "lossy_typical": Rule(lossy.lossy_typical),
    "lossy_greedy": Rule(lossy.lossy_greedy),
    "lossy_accept_all": Rule(lossy.lossy_accept_all),
    "lossy_default_sampling": Rule(rejection.walk, process=lossy.default_sampling),
    "lossy_shared_noise": Rule(lossy.lossy_shared_noise, drawn=True),
    "lossy_retrospective": Rule(lossy.lossy_retrospective, drawn=True),
})
