"""The small model against a full recompute, and inside rollouts against plain decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Course,
    ask,
    counting,
    make_engine,
    make_task,
    streams,
    tiny_arch,
    tiny_params,
    wandering,
)
from jax.sharding import PartitionSpec

from specrl_jax import prng, sharding
from specrl_jax.config import (
    DRAWN_RULES,
    Config,
    ConfigError,
    DraftConfig,
    MeshConfig,
    ModelSource,
    SpecOptions,
)
from specrl_jax.control.protocol import make_spec
from specrl_jax.draft import registry
from specrl_jax.draft.protocol import RolloutInfo
from specrl_jax.draft.small_lm import small_lm
from specrl_jax.draft.tree import map_nodes
from specrl_jax.model import tiny, transformer, weights
from specrl_jax.rollout.engine import Result
from specrl_jax.structs import DraftTree, Frontier, Path, Sampling, SlotFill, Verdict

V, ROWS, P, PLACES = 24, 3, 10, 48
DEPTH, BRANCH, NODES = 3, 2, 11  # room for all candidates: 2 + 4 + 4 and the root
ACTOR = tiny_arch()
ACTOR_PARAMS = tiny_params(ACTOR)
ARCH = tiny_arch(hidden_size=8, num_heads=2, num_kv_heads=1, num_layers=1, tied=False)
SMALL_PARAMS = tiny_params(ARCH, seed=7)
FULL = make_spec(DEPTH, BRANCH, NODES, 0)
TEMPERATURE = (1.0, 0.0, 1.3)
MESH = sharding.make_mesh(MeshConfig())


def half(parent: Any, draft_prob: Any, depth: Any, origin: Any) -> Any:
    """No node is cut, and those of both children are expanded."""
    return parent * (0.5 - 0.1 * jnp.where(depth > 1, draft_prob, 0))


@functools.cache
def compiled(children: str, branch: int = BRANCH, nodes: int = NODES, drawn: bool = False
             ) -> tuple[Any, Any]:
    """The drafter, compiled, and `propose` as it runs, inside shard_map."""
    drafter = small_lm(ARCH, DEPTH, branch, nodes, children, origin=2, drawn=drawn)
    everywhere = PartitionSpec()
    propose = jax.shard_map(
        lambda *args: drafter.propose(*args, half), in_specs=everywhere, out_specs=everywhere,
        mesh=MESH, axis_names=set(sharding.ROWS), check_vma=False)
    return drafter._replace(**{name: jax.jit(getattr(drafter, name))
                               for name in ("observe", "copy_prompt", "prefill")}), jax.jit(propose)


class Slots:
    """Slots that hold made-up sequences, drawn beforehand."""

    def __init__(self, children: str = "perturbed", seed: int = 0, **sizes: Any) -> None:
        self.drafter, self.compiled = compiled(children, **sizes)
        rng = np.random.default_rng(seed)
        self.said = rng.integers(0, V, (ROWS, PLACES)).astype(np.int32)
        prompts = np.asarray([1, P, 4], np.int32)
        self.state = jax.tree.map(jnp.asarray, self.drafter.init(RolloutInfo(
            prompt=np.zeros((ROWS, P), np.int32), prompt_length=prompts,
            past=np.zeros((ROWS, 0, 9), np.int32), batch=ROWS, group=1, buffer=PLACES - P,
            cache=PLACES)))
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
        self.state = self.drafter.prefill(self.drafter.copy_prompt(self.state, fill), fill,
                                          jnp.asarray(self.said[:, :P]), None)

    @property
    def frontier(self) -> Frontier:
        place = np.arange(ROWS)
        return Frontier(root=jnp.asarray(self.said[place, self.context]), seq=jnp.asarray(place),
                   generated=jnp.asarray(self.context - self.born),
                   context=jnp.asarray(self.context), live=jnp.asarray(self.live))

    def draft(self, spec: Any = FULL) -> DraftTree:
        args = jax.device_put((SMALL_PARAMS, self.state, self.frontier, self.rows, spec),
                              sharding.replicated(MESH))
        tree, self.state = self.compiled(*args)
        return jax.tree.map(np.asarray, tree)

    def commit(self, counts: Any) -> None:
        """What a verification of `counts` tokens a row leaves; the rest of its path is garbage."""
        index = self.context[:, None] + np.arange(DEPTH + 1)[None]
        gone = np.arange(DEPTH + 1)[None] >= np.asarray(counts)[:, None]
        verdict = Verdict(jnp.where(gone, 7, self.said[np.arange(ROWS)[:, None], index + 1]),
                          *(None,) * 6)
        path = Path(kv=None, draw=None, verified=None, taps=None)
        self.state = self.drafter.observe((), self.state, self.frontier, verdict, path)
        self.context = self.context + np.asarray(counts, np.int32)

    def wander(self, rounds: int, seed: int, spec: Any = FULL) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            self.draft(spec)
            self.commit(rng.integers(0, DEPTH + 2, ROWS))


FORWARD = jax.jit(functools.partial(transformer.forward, ARCH))


def recomputed(slots: Slots, tree: DraftTree) -> np.ndarray:
    """Log-probabilities f32[B, N, V] after each node, each path by a full forward."""
    tokens = np.zeros((ROWS, NODES, PLACES + DEPTH), np.int32)
    length = np.zeros((ROWS, NODES), np.int32)
    for b, n in np.ndindex(ROWS, NODES):
        path, at = [], n
        while at:
            path.insert(0, int(tree.tokens[b, at]))
            at = int(tree.parent[b, at])
        whole = [*slots.said[b, : slots.context[b] + 1], *path]
        tokens[b, n, : len(whole)], length[b, n] = whole, len(whole)
    logits = np.asarray(FORWARD(SMALL_PARAMS, tokens.reshape(ROWS * NODES, -1), length.reshape(-1)))
    last = np.take_along_axis(logits, length.reshape(-1, 1, 1) - 1, 1).reshape(ROWS, NODES, V)
    heat = np.where(np.asarray(TEMPERATURE) == 0, 1, TEMPERATURE)[:, None, None]
    return np.asarray(jax.nn.log_softmax(last / heat))


def check_nodes(slots: Slots, tree: DraftTree, rows: Any = range(ROWS)) -> None:
    """Every node is there, and its scores and children are those of a full forward."""
    logq = recomputed(slots, tree)
    for b in rows:
        assert tree.live[b].all() and (tree.origin[b, 1:] == 2).all()
        np.testing.assert_allclose(
            tree.logq[b, 1:], logq[b, tree.parent[b, 1:], tree.tokens[b, 1:]], atol=1e-4)
        for above in range(NODES):
            below = np.flatnonzero(tree.parent[b, 1:] == above) + 1
            if len(below):
                drawn = int(slots.context[b] - slots.born[b]) + int(tree.depth[b, above])
                noise = np.asarray(prng.gumbel(slots.rows.key[b], jnp.int32(drawn), jnp.arange(V)))
                score = logq[b, above] + (0 if TEMPERATURE[b] == 0 else noise)
                found = tree.tokens[b, below[np.argsort(tree.rank[b, below])]]
                np.testing.assert_array_equal(found, np.argsort(-score)[:BRANCH])


def test_nodes_are_what_a_full_forward_of_their_paths_says() -> None:
    slots = Slots()
    check_nodes(slots, slots.draft())  # one prompt has a single token
    slots.wander(4, seed=1)
    slots.live = np.asarray([True, True, False])
    check_nodes(slots, slots.draft(), range(2))
    np.testing.assert_array_equal(slots.state.cache.length[:2], slots.context[:2] + 1)
    slots.live = np.ones(ROWS, bool)
    slots.commit([1, 2, 0])
    check_nodes(slots, slots.draft())


def test_catching_up_late_changes_nothing() -> None:
    slots = Slots(seed=4)
    slots.wander(7, seed=2, spec=make_spec(0, 1, 1, 0))
    assert (np.asarray(slots.state.cache.length) == 0).all()
    check_nodes(slots, slots.draft())


def test_refilled_and_copied_slots_draft_as_fresh_ones() -> None:
    slots = Slots(seed=15)
    slots.wander(3, seed=7)  # the source has run on
    slots.said[2, :P], slots.born[2] = slots.said[1, :P], slots.born[1]
    slots.context = slots.born.copy()
    slots.fill(copy=[-1, 1, 1], source=[0, -1, -1])
    np.testing.assert_array_equal(slots.state.cache.length, [0, slots.born[1], slots.born[1]])
    check_nodes(slots, slots.draft())
    slots.commit([2, 1, 3])
    check_nodes(slots, slots.draft())


def test_garbage_changes_no_bit() -> None:
    clean, dirty = Slots(seed=11), Slots(seed=11)
    for slots in (clean, dirty):
        slots.wander(3, seed=5)
    tree, state = clean.draft(), dirty.state
    place = np.arange(state.tokens.shape[1] - 1)[None]
    beyond = place >= dirty.context[:, None]
    unread = place >= np.asarray(state.cache.length)[:, None]
    dirty.state = state.replace(
        tokens=state.tokens.at[:, 1:].set(jnp.where(beyond, -5, state.tokens[:, 1:])),
        cache=state.cache.replace(kv=[
            (jnp.where(unread[:, None, None], 1e4, k), jnp.where(unread[:, None, :, None], -1e4, v))
            for k, v in state.cache.kv]))
    jax.tree.map(np.testing.assert_array_equal, tree, dirty.draft())


@pytest.mark.slow
def test_top_and_sampled_children() -> None:
    trees = {name: Slots(name).draft() for name in ("perturbed", "top", "sampled")}
    np.testing.assert_array_equal(trees["sampled"].tokens[1], trees["top"].tokens[1])  # greedy
    for one, other in (("sampled", "top"), ("sampled", "perturbed"), ("top", "perturbed")):
        assert (trees[one].tokens[[0, 2]] != trees[other].tokens[[0, 2]]).any()


@pytest.mark.parametrize("branch, nodes", [(1, 2), (BRANCH, 6)])
def test_drawn_tree_carries_its_proposal(branch: int, nodes: int
                                                                     ) -> None:
    """Also of nodes whose children have no room; and stop tokens do not change its shape."""
    slots = Slots(branch=branch, nodes=nodes, drawn=True)
    tree = slots.draft(make_spec(DEPTH, branch, nodes, 0))
    padded = map_nodes(lambda a: np.pad(a, ((0, 0), (0, NODES - nodes))), tree)
    logq = recomputed(slots, padded)[:, :nodes]
    known = (tree.proposal.logq > -np.inf).all(2)
    assert not known[1].any()  # greedy
    for row in (0, 2):
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
    bound = small_lm(ARCH, 1, 1, 2).bind(actor, own)
    assert {a.dtype for a in jax.tree.leaves(bound)} == {jnp.dtype(jnp.bfloat16)}
    assert bound["head"].sharding.is_equivalent_to(place, 2)
    np.testing.assert_array_equal(bound["head"], own["head"].astype(jnp.bfloat16))


# Rollouts.


def pausing(course: Course, branch: int) -> Any:
    """Takes its settings from `course`; those with more than `branch` branches draft off and on."""
    def plan(state: Any, load: Any) -> Any:
        pause = (state.branch > branch) & (load.length.sum() % 3 == 0)
        return state.replace(steps=jnp.where(pause, 0, state.steps))

    return wandering(course)._replace(plan=plan, hold=lambda state, load: 1)


class Bench:
    """Plain decoding, and a small model of the actor's own shape under changing settings."""

    def __init__(self, arch: Any = ACTOR, branch: int = 1, nodes: int = 4) -> None:
        self.task, self.course = make_task(stop=()), Course(nodes, DEPTH)
        self.nodes, self.branch = nodes, branch
        self.plain = make_engine(ACTOR, self.task, batch=5, truncates=True)
        self.plain.compile(ACTOR_PARAMS)
        self.drafting = make_engine(
            ACTOR, self.task, drafter=small_lm(arch, DEPTH, branch, nodes), batch=4, min_batch=2,
            controller=pausing(self.course, branch), truncates=True)
        self.drafting.compile(ACTOR_PARAMS, tiny_params(arch))

    def drafts(self, own: Any, pauses: bool, **mix: Any) -> Result:
        """A rollout that must equal the plain one."""
        asked = ask(self.task, seed=1, **mix)
        self.course.hold = make_spec(DEPTH, self.branch + pauses, self.nodes, 0)
        self.drafting.control = self.course.draw()
        result = self.drafting.run(ACTOR_PARAMS, asked, own, rounds=2)
        assert streams(result) == streams(self.plain.run(ACTOR_PARAMS, asked))
        return result


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


