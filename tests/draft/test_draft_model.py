"""The small model against a full recompute, and inside rollouts against plain decoding."""

import dataclasses
import functools
from typing import Any

import eagle_slots
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_slots import (
    ACTOR,
    ACTOR_PARAMS,
    BRANCH,
    DEPTH,
    NODES,
    ROWS,
    SLOTS,
    TEMPERATURE,
    P,
    V,
    check_nodes,
    path_to,
)
from helpers import (
    Course,
    ask,
    make_engine,
    make_task,
    roll_out,
    streams,
    tiny_arch,
    tiny_params,
    wandering,
    with_fields,
)
from jax.sharding import PartitionSpec

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, MeshConfig
from specrl_jax.control.protocol import Plan, make_spec
from specrl_jax.draft import registry
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.draft.tree import map_nodes
from specrl_jax.model import tiny, transformer
from specrl_jax.rollout.engine import Result
from specrl_jax.structs import DraftTree
from specrl_jax.verify.truncation import threshold

ARCH = tiny_arch(hidden_size=8, num_heads=2, num_kv_heads=1, num_layers=1, tied=False)
SMALL_PARAMS = tiny_params(ARCH, seed=7)


class Slots(eagle_slots.Slots):
    made = functools.partial(draft_model, ARCH), lambda: SMALL_PARAMS


FORWARD = jax.jit(functools.partial(transformer.forward, ARCH))


def recomputed(slots: Slots, tree: DraftTree) -> np.ndarray:
    """Log-probabilities f32[B, N, V] after each node, each path by a full forward."""
    tokens = np.zeros((ROWS, NODES, SLOTS + DEPTH), np.int32)
    length = np.zeros((ROWS, NODES), np.int32)
    for b, n in np.ndindex(ROWS, NODES):
        whole = [*slots.said[b, : slots.context[b] + 1], *path_to(tree, b, n)]
        tokens[b, n, : len(whole)], length[b, n] = whole, len(whole)
    logits = np.asarray(FORWARD(SMALL_PARAMS, tokens.reshape(ROWS * NODES, -1), length.reshape(-1)))
    last = np.take_along_axis(logits, length.reshape(-1, 1, 1) - 1, 1).reshape(ROWS, NODES, V)
    heat = np.where(np.asarray(TEMPERATURE) == 0, 1, TEMPERATURE)[:, None, None]
    return np.asarray(jax.nn.log_softmax(last / heat))


def check_draft(slots: Slots, rows: Any = range(ROWS)) -> None:
    tree = slots.draft()
    check_nodes(slots, tree, recomputed(slots, tree), vocab=np.arange(V), rows=rows)


def test_nodes_are_what_a_full_forward_of_their_paths_says() -> None:
    slots = Slots()
    check_draft(slots)  # one prompt has a single token
    slots.wander(4, seed=1)
    slots.live = np.asarray([True, True, False, True])
    check_draft(slots, (0, 1, 3))
    np.testing.assert_array_equal(slots.state.cache.length[:2], slots.context[:2] + 1)
    slots.live = np.ones(ROWS, bool)
    slots.commit([1, 2, 0, 1])
    check_draft(slots)


def test_refilled_and_copied_slots_draft_as_fresh_ones() -> None:
    slots = Slots(seed=15)
    slots.wander(3, seed=7)  # the source has run on
    slots.said[2, :P], slots.born[2] = slots.said[1, :P], slots.born[1]
    slots.context = slots.born.copy()
    slots.fill(copy=[-1, 1, 1, -1], source=[0, -1, -1, 3])
    np.testing.assert_array_equal(slots.state.cache.length, [0, slots.born[1], slots.born[1], 0])
    check_draft(slots)
    slots.commit([2, 1, 3, 0])
    check_draft(slots)


@pytest.mark.parametrize("branch, nodes", [(1, 2), (BRANCH, 6)])
def test_drawn_tree_carries_its_proposal(branch: int, nodes: int) -> None:
    """Also of nodes whose children have no room; and stop tokens do not change its shape."""
    slots = Slots(branch=branch, nodes=nodes, drawn=True)
    tree = slots.draft(make_spec(DEPTH, branch, nodes, 0))
    padded = map_nodes(lambda a: np.pad(a, ((0, 0), (0, NODES - nodes))), tree)
    logq = recomputed(slots, padded)[:, :nodes]
    known = (tree.proposal.logq > -np.inf).all(2)
    assert not known[2].any()  # greedy
    for row in (0, 1, 3):
        above = np.unique(tree.parent[row, 1:])
        assert known[row, above].all()
        np.testing.assert_allclose(tree.proposal.logq[row, known[row]], logq[row, known[row]],
                                   atol=1e-4)
    for name in ("parent", "depth", "rank", "survival", "live"):
        field = getattr(tree, name)
        np.testing.assert_array_equal(field, np.tile(field[:1], (ROWS, 1)), err_msg=name)
    slots.rows = slots.rows.replace(stop=jnp.asarray(tree.tokens[:1, 1]))
    jax.tree.map(np.testing.assert_array_equal, tree,
                 slots.draft(make_spec(DEPTH, branch, nodes, 0)))


def test_binding_leaves_the_actor_alone() -> None:
    mesh = sharding.make_mesh(MeshConfig(tensor=2))
    place = sharding.NamedSharding(mesh, PartitionSpec("tensor"))
    actor = {"embed": jax.device_put(ACTOR_PARAMS["embed"].astype(jnp.bfloat16), place)}
    own = jax.device_put(SMALL_PARAMS, sharding.replicated(mesh))
    bound = draft_model(ARCH, 1, 1, 2).bind(actor, own)
    assert {a.dtype for a in jax.tree.leaves(bound)} == {jnp.dtype(jnp.bfloat16)}
    assert bound["head"].sharding.is_equivalent_to(place, 2)
    np.testing.assert_array_equal(bound["head"], own["head"].astype(jnp.bfloat16))


