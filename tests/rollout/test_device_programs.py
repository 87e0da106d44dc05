"""What a launch asks the host for, and moves between devices, on accelerators that are not there.

Attention has tests of its own and is left out.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Course,
    ask,
    assert_same,
    make_engine,
    make_task,
    roll_out,
    tiny_arch,
    tiny_params,
    wandering,
)
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from specrl_kernels.dispatch import Device

from specrl_jax import sharding
from specrl_jax.config import ControlConfig, MeshConfig, SpecOptions
from specrl_jax.control import budget
from specrl_jax.control.protocol import Limits
from specrl_jax.draft import eagle_model, grow
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.history import history
from specrl_jax.draft.merge import merge
from specrl_jax.model import cache, layers
from specrl_jax.rollout.decode_loop import launch
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.plan import buckets_of
from specrl_jax.rollout.sampler import publisher

ROWS, VOCAB, DRAFT_VOCAB, WIDTH = 4, 1000, 600, 16
ARCH = tiny_arch(num_layers=2, vocab_size=VOCAB)
EAGLE = EagleArch(ARCH, draft_vocab=DRAFT_VOCAB)
TASK = make_task(prompts=4, group=1)
DEPTH, BRANCH, NODES = 3, 2, 6
PLATFORMS = pytest.mark.parametrize("platform", ["gpu", "tpu"])


def engine_of(drafts: bool, truncates: bool = False, dtype: Any = jnp.float32, **changes: Any
              ) -> Engine:
    made = functools.partial(make_engine, ARCH, TASK, batch=ROWS, truncates=truncates, **changes)
    if not drafts:
        return made()
    drafter = eagle(EAGLE, DEPTH, BRANCH, NODES, dtype=dtype)
    buckets = {ROWS: buckets_of(made(drafter=drafter).decoder, ROWS)}
    return made(drafter=drafter, controller=budget.make(
        ControlConfig(), SpecOptions(), Limits(DEPTH, BRANCH, NODES, (1.0,), buckets, 22)))


def traced(engine: Engine, platform: str, dtype: Any = jnp.float32) -> Any:
    """The launch on one device of a platform that is not there."""
    device = AbstractDevice(f"some {platform}", 1, platform)
    mesh = AbstractMesh((1, 1, 1), (*sharding.ROWS, "tensor"), (AxisType.Auto,) * 3,
                        abstract_device=device)
    params, own = tiny_params(ARCH), ()
    if engine.decoder.drafter.taps:
        own = engine.decoder.drafter.bind(params, {
            "weights": eagle_model.initialize(EAGLE, 0), "vocab": jnp.arange(DRAFT_VOCAB)})
    params = layers.arrange(params, layers.are_scanned(platform))
    params, own = jax.tree.map(lambda a: jax.ShapeDtypeStruct(
        a.shape, dtype if a.dtype == jnp.float32 else a.dtype), (params, own))
    state = engine.layout.abstract(ROWS).replace(
        control=jax.tree.map(np.asarray, engine.initial_speculation().control))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    state = state.replace(cache=state.cache.replace(kv=jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, dtype), state.cache.kv)))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (1, 2)]
    mapped = jax.shard_map(
        lambda *args: launch(engine.decoder, *args), mesh=mesh, in_specs=P(), out_specs=P(),
        axis_names=set(sharding.ROWS), check_vma=False)
    return jax.jit(mapped).trace(params, own, state, numbers[0], number, number, numbers[1])


@pytest.fixture
def no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache, grow):
        monkeypatch.setattr(module, "tree_attention", lambda q, *args, **options: q)


def asks(jaxpr: Any) -> list[Any]:
    """What a GPU asks the host for: a list for each loop of unknown length, of what its body asks
    for, and the number of branches of each conditional."""
    actual: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            assert not asks(equation.params["cond_jaxpr"].jaxpr)
            actual.append(asks(equation.params["body_jaxpr"].jaxpr))
        elif equation.primitive.name == "cond":
            assert equation.params.get("branches_platforms") is None, "chosen while lowering"
            branches = equation.params["branches"]
            actual.append(len(branches))
            for branch in branches:
                actual += asks(branch.jaxpr)
        else:
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                actual += asks(getattr(inner, "jaxpr", inner)) if is_jaxpr(inner) else []
    return actual


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@PLATFORMS
@pytest.mark.parametrize("truncates", [False, True])
def test_plain_round_asks_for_one_predicate(
        platform: str, truncates: bool, no_attention: None) -> None:
    launch = traced(engine_of(False, truncates, platform=platform), platform).jaxpr.jaxpr
    assert asks(launch) == [[[]]]


@PLATFORMS
@pytest.mark.parametrize("truncates", [False, True])
def test_drafted_round_asks_for_a_bucket_as_well(
        platform: str, truncates: bool, no_attention: None) -> None:
    """A launch alternates between plain rounds, each plan's in a loop, and drafted ones."""
    engine = engine_of(True, truncates, platform=platform)
    buckets = len(buckets_of(engine.decoder, ROWS))
    plain_rounds, catch_up, drafted_rounds = [[]], [], [buckets]
    assert buckets > 2
    assert asks(traced(engine, platform).jaxpr.jaxpr) == [
        [plain_rounds, catch_up, drafted_rounds]]


@pytest.mark.ci
def test_masked_rounds_draft_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU runs what accelerators do instead of branching; depths and widths change."""
    def rolled_out() -> Result:
        course = Course(NODES, DEPTH, parts=2)
        drafter = merge([eagle(EAGLE, DEPTH, BRANCH, NODES),
                         history(depth=DEPTH, branch=1, nodes=NODES, match=2, group=2, origin=1)],
                        NODES)
        engine = make_engine(ARCH, make_task(prompts=4), batch=ROWS, drafter=drafter,
                             controller=wandering(course))
        params = tiny_params(ARCH)
        own = drafter.bind(params, ({"weights": eagle_model.initialize(EAGLE, 0),
                                     "vocab": jnp.arange(DRAFT_VOCAB)}, ()))
        engine.compile(params, own)
        return roll_out(engine, params, ask(make_task(prompts=4), temperature=0.3), own, rounds=3)

    branched = rolled_out()
    monkeypatch.setattr(sharding, "traced_device", lambda: Device("gpu", "some gpu"))
    masked = rolled_out()
    assert_same(branched, masked)
    assert branched.counters == masked.counters and branched.by_drafter == masked.by_drafter
    assert all(actual["drafted"] for actual in branched.by_drafter.values())


@pytest.mark.ci
@pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")
@pytest.mark.parametrize("drafts", [False, True])
def test_no_logits_travel_between_devices(drafts: bool) -> None:
    mesh = sharding.make_mesh(MeshConfig(1, 1, 2))
    engine = engine_of(drafts, truncates=True, mesh=mesh)
    params, own = publisher(ARCH, mesh, jnp.float32, stacked=False)(tiny_params(ARCH)), ()
    if drafts:
        own = engine.decoder.drafter.bind(params, {
            "weights": eagle_model.initialize(EAGLE, 0), "vocab": jnp.arange(DRAFT_VOCAB)})
    engine.compile(params, own)
    text = engine._programs["launch", ROWS].as_text()
    moved = re.findall(r" = \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective)", text)
    sizes = [[int(d) for d in dims.split(",") if d] for dims in moved]
    assert sizes and not [dims for dims in sizes if {VOCAB, DRAFT_VOCAB} & set(dims)]
    if not drafts:
        assert max(np.prod(dims) for dims in sizes) < WIDTH * ROWS  # nor any weights
