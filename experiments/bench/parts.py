"""The controller's own parts of a round, jitted apart, for bench_plan.py alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import MeshConfig
from specrl_jax.control.protocol import Bucket, Outcome
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.round import Decoder, buckets_of
from specrl_jax.structs import DraftTree, Load

from .arms import Arm

Part = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Situation:
    """The state of a rollout in which the parts are timed."""

    rows: int  # B
    context: np.ndarray  # i32[B] cached tokens


def situation(arm: Arm, result: Result) -> Situation:
    """Returns the middle of a rollout."""
    length, rows = result.sequences.length, arm.rows
    context = [len(tokens) - 1 + length[i] // 2 for i, tokens in enumerate(arm.prompts[:rows])]
    return Situation(rows=rows, context=np.asarray(context, np.int32))


def buckets(decoder: Decoder, at: Situation) -> tuple[Bucket, ...]:
    """Returns the buckets of a round; a round with a single one drafts nothing."""
    return buckets_of(decoder, at.rows)


def _bound(function: Callable[..., Any], *args: Any) -> Part:
    """Returns a jitted call; arrays are arguments, so that none is folded into the program."""
    jitted = jax.jit(function)
    args = jax.tree.map(jnp.asarray, args)
    return lambda: jitted(*args)


def control_parts(decoder: Decoder, control: Any, at: Situation) -> dict[str, Part]:
    """Returns `plan` with `hold`, `keep` and `note`, for trees as large as the shapes allow.

    Args:
      control: the state of the controller.
    """
    controller, ladder, drafter = decoder.controller, buckets(decoder, at), decoder.drafter
    tree, ones = random_tree(at.rows, drafter.nodes, drafter.depth), jnp.ones(at.rows)
    load = Load(live=jnp.ones(at.rows, bool), length=jnp.asarray(at.context), expected_left=ones,
                room=jnp.full(at.rows, 99, jnp.int32), weight=ones)
    plan = _alone(lambda *args: (controller.plan(*args), controller.hold(*args)))
    spec = jax.tree.map(np.asarray, plan(control, load)[0])
    keep = _alone(lambda *args: controller.keep(*args, ladder))
    live, bucket = keep(control, load, spec, tree)
    outcome = Outcome(load, spec, tree, live, bucket, jnp.ones(at.rows, jnp.int32),
                      jnp.int32(1))
    return {"plan": _bound(plan, control, load), "keep": _bound(keep, control, load, spec, tree),
            "note": _bound(_alone(controller.note), control, outcome)}


def random_tree(rows: int, nodes: int, depth: int) -> DraftTree:
    """Returns chains one after the other, all live, with random falling survival."""
    rng, node = np.random.default_rng(0), np.arange(nodes)
    level = np.where(node > 0, (node - 1) % max(depth, 1) + 1, 0)
    parent = np.where(level > 1, node - 1, 0)
    share = np.where(level > 0, rng.uniform(0.1, 0.9, (rows, nodes)), 1.0)
    survival = np.ones((rows, nodes))
    for n in node[1:]:
        survival[:, n] = survival[:, parent[n]] * share[:, n]
    ints = [np.broadcast_to(a, (rows, nodes)).astype(np.int32) for a in (node, parent, level)]
    zero, real = np.zeros((rows, nodes), np.int32), survival.astype(np.float32)
    return DraftTree(tokens=ints[0], parent=ints[1], depth=ints[2], rank=zero, origin=zero,
                     survival=real, logq=np.log(real), draft_prob=share.astype(np.float32),
                     gap=0 * real, live=np.ones((rows, nodes), bool))


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs on the only shard of a mesh: controllers sum over the rows of all shards."""
    return jax.shard_map(function, mesh=sharding.make_mesh(MeshConfig()), in_specs=P(),
                         out_specs=P(), check_vma=False)
