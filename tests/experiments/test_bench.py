"""bench.py: its commands, the arithmetic of benchmarks, and one case of each on a tiny model."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.bench import drafter, hardware, results, roofline, tables, timing, workload
from experiments.bench import learner as learner_bench
from experiments.bench.hardware import Hardware
from experiments.bench.rollout import Setting, run_case
from specrl_jax import sharding
from specrl_jax.config import ConfigError, ControlConfig
from specrl_jax.distill.offline import DrafterTraining
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.architecture import Architecture, initialize
from specrl_jax.model.source import open_actor
from specrl_jax.model.tiny import byte_tokenizer
from specrl_jax.rl import learner
from specrl_jax.rl.batch import Layout, make_batch
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.structs import Rollout

ARCH = Architecture(vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
                    num_kv_heads=2, head_dim=4)
MACHINE = Hardware(1e9, 1e12, {"sum": 1e9}, {"a @ b": 1e12})


def test_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", none)
    for ask in (hardware.machine, hardware.first_device):
        with pytest.raises(SystemExit, match="^error: JAX_PLATFORMS = .*: JAX finds no such dev"):
            ask()


def rollout_of(lengths: list[int], asked: list[int]) -> Rollout:
    """Two sequences a prompt."""
    q, t = len(lengths), max(lengths)
    fields = {f.name: np.zeros(q, np.int32) for f in dataclasses.fields(Rollout)}
    fields |= {name: np.zeros((q, t), np.float32) for name in ("logprob", "raw_logprob",
                                                               "top_p_mass")}
    prompt = np.zeros((q, max(asked)), np.int32)
    return Rollout(**fields | {
        "prompt": prompt, "prompt_length": np.repeat(asked, 2).astype(np.int32),
        "tokens": np.zeros((q, t), np.int32), "commits": np.zeros((q, t), np.int32),
        "length": np.asarray(lengths, np.int32), "policy_version": 0, "drafter_version": 0})


def batch_of(together: int, rows: int = 2):
    rollout = rollout_of([3, 1, 2, 4], [5, 2])
    return make_batch(rollout, np.ones(4, np.float32), 1.0, Layout(rows, together), True)


@pytest.mark.ci
def test_bench_help_lists_every_benchmark_and_each_one_starts(command):
    listed = re.findall(r"^  (\w+) +\S", command("bench.py", "--help").stdout, re.MULTILINE)
    assert {"rollout", "speculation", "controller", "kernels"} < set(listed)
    for name in listed:
        done = command("bench.py", name, "--help")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_bench_unknown_name_is_refused_in_one_line(command):
    done = command("bench.py", "rollouts")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: rollouts: no such benchmark; choose one of rollout,")
    assert done.stderr.count("\n") == 1


def test_ratio_of_pairs_is_taken_pair_by_pair():
    found = timing.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert found == {"min": 1.0, "median": 2.0, "max": 3.0, "values": [2.0, 3.0, 1.0]}
    with pytest.raises(ValueError):
        timing.ratio([1.0], [1.0, 2.0])


def test_alternate_starts_each_repeat_with_the_next_task():
    order = []
    tasks = {name: (lambda name=name: order.append(name) or name) for name in "abc"}
    assert timing.alternate(tasks, 2) == {"a": ["a"] * 2, "b": ["b"] * 2, "c": ["c"] * 2}
    assert "".join(order) == "abcbca"


def test_roofline_parameters_equal_the_models():
    leaves = jax.tree.leaves(initialize(ARCH, 0))
    matrices = sum(a.size for a in leaves if a.ndim > 1)
    assert roofline.layer_matmul_params(ARCH) + roofline.head_params(ARCH) == matrices
    assert roofline.weight_bytes(ARCH, 4) == 4 * sum(a.size for a in leaves)
    untied = dataclasses.replace(ARCH, tied=False)  # its second table is not read by a round
    assert roofline.weight_bytes(untied, 4) == roofline.weight_bytes(ARCH, 4)


def test_context_by_round_counts_live_rows_and_tokens():
    commits = np.asarray([[1, 3, 2, 9], [2, 2, 9, 9]])
    rows, context = roofline.context_by_round(np.asarray([5, 3]), commits, np.asarray([3, 2]))
    assert rows.tolist() == [2, 2, 1]
    assert context.tolist() == [4 + 2, 5 + 4, 8]


def test_rounds_bound_equals_hand_count():
    rows, context = np.asarray([2, 1]), np.asarray([10, 6])
    bound = roofline.rounds_bound(ARCH, MACHINE, rows, context, 1.0, 4)
    moved = 2 * roofline.weight_bytes(ARCH, 4) + 4 * 2 * 2 * 2 * 4 * (10 + 2 + 6 + 1)
    assert bound.kind == "bytes" and bound.seconds == pytest.approx(moved / 1e9)
    slow = dataclasses.replace(MACHINE, peak=1e6)
    flops = 2 * 3 * (roofline.layer_matmul_params(ARCH) + 24 * 16) + 4 * 2 * 4 * 4 * (16 + 3)
    bound = roofline.rounds_bound(ARCH, slow, rows, context, 1.0, 4)
    assert bound.kind == "flops" and bound.seconds == pytest.approx(flops / 1e6)


def test_update_work_equals_hand_count():
    single, _ = batch_of(together=1, rows=3)  # 4 rows in micro-batches of 3: two are padding
    found = roofline.useful_work(single)
    assert (found.tokens, found.scored) == (8 + 6 + 4 + 6, 10)
    assert found.pairs == sum(n * (n + 1) // 2 for n in (8, 6, 4, 6))
    grouped, _ = batch_of(together=2, rows=1)
    found = roofline.useful_work(grouped)
    assert (found.tokens, found.scored) == (5 + 4 + 2 + 6, 10)
    prompts = 15 + 3
    assert found.pairs == prompts + (6 + 7 + 8) + 6 + (3 + 4) + (3 + 4 + 5 + 6)
    products = 2 * (roofline.layer_matmul_params(ARCH) * 17 + 24 * 16 * 10)
    assert found.flops(ARCH) == 3 * (products + 4 * 2 * 4 * 4 * found.pairs)


def test_workload_lengths_follow_their_distribution():
    heavy = workload.make_workload("heavy", 16, 128, byte_tokenizer())
    wanted = np.minimum(256, 16 + np.random.default_rng(0).exponential(60, 16).astype(int))
    assert heavy.limits.tolist() == wanted.tolist() and heavy.longest <= 256
    assert len({tuple(p) for p in heavy.prompts}) == 16
    for most in (8, 48, 384):  # a tail at every length: few rows are cut, most are short
        limits = workload.heavy_limits(64, most)
        assert limits.min() >= 1 and limits.max() <= most
        assert (limits == most).mean() < 0.1 and (limits < most / 2).mean() > 0.7
    uniform = workload.make_workload("uniform", 3, 7, byte_tokenizer())
    assert uniform.tokens == 21 and uniform.prompts == heavy.prompts[:3]


def test_results_earlier_reads_back_or_refuses(tmp_path):
    path = tmp_path / "a.json"
    assert results.earlier(path) == {}
    results.write(path, {"cases": {"uniform-1": {}}})
    assert results.earlier(path) == {"uniform-1": {}}
    with pytest.raises(ConfigError, match="a.json: it was made with another architecture"):
        results.earlier(path, architecture={"eos": (1,)})
    results.write(path, {"cases": {"uniform-1": {}}, "architecture": {"eos": (1,)}})
    assert results.earlier(path, architecture={"eos": (1,)}) == {"uniform-1": {}}
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no result of a benchmark"):
        results.earlier(path)


@pytest.fixture(scope="module")
def setting(tmp_path_factory, small):
    actor = open_actor(small)
    return Setting(
        config=small, source=actor.source, params=actor.params(sharding.make_mesh(small.mesh)),
        drafters=("off", "history"), engines=(), repeats=2, say=lambda text: None,
        probe=hardware.Probes(probe_bytes=4 * 10**6, sizes=(64,)).measure,
        directory=tmp_path_factory.mktemp("peers"), counter=CompilationCounter())


def check_case(found) -> None:
    assert json.loads(json.dumps(found)) == found
    for one in found["contenders"].values():
        assert one["compilations"] == 0 and 0 < one["occupancy"] <= 1
        assert min(one["bandwidth"]["min"], one["peak"]["min"]) > 0
        assert one["bound_round_seconds"]["min"] > 0
        bound = one["bound_round_seconds"]["values"]
        over = np.divide(one["round_seconds"]["values"], bound)
        assert one["over_bound"]["values"] == pytest.approx(over)
        assert len(bound) == 2 and one["over_bound"]["min"] > 1
        assert one["counters"]["committed"] == found["useful_tokens"]
    assert tables.rollout_tables(found)


def test_rollout_case_without_drafter_compiles_nothing(setting):
    plain = dataclasses.replace(setting, drafters=("off",))
    found = run_case(plain, workload.make_workload("uniform", 1, 8, setting.source.tokenizer))
    check_case(found)
    assert found["ratios"] == {} and found["equal_streams"] is None


@pytest.mark.full
@pytest.mark.parametrize("name, policy", [("uniform", "budget"), ("heavy", "fixed")])
def test_rollout_case_with_drafter_generates_equal_tokens(setting, name, policy, tmp_path):
    control = ControlConfig(policy=policy, cost_table=str(tmp_path / "cost.json"))
    setting = dataclasses.replace(
        setting, config=dataclasses.replace(setting.config, control=control))
    found = run_case(setting, workload.make_workload(name, 2, 12, setting.source.tokenizer))
    check_case(found)
    assert found["equal_streams"] == 1.0 and set(found["ratios"]) == {"history/off"}


@pytest.mark.ci
def test_learner_update_is_measured_for_each_packing(setting):
    config = dataclasses.replace(setting.config, rollout=dataclasses.replace(
        setting.config.rollout, max_new_tokens=4))
    rollout = rollout_of([3, 1, 2, 4], [5, 2])
    state = learner.LearnerState(
        jax.tree.map(lambda a: a.copy(), setting.params),
        learner.make_optimizer(config.learner).init(setting.params))
    keeper = learner_bench.Keeper(state)
    trainer = SimpleNamespace(arch=setting.source.arch, mesh=sharding.make_mesh(config.mesh),
                              base=None)
    for packing in ("group", "sequence"):
        one = learner_bench.Update(config, trainer, rollout, keeper, packing)
        found = one.describe([one.run(), one.run()], MACHINE)
        assert found["useful"]["tokens"] < found["padded_tokens"]
        assert found["response_tokens_per_second"]["min"] > 0 and found["temporary_bytes"] > 0


def test_drafter_training_work_equals_hand_count(setting):
    options = DrafterTraining(batch_tokens=70, micro_batch_tokens=32, draft_vocab=64, unroll=2,
                              feature_megabytes=0)
    found = drafter.measure(setting.config, setting.source, setting.params, options, 4, 8, 2,
                            hardware.Probes(4 * 10**6, (64,)))
    # Five sequences are there, and two micro-batches of one, 32 columns wide, are an update.
    assert found["work"]["drafted"] == (16, 14) and found["work"]["scored"] == 16
    arch = EagleArch(setting.source.arch, draft_vocab=64)
    sizes = {name: p.size for name, p in eagle_model.initialize(arch, 0).items()}
    keys = 2 * arch.layer.num_kv_heads * arch.layer.head_dim * 2 * arch.actor.hidden_size
    products = 24 * (sizes["fc"] + keys) - 16 * keys + 30 * (
        sizes["qkv"] + sizes["o"] + sizes["gate_up"] + sizes["down"] + sizes["head"])
    scores = 4 * (2 * (52 + 49)) * arch.layer.num_heads * arch.layer.head_dim
    assert found["cases"]["update"]["flops"] == (
        6 * products + 3 * scores + 2 * 16 * sizes["head"])