# Rollouts.


def pausing(course: Course, branch: int) -> Any:
    """Takes its settings from `course`; those with more than `branch` branches draft off and on."""
    def plan(state: Any, load: Any) -> Any:
        pause = (state.branch > branch) & (load.length.sum() % 3 == 0)
        return Plan(state.replace(depth=jnp.where(pause, 0, state.depth)), jnp.int32(1))

    return wandering(course)._replace(plan=plan)


class Bench:
    """Plain decoding, and a small model of the actor's own shape under changing settings."""

    def __init__(self, arch: Any = ACTOR, branch: int = 1, nodes: int = 4) -> None:
        self.task, self.course = make_task(stop=()), Course(nodes, DEPTH)
        self.nodes, self.branch = nodes, branch
        self.plain = make_engine(ACTOR, self.task, batch=5, truncates=True)
        self.plain.compile(ACTOR_PARAMS)
        self.drafting = make_engine(
            ACTOR, self.task, drafter=draft_model(arch, DEPTH, branch, nodes, truncate=threshold),
            batch=4, min_batch=2, controller=pausing(self.course, branch), truncates=True)
        self.drafting.compile(ACTOR_PARAMS, tiny_params(arch))

    def drafts(self, own: Any, pauses: bool, **mix: Any) -> Result:
        """A rollout that must equal the plain one."""
        asked = ask(self.task, seed=1, **mix)
        self.course.hold = make_spec(DEPTH, self.branch + pauses, self.nodes, 0)
        result = roll_out(self.drafting, ACTOR_PARAMS, asked, own, rounds=2)
        assert streams(result) == streams(roll_out(self.plain, ACTOR_PARAMS, asked))
        return result


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 4}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8}], ids=str)
@pytest.mark.ci
def test_actor_as_its_own_drafter_is_always_accepted(
        bench: Bench, sampling: dict[str, float]) -> None:
    result = bench.drafts(ACTOR_PARAMS, False, **sampling)
    assert (result.sequences.commits[:, : bench.task.response // (DEPTH + 1)] == DEPTH + 1).all()
    assert result.counters["committed"] == (DEPTH + 1) * result.counters["row_rounds"]


@pytest.mark.ci
def test_actor_as_its_own_drafter_survives_pauses(bench: Bench) -> None:
    result = bench.drafts(ACTOR_PARAMS, True)
    tried, _, share, _ = result.calibration
    assert tried.sum() > 50 and (share[tried > 0] == 1).all()
    assert (DEPTH + 1) * result.counters["row_rounds"] > result.counters["committed"] * 1.1


# Configuration.


def config(**fields: Any) -> Config:
    return with_fields(Config(), **dict(model__path="random:tiny", draft__model="random:tiny",
                                        spec__drafter="draft_model") | fields)


def make(config: Config, **actor: Any) -> registry.DrafterSet:
    arch = dataclasses.replace(tiny.TINY, **actor.pop("arch", {}))
    return registry.make(config, arch, (), 2, lambda text: None, **actor)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_draft_temperature_reaches_the_drafter(drafter: str) -> None:
    made = make(config(draft__temperature=0.5, spec__drafter=drafter))
    assert made.drafter.propose.args[0].temperature == 0.5


@pytest.mark.parametrize("rows", [480, 512, 600])
def test_embeddings_may_be_padded_otherwise(rows: int) -> None:
    """No token is drafted that only one of the two models has a row for."""
    made, shared = make(config(), arch={"vocab_size": rows}), min(rows, 512)
    assert made.weights[0]["embed"].shape[0] == shared
    network = made.drafter.propose.args[0].network
    assert network.vocab(made.weights[0]).tolist() == list(range(shared))
    hidden = jnp.ones((tiny.TINY.hidden_size, 3))
    assert network.logits(made.weights[0], hidden).shape == (shared, 3)
    last = jnp.full(1, rows - 1)  # what the actor may say, if it is padding
    out = network.run(made.weights[0], last, None, last * 0, lambda index, q, k, v: q)
    assert np.isfinite(out).all()


def other_tokenizer() -> Any:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<other>"])
    return tokenizer


DRAWN = {"spec__rule": "rejection_drawn"}


@pytest.mark.parametrize("fields, actor, words", [
    ({"draft__model": ""}, {}, "draft.model = ''"),
    ({"draft__model": "random:large"}, {}, "draft.model = 'random:large'.*tiny"),
    ({}, {"tokenizer": other_tokenizer()}, "draft.model = 'random:tiny'.*<other>.*tokenizer"),
    (DRAWN | {"spec__drafter": "history"}, {"drawn": True}, "spec.drafter = 'history'.*draws"),
    (DRAWN | {"spec__drafter": "merge"}, {"drawn": True}, "spec.drafter = 'merge'.*draws"),
    (DRAWN | {"draft__children": "top"}, {"drawn": True}, "draft.children = 'top'.*sampled"),
    *(({"draft__temperature": value}, {}, f"draft.temperature = {value}") for value in (
        0, float("inf"), float("nan")))])
def test_model_or_option_that_cannot_draft_is_refused(
        fields: dict[str, Any], actor: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make(config(**fields), **actor)
    assert "\n" not in str(caught.value)
