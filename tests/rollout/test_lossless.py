"""Speculation changes no token; log-probabilities, counters and compilations are what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import ProcessedDistribution
from helpers import (
    Dice,
    Task,
    ask,
    assert_same,
    counting,
    make_engine,
    micro_config,
    random_drafter,
    roll_out,
    said,
    stepping_to_compile,
    streams,
)

from specrl_jax.config import ConfigError
from specrl_jax.control import fixed, protocol
from specrl_jax.model.transformer import forward
from specrl_jax.rollout.engine import Result

ALL_NODES = protocol.make_spec(3, 6, 6, 0)
WILD, MIXED, PERFECT = 0.0, 0.6, 1.0
MIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "greedy": {"temperature": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "both, hot": {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
    "short": {"limit": 4},
    "every row its own": {
        "temperature": np.linspace(0, 2, 12), "top_p": np.linspace(0.3, 1, 12),
        "top_k": np.arange(12), "limit": 1 + np.arange(12)},
}


@pytest.mark.parametrize("hit", [WILD, MIXED, PERFECT])
@pytest.mark.parametrize("mix", MIXES)
def test_random_trees_change_no_token(bench: Any, mix: str, hit: float) -> None:
    plain = bench.run_plain(seed=1, **MIXES[mix])
    bench.dice.replay, bench.dice.hit = plain.sequences.tokens, hit
    for seed in range(3):
        bench.dice.seed, bench.dice.chain = seed, 0.9 if hit == PERFECT else 0.4
        assert_same(plain, bench.run_trees(rounds=1 + seed, seed=1, **MIXES[mix]))


@pytest.mark.parametrize("asked", [np.arange(12) < 5, np.arange(12) % 3 == 1])
def test_sequences_that_are_not_asked_for_take_no_slot(bench: Any, asked: np.ndarray) -> None:
    plain = streams(bench.run_plain(seed=1))
    part = bench.run_trees(seed=1, limit=np.where(asked, 12, 0))
    wanted = [tokens if here else [] for tokens, here in zip(plain, asked, strict=True)]
    assert streams(part) == wanted
    assert part.counters["committed"] == sum(map(len, wanted))


def test_the_drafters_do_what_their_names_say(bench: Any) -> None:
    plain = bench.run_plain(seed=2)
    bench.dice.replay = plain.sequences.tokens
    lengths = {}
    for hit in (WILD, MIXED, PERFECT):
        bench.dice.hit, bench.dice.chain = hit, 1.0
        counters = bench.run_trees(hold=ALL_NODES, seed=2).counters
        lengths[hit] = counters["committed"] / counters["row_rounds"]
    assert 1 <= lengths[WILD] < 1.2 < lengths[MIXED] < lengths[PERFECT]


@pytest.mark.parametrize(("planned", "out"), [
    ((3, 6, 6, 0), False), ((0, 1, 1, 0), False), ((99, 6, 6, 0), True), ((-1, 1, 1, 0), True),
    ((3, 0, 6, 0), True), ((3, 99, 6, 0), True), ((3, 6, 0, 0), True), ((3, 6, 99, 0), True),
    ((3, 6, 6, 1), True),
])
def test_plan_beyond_the_shapes_is_clamped_and_counted(
        bench: Any, planned: tuple[int, ...], out: bool) -> None:
    result = bench.run_trees(hold=protocol.make_spec(*planned), seed=2)
    assert streams(result) == streams(bench.run_plain(seed=2))
    most = result.counters["rounds"]
    assert (result.counters["clamped"] > most / 2) if out else result.counters["clamped"] == 0


def test_order_of_the_prompts_changes_no_token(bench: Any) -> None:
    order = np.random.default_rng(0).permutation(len(bench.task.prompts))
    straight = streams(bench.run_plain(seed=3))
    for run in (bench.run_plain, bench.run_trees):
        shuffled = streams(run(seed=3, order=order))
        for place, prompt in enumerate(order):
            for sample in range(bench.task.group):
                assert shuffled[2 * place + sample] == straight[2 * prompt + sample]


@pytest.mark.parametrize("stop", [3, 11, -1])
def test_stop_tokens_end_a_sequence_and_are_its_last(bench: Any, stop: int) -> None:
    try:
        for engine in (bench.plain, bench.trees):
            engine.layout.stop = np.asarray([stop], np.int32)
        plain = bench.run_plain(seed=4)
        bench.dice.replay, bench.dice.hit = plain.sequences.tokens, 0.8
        trees = bench.run_trees(seed=4)
    finally:
        for engine in (bench.plain, bench.trees):
            engine.layout.stop = np.asarray(bench.task.stop, np.int32)
    assert_same(plain, trees)
    full = [s for s in streams(trees) if len(s) == bench.task.response]
    for stream in streams(trees):
        assert stop not in stream[:-1]
        assert stream[-1] == stop or stream in full
    assert (len(full) < bench.task.sequences) == (stop >= 0)


@pytest.mark.parametrize("mix", ["plain", "cold", "greedy", "top-k", "top-p", "both, hot"])
def test_logprobs_equal_a_teacher_forced_recompute(bench: Any, mix: str) -> None:
    asked = ask(bench.task, **MIXES[mix])
    bench.dice.replay = bench.run_plain(seed=5, **MIXES[mix]).sequences.tokens
    bench.dice.hit = 0.7
    for run in (bench.run_plain, bench.run_trees):
        result = run(seed=5, **MIXES[mix])
        scores = teacher_forced(bench, result)
        checked = ties = 0
        for q, tokens in enumerate(streams(result)):
            for t, token in enumerate(tokens):
                want = ProcessedDistribution(scores[q, t], asked.temperature[q], asked.top_k[q],
                                    asked.top_p[q])
                if want.boundary < 1e-4:
                    ties += 1
                    continue
                s = result.sequences
                got = s.logprob[q, t], s.raw_logprob[q, t], s.top_p_mass[q, t]
                np.testing.assert_allclose(
                    got, [want.logprob[token], want.raw[token], want.kept], rtol=0, atol=1e-4)
                checked += 1
        assert checked > 100 and ties < checked / 20


def teacher_forced(bench: Any, result: Result) -> np.ndarray:
    """Logits f32[Q, T, V] at every response position."""
    task, s = bench.task, result.sequences
    width = task.prompt + task.response
    tokens, length = np.zeros((task.sequences, width), np.int32), np.zeros(task.sequences, np.int32)
    prompts = [p for p in task.prompts for _ in range(task.group)]
    for q, prompt in enumerate(prompts):
        whole = [*prompt, *s.tokens[q, : s.length[q]]]
        tokens[q, : len(whole)], length[q] = whole, len(whole)
    logits = np.asarray(FORWARD(bench.arch, bench.params, tokens, length))
    return np.stack([logits[q, len(p) - 1 :][: task.response] for q, p in enumerate(prompts)])


FORWARD = jax.jit(forward, static_argnums=0)


@pytest.mark.parametrize("name", ["plain", "trees"])
def test_garbage_beyond_length_and_in_dead_slots_changes_no_bit(
        bench: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = getattr(bench, name)
    cache = engine.begin(ask(bench.task)).cache.kv
    bench.dice.replay, bench.dice.hit = bench.run_plain(seed=6).sequences.tokens, 0.7
    bench.course.hold = protocol.make_spec(3, 6, 6, 10)
    results = []
    for fill in (0.0, 1e4, -7.0):
        monkeypatch.setattr(engine, "_blank_kv", lambda fill=fill: jax.tree.map(
            lambda a: jnp.full(a.shape, fill, a.dtype, device=a.sharding), cache))
        results.append(roll_out(engine, bench.params, ask(bench.task, seed=6)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0].sequences, other.sequences)


@pytest.mark.parametrize("hit", [None, WILD, MIXED])
def test_counters_equal_a_recount_from_the_commits(bench: Any, hit: float | None) -> None:
    if hit is None:
        result = bench.run_plain(seed=7)
    else:
        bench.dice.hit, bench.dice.replay = hit, bench.run_plain(seed=7).sequences.tokens
        result = bench.run_trees(seed=7)
    s, counters = result.sequences, result.counters
    for q in range(bench.task.sequences):
        live, rest = s.commits[q, : s.rounds[q]], s.commits[q, s.rounds[q] :]
        assert (live >= 1).all() and (rest == 0).all() and live.sum() == s.length[q]
    assert s.done.all()
    assert counters["committed"] == s.length.sum()
    assert counters["row_rounds"] == s.rounds.sum()
    assert counters["accepted"] == np.maximum(s.commits - 1, 0).sum()
    assert counters["accepted"] <= counters["drafted"]
    assert counters["packed"] >= counters["drafted"] + counters["row_rounds"]
    assert s.rounds.max() <= counters["rounds"] <= counters["row_rounds"] <= counters["slots"]
    rounds = np.asarray([launch.rounds for launch in result.trace])
    assert counters["slots"] == rounds @ [launch.batch for launch in result.trace]
    assert sum(launch.committed for launch in result.trace) == counters["committed"]
    if hit is None:
        assert counters["accepted"] == counters["drafted"] == 0
        assert counters["committed"] == counters["row_rounds"]  # accept length is 1.0
        assert (s.commits[said(result)] == 1).all()


def test_interleaved_generations_give_what_each_gives_alone() -> None:
    """Each state differs from the first in one of policy, drafter, plan and acceptance."""
    trainer = stepping_to_compile(micro_config(spec__drafter="eagle", rollout__temperature=0.3))
    start, sampler, blank = trainer.state, trainer.sampler, trainer.state.speculation
    batch = trainer.prompts.batch(np.arange(8))

    def scaled(params: Any, by: float) -> Any:
        return jax.tree.map(lambda a: a * np.asarray(by, a.dtype), params)

    policy, drafter = start.policy, start.drafter.published
    tried = np.full_like(blank.acceptance.tried, 500)
    doubted = blank.replace(acceptance=blank.acceptance.replace(tried=tried, hit=0.01 * tried))
    states = {
        "first": (policy, drafter, blank),
        "policy": (sampler.publish(scaled(policy.params, 1.5), 1), drafter, blank),
        "drafter": (policy, sampler.publish_drafter(policy, scaled(drafter.weights, -1), 1), blank),
        "shallow": (policy, drafter, blank.replace(control=protocol.make_spec(1, 1, 2, 0))),
        "doubted": (policy, drafter, doubted)}

    def generate(*order: str) -> dict[str, Any]:
        now = {name: speculation for name, (_, _, speculation) in states.items()}
        outcomes: dict[str, Any] = {name: [] for name in order}
        for name in order:
            rollout, now[name], result = sampler.generate(
                batch, *states[name][:2], now[name], "train", len(outcomes[name]))
            outcomes[name].append((rollout, now[name], result.counters))
        return outcomes

    mixed = generate(*states, *states)
    alone = {name: generate(name, name)[name] for name in states}
    jax.tree.map(np.testing.assert_array_equal, mixed, alone)
    (rollout, learned, counters), _ = mixed.pop("first")
    assert counters["drafted"] > 0 and learned.acceptance.tried.any() and not (
        blank.acceptance.tried.any())
    for name, ((other, _, others), _) in mixed.items():
        assert others != counters, name
        assert np.array_equal(other.tokens, rollout.tokens) == (name != "policy"), name


def test_refill_and_compaction_take_place(bench: Any) -> None:
    limits = 1 + np.arange(bench.task.sequences)  # so rows end one after the other
    batches = [launch.batch for launch in bench.run_trees(seed=8, limit=limits).trace]
    assert bench.task.sequences > bench.plain.shapes.batch
    assert set(batches) == {4, 2} and batches == sorted(batches, reverse=True)


def test_nothing_compiles_whatever_changes(bench: Any) -> None:
    rng = np.random.default_rng(0)
    bench.run_plain(seed=9)
    bench.run_trees(seed=9)

    def everything_changes() -> None:
        for trial in range(3):
            prompts = [rng.integers(0, 24, n).tolist() for n in rng.integers(1, 11, 6)]
            task = Task(prompts)
            bench.dice.hit, bench.dice.seed = float(rng.random()), int(rng.integers(99))
            bench.course.hold = protocol.make_spec(trial, 1, 1 + trial, 3 * trial)
            for engine in (bench.plain, bench.trees):
                sampled = dict(temperature=rng.uniform(0, 2, 12), top_p=rng.uniform(0.1, 1, 12),
                               top_k=rng.integers(0, 24, 12), limit=rng.integers(1, 13, 12))
                roll_out(engine, bench.params, ask(task, seed=trial, **sampled),
                         rounds=int(rng.integers(1, 9)))

    assert counting(everything_changes) == 0


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.7}], ids=str)
def test_truncation_that_was_not_compiled_is_refused(bench: Any, sampling: dict[str, Any]) -> None:
    engine = make_engine(bench.arch, bench.task)
    with pytest.raises(ConfigError, match="truncates = False: sequences ask for top_k or top_p"):
        roll_out(engine, bench.params, ask(bench.task, **sampling))


@pytest.mark.ci
@pytest.mark.parametrize("decoder", [
    {"implementation": "xla"}, {"implementation": "reference"}, {"max_packed": 7}], ids=str)
def test_no_way_to_verify_changes_a_token(bench: Any, decoder: dict[str, Any]) -> None:
    plain = bench.run_plain(seed=10)
    dice = Dice(plain.sequences.tokens, 0.7)
    control = fixed.fixed(0)._replace(init=lambda costs: protocol.make_spec(3, 4, 4, 0))
    engine = make_engine(
        bench.arch, bench.task, batch=3, controller=control, **decoder,
        drafter=random_drafter(dice, nodes=4, depth=3, vocab=bench.arch.vocab_size))
    engine.compile(bench.params)
    assert_same(plain, roll_out(engine, bench.params, ask(bench.task, seed=10)))