STOP = np.asarray((3,), np.int32)
MIXES = ({}, {"temperature": 0}, {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
         {"temperature": np.linspace(0, 2, 12), "limit": 1 + np.arange(12)})


@pytest.mark.parametrize("temperature", [1.0, 0.0, 1.5])
@pytest.mark.slow
def test_the_actor_itself_drafts_perfectly(bench: Bench, temperature: float) -> None:
    result = bench.drafts(ACTOR_PARAMS, False, temperature=temperature)
    assert (result.sequences.commits[:, : bench.task.response // (DEPTH + 1)] == DEPTH + 1).all()
    assert result.counters["committed"] == (DEPTH + 1) * result.counters["row_rounds"]


@pytest.mark.slow
def test_the_actor_itself_drafts_perfectly_after_pauses(bench: Bench) -> None:
    result = bench.drafts(ACTOR_PARAMS, True)
    tried, _, share, _ = result.calibration
    assert tried.sum() > 50 and (share[tried > 0] == 1).all()
    assert (DEPTH + 1) * result.counters["row_rounds"] > result.counters["committed"] * 1.1


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.slow
def test_speculation_changes_no_token(bench: Bench, mix: dict[str, Any]) -> None:
    other = tiny_params(ACTOR, seed=9)
    near = jax.tree.map(lambda a, b: a + 0.05 * b, ACTOR_PARAMS, other)
    layout = bench.drafting.layout, bench.plain.layout
    for one in layout:
        one.stop = STOP
    try:
        accepted = [bench.drafts(own, pauses, **mix).counters["accepted"]
                    for own in (other, near) for pauses in (True, False)]
    finally:
        for one in layout:
            one.stop = np.asarray((-1,), np.int32)
    assert 0 < accepted[1] < accepted[3]


@pytest.mark.slow
def test_a_sharpened_drafter_says_the_same_tokens(bench: Bench) -> None:
    near = jax.tree.map(lambda a, b: a + 0.05 * b, ACTOR_PARAMS, tiny_params(ACTOR, seed=9))
    sharp = make_engine(
        ACTOR, bench.task, drafter=small_lm(ACTOR, DEPTH, 1, 4, temperature=0.5), batch=4,
        min_batch=2, controller=wandering(bench.course))
    sharp.compile(ACTOR_PARAMS, near)
    asked = ask(bench.task, seed=1, temperature=np.repeat((0.0, 0.6, 1.0, 1.7), 3))
    bench.course.hold = make_spec(DEPTH, 1, 4, 0)
    bench.drafting.control = sharp.control = bench.course.draw()
    results = [engine.run(ACTOR_PARAMS, asked, near) for engine in (bench.drafting, sharp)]
    one, other = (result.counters["accepted"] for result in results)
    assert streams(results[0]) == streams(results[1]) and 0 < one != other > 0


@pytest.mark.slow
def test_new_weights_compile_nothing(bench: Bench) -> None:
    bench.drafts(ACTOR_PARAMS, False)
    again = tiny_params(ACTOR, seed=3)
    assert counting(lambda: bench.drafts(again, True)) == 0


# Configuration.


def config(model: str = "random:tiny", **changes: Any) -> Config:
    return Config(**({"model": ModelSource("random:tiny"), "draft": DraftConfig(model=model),
                      "spec": SpecOptions(drafter="small_lm")} | changes))


def make(config: Config, **actor: Any) -> registry.DrafterSet:
    arch = dataclasses.replace(tiny.TINY, **actor.pop("arch", {}))
    return registry.make(config, arch, (), 2, lambda text: None, **actor)


def test_the_config_makes_one() -> None:
    made = make(config())
    assert made.drafter.names == ("small_lm",) and made.drafter.taps == ()
    assert made.weights[0]["embed"].shape == (512, 64)
    parts = ("small_lm", "history")
    merged = make(config(draft=DraftConfig(model="random:tiny", parts=parts),
                         spec=SpecOptions(drafter="merge")))
    assert merged.drafter.names == parts and merged.weights[0].keys() == made.weights[0].keys()


@pytest.mark.parametrize("drafter", ["small_lm", "eagle"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_holds_the_dtype_of_the_model(drafter: str, dtype: str) -> None:
    made = make(Config(model=ModelSource("random:tiny", dtype=dtype), draft=DraftConfig(
        model="random:tiny"), spec=SpecOptions(drafter=drafter)))
    state = made.drafter.init(RolloutInfo(
        prompt=np.zeros((1, 4), np.int32), prompt_length=np.ones(1, np.int32),
        past=np.zeros((1, 0, 8), np.int32), batch=2, group=2, buffer=8, cache=16))
    real = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.dtype.kind not in "iu"}
    assert real == {jnp.dtype(dtype)}


@pytest.mark.parametrize("mix, ok", [
    ((1.0, 2.0), True), ((0.0, 1000.0), True), ((1.0,), False), ((1.0, 1.0, 1.0), False),
    ((1.0, -1.0), False), ((1.0, float("nan")), False), ((float("inf"), 1.0), False)])
def test_mixtures_are_checked(mix: tuple[float, ...], ok: bool) -> None:
    if ok:
        assert DraftConfig(mix=mix).mix == mix
    else:
        with pytest.raises(ConfigError, match=r"draft.mix = .*: give one number in \[0, 1000\]"):
            DraftConfig(mix=mix)


@pytest.mark.parametrize("drafter", ["small_lm", "eagle"])
def test_the_draft_temperature_reaches_the_drafter(drafter: str) -> None:
    made = make(config(draft=DraftConfig(model="random:tiny", temperature=0.5),
                       spec=SpecOptions(drafter=drafter)))
    assert made.drafter.propose.args[0].temperature == 0.5
    for wrong in (0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"draft.temperature = .*: must lie in"):
            DraftConfig(temperature=wrong)


@pytest.mark.parametrize("rule", DRAWN_RULES)
@pytest.mark.parametrize("section, changes, message", [
    ("spec", {"drafter": "history"}, "spec.drafter = 'history': .* needs a drafter that draws"),
    ("spec", {"drafter": "merge"}, "spec.drafter = 'merge': .* needs a drafter that draws"),
    ("draft", {"children": "top"}, "draft.children = 'top': .* choose perturbed or sampled")])
def test_rules_that_ask_what_was_drawn_refuse_what_is_not(
        rule: str, section: str, changes: dict[str, Any], message: str) -> None:
    works = config(spec=SpecOptions("small_lm", rule))
    assert make(works).drafter.propose.args[0].drawn
    wrong = {section: dataclasses.replace(getattr(works, section), **changes)}
    with pytest.raises(ConfigError, match=message):
        make(dataclasses.replace(works, **wrong))


def test_another_tokenizer_is_refused() -> None:
    other = tiny.byte_tokenizer()
    other.backend.add_special_tokens(["<other>"])
    with pytest.raises(ConfigError) as caught:
        make(config(), tokenizer=other)
    assert str(caught.value) == ("draft.model = 'random:tiny': 1 tokens differ from the actor's, "
                                 "such as ['<other>']; name a model with the actor's tokenizer")


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


@pytest.mark.parametrize("changes,message", [
    ({"model": ""}, "draft.model = '': name"),
    ({"model": "random:large"}, "draft.model = 'random:large': .*random:tiny")])
def test_a_model_must_be_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(config(**changes))
    assert "\n" not in str(caught.value)


def test_a_model_must_reach_far_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = weights.describe_source("random:tiny")
    short = dataclasses.replace(found, arch=dataclasses.replace(tiny.TINY, max_position=80))
    monkeypatch.setattr(weights, "describe_source", lambda *place, **family: short)
    with pytest.raises(ConfigError, match="draft.model = .*80 positions, .* = 88"):
        make(config())


@pytest.mark.parametrize("changes,message", [
    ({"children": "best"}, "draft.children = 'best'"), ({"depth": 0}, "spec.max_depth = 0"),
    ({"nodes": 1}, "spec.max_nodes = 1"), ({"branch": 25}, "spec.max_branch = 25: .*24")])
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_lm(**({"arch": ARCH, "depth": 3, "branch": 2, "nodes": 6} | changes))
