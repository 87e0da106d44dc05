"""Drafter training: what it learns from, how it is measured, and that it resumes exactly."""

import dataclasses
import gzip
import json
import shutil
import types

import jax
import numpy as np
import pytest
from helpers import with_fields

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import restore_part
from specrl_jax.config import Config, ConfigError, DataConfig
from specrl_jax.data.prompts import PromptBatch, Prompts
from specrl_jax.distill import data as drafter_data
from specrl_jax.distill import offline, teacher
from specrl_jax.distill.data import Corpus
from specrl_jax.distill.metrics import Evaluation, summarize, walk
from specrl_jax.distill.offline import DrafterTraining
from specrl_jax.distill.texts import read_texts
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model.source import open_actor
from specrl_jax.model.tiny import TINY, byte_tokenizer
from specrl_jax.model.weights import describe_source
from specrl_jax.rewards import judge
from specrl_jax.rollout.sampler import Sampler

TOKENIZER = byte_tokenizer()
MICRO = DrafterTraining(
    rollout_prompts=8, samples=2, eval_prompts=2, eval_every=3, draft_vocab=64, steps=6,
    batch_tokens=512, micro_batch_tokens=256, checkpoint_every=2, unroll=2, learning_rate=3e-3)


def micro_config(examples=0):
    return with_fields(
        Config(), model__path="random:tiny", data__examples=examples, rollout__batch_size=8,
        rollout__max_prompt_tokens=96, rollout__max_new_tokens=10, rollout__min_batch=8)


def test_rounds_are_replayed():
    # Drafts of depth 0 are right at anchors 0 and 2, of depth 1 at 0; the response has 5 tokens.
    match = np.array([[1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1]], bool)
    tokens, rounds = walk(match, 5)
    # Depth 1: 0 1 | 2 3 | 4. Depth 2: 0 1 2 | 3 | 4, because the draft at 1 was never made.
    assert (tokens, rounds) == (5, [3, 3])
    assert walk(np.ones((2, 6), bool), 5) == (5, [3, 2])
    assert walk(np.zeros((2, 6), bool), 0) == (0, [0, 0])


def test_means_are_over_live_anchors():
    live = np.array([[[1, 1], [0, 0]], [[1, 0], [0, 0]]], bool)  # one response of 2, and padding
    alpha = np.where(live, [[[0.5, 0.25]], [[0.125, 9]]], 9)
    match = np.ones((2, 2, 2), bool)
    actual = summarize([Evaluation(alpha=alpha, agree=~live, match=match, live=live)] * 2)
    assert (actual["alpha/0"], actual["alpha/1"]) == (0.375, 0.125)
    assert actual["agree/0"] == 0 and actual["match/1"] == 1
    # The last round can say no more than is left, so 2 tokens are one round with any chain.
    assert actual["accept_length/1"] == actual["accept_length/2"] == 2


def corpus(lengths, first=3):
    rng = np.random.default_rng(0)
    count = len(lengths)
    return Corpus([rng.integers(0, 256, n).astype(np.int32) for n in lengths],
                  np.full(count, first, np.int32), np.arange(count, dtype=np.float32),
                  np.zeros(count, np.float32), np.zeros((count, 2), np.uint32))


@pytest.mark.parametrize("shards", [1, 4])
def test_every_sequence_is_in_one_plan_that_fits_it(shards):
    made = corpus(np.random.default_rng(1).integers(5, 300, 400))
    plans = drafter_data.make_plans(made, 2048, 1024, shards, seed=0)
    rows = np.concatenate([p.rows.ravel() for p in plans])
    assert sorted(rows[rows >= 0]) == list(range(400))
    assert len({p.width for p in plans}) == 3 and max(p.width for p in plans) < 300 + 32
    for plan in plans:
        mine = plan.rows[plan.rows >= 0]
        assert made.length[mine].max() <= plan.width
        assert (made.length - made.first)[mine].max() <= plan.window
        assert plan.rows.shape[1] % shards == 0
        assert plan.width * plan.rows.size <= max(2048, plan.width * shards)
    assert len({p.rows.shape + (p.width, p.window) for p in plans}) == 3
    assert sum(p.rows.size * p.width for p in plans) < 1.5 * made.length.sum()
    again = drafter_data.make_plans(made, 2048, 1024, shards, seed=1)
    assert any((a.rows != b.rows).any() for a, b in zip(plans, again, strict=True))


def test_responses_count_more_than_questions_in_the_vocabulary():
    config, actor = micro_config(examples=1), open_actor(micro_config())
    counts = drafter_data.token_counts(config, actor.source, corpus([9], first=8))
    assert counts.sum() > 1000  # the whole split's questions
    said = corpus([9], first=8).tokens[0][8]
    without = drafter_data.token_counts(config, actor.source, corpus([9], first=9))
    assert counts[said] - without[said] == 4 and without[ord("?")] > without[ord("!")] == 0


def test_batch_of_a_plan_is_padded_and_greedy_counts_as_1():
    made = corpus([5, 9, 7])
    plan, = drafter_data.make_plans(made, 128, 64, 1, seed=0)
    texts = drafter_data.batch_of(made, plan, 0.0)
    assert texts.tokens.shape == (2, 2, 32)
    assert sorted(texts.length.ravel()) == [0, 5, 7, 9] and (texts.temperature == 1).all()
    at = tuple(np.argwhere(texts.length == 9)[0])
    np.testing.assert_array_equal(texts.tokens[at][:9], made.tokens[1])
    assert texts.reward[at] == 1 and (texts.tokens[at][9:] == 0).all()
    assert (texts.first >= 1).all()


def test_damaged_rollouts_are_named(tmp_path):
    path = tmp_path / "00000.npz"
    drafter_data.write_part(path, {name: np.arange(3) for name in drafter_data.FIELDS})
    whole = path.read_bytes()
    assert set(drafter_data.read_part(path)) == set(drafter_data.FIELDS)
    for content in (whole[:-30], whole[:100], b"", whole[:99] + bytes(9) + whole[108:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="00000.npz: .*; corrupt file"):
            drafter_data.read_part(path)


def test_files_of_texts(tmp_path):
    lines = [json.dumps({"question": "1 + 1", "answer": "2"}), "", json.dumps({"text": "abc"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    for name in ("a.jsonl", "a.jsonl.gz"):
        read = read_texts(tmp_path / name, TOKENIZER, DataConfig(), 99)
        assert [TOKENIZER.decode(t) for t in read.tokens] == [
            "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>", "abc"]
        assert TOKENIZER.decode(read.tokens[0][read.first[0] :]) == "2<|im_end|>"
        assert read.first[1] == 1 and (read.reward == 1).all() and len(read.responses) == 4
    assert len(read_texts(tmp_path / "a.jsonl", TOKENIZER, DataConfig(), 25).tokens[0]) == 25


CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("row, system, prompt", [
    ({"conversations": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]}, "",
     "<|im_start|>user\n1 + 1<|im_end|>\n"),
    ({"messages": [{"role": "system", "content": "Short."}, *CHAT]}, "Long.",
     "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n"),
    ({"messages": CHAT + CHAT}, "Long.",
     "<|im_start|>system\nLong.<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant"
     "\n2<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n")])
def test_chats_are_learned_from_their_last_message(tmp_path, row, system, prompt):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(row))
    read = read_texts(tmp_path / "a.jsonl", TOKENIZER, DataConfig(system=system), 999)
    tokens, first = read.tokens[0], read.first[0]
    assert TOKENIZER.decode(tokens[:first]) == prompt + "<|im_start|>assistant\n"
    assert TOKENIZER.decode(tokens[first:]) == "2<|im_end|>"


@pytest.mark.parametrize("content, message", [
    ("{", "a.jsonl:2: '{' is not JSON"),
    ("3", "a.jsonl:2: .*an object needs a text, a question and its answer, or m"),
    ('{"text": "a"}', "a.jsonl:2.*no token to learn"),
    (r'{"text": "\ud83d ab"}', "a.jsonl:2: .*holds half a surrogate pair"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "a.jsonl:2.*end with the assistant's"),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', "message .* and a text as its content"),
    ("", "a.jsonl.*holds nothing to learn from"),
])
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text("\n" + content)
    with pytest.raises(ConfigError, match=message):
        read_texts(tmp_path / "a.jsonl", TOKENIZER, DataConfig(), 99)
    with pytest.raises(ConfigError, match="missing.jsonl"):
        read_texts(tmp_path / "missing.jsonl", TOKENIZER, DataConfig(), 99)


def test_scored_corpus_has_the_rewards_of_its_prompts():
    prompts = Prompts([{"id": 7, "answer": "1"}], ["p"], [[5, 6]])
    said = [[*TOKENIZER.encode("1"), TOKENIZER.stop_ids[0], 9], [*TOKENIZER.encode("12"), 9]]
    rolled = {"prompt_length": np.int32([2, 2, 4]), "tokens": np.int32([*said, [0, 0, 0]]),
              "length": np.int32([2, 2, 1]), "prompt_id": np.int32([7, 7, 9]),
              "sample_id": np.int32([0, 1, 0]), "stopped": np.array([True, False, False])}

    def reward(answers):
        return [judge.Judged(float(said == example["answer"]), {}, {})
                for _, said, example in answers]

    made = drafter_data.scored_corpus(rolled, prompts, 0, reward, TOKENIZER)
    assert [t.tolist() for t in made.tokens] == [[5, 6, *said[0][:2]], [5, 6, *said[1][:2]]]
    assert made.reward.tolist() == [1, 0] and made.first.tolist() == [2, 2]
    assert made.advantage == pytest.approx([1, -1], abs=1e-4)
    assert made.key.shape == (2, 2) and (made.key[0] != made.key[1]).any()


def test_held_out_prompts_are_not_trained_on():
    config, lines = micro_config(), []
    asked, held = drafter_data.load_prompts(config, TOKENIZER, 5, "train", 2, lines.append)
    assert len(asked.texts) == 3 and len(held.texts) == 2 and not set(asked.texts) & set(held.texts)
    assert any("2 training prompts are held out" in line for line in lines)
    with pytest.raises(ConfigError, match="eval_split = 'train': holds out every training prompt"):
        drafter_data.load_prompts(config, TOKENIZER, 2, "train", 2, lines.append)


@pytest.mark.parametrize("tap_norm", [True, False])
def test_features_start_near_one_for_any_taps(tap_norm):
    arch, rng = EagleArch(TINY, draft_vocab=16, tap_norm=tap_norm), np.random.default_rng(0)
    own = np.float32([0.5, 40]).repeat(64)  # random:tiny has two layers, and so two taps
    taps = rng.standard_normal((1, 128, 2, 20)).astype(np.float32) * own[:, None, None]
    taps[..., 0] *= 1000  # a first token
    taps[..., 1, 5:] *= 1e6  # padding
    texts = types.SimpleNamespace(length=np.int32([[20, 5]]))
    lessons = types.SimpleNamespace(taps=taps, hidden=np.zeros((1, 64, 2, 1), np.float32))
    scale = offline.tap_scale(texts, lessons)
    assert scale == pytest.approx([0.5, 40], rel=0.1)
    actor = describe_source("random:tiny").params()
    rows = teacher.draft_rows(TINY, actor, np.arange(16))
    head = eagle_model.warm_start(arch, eagle_model.initialize(arch, 0), actor, rows, scale)
    described = eagle_model.describe(arch)
    assert jax.tree.map(np.shape, head) == jax.tree.map(lambda p: p.shape, described,
                                                        is_leaf=lambda p: hasattr(p, "axes"))
    features = np.asarray(eagle_model.project(arch, head, taps[0, :, 0, 1:]))
    assert np.sqrt((features**2).mean()) == pytest.approx(1, abs=0.2)
    highest = taps[0, 64:, 0, 1:] / 40
    assert np.corrcoef(features.ravel(), highest.ravel())[0, 1] > 0.9
    np.testing.assert_array_equal(head["head"], actor["embed"][:16])
    np.testing.assert_array_equal(head["gate_up"], actor["layers"][-1]["gate_up"])


def train(workdir, options=MICRO):
    return offline.train_drafter(micro_config(), options, workdir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("drafter") / "run"
    assert train(workdir)
    return workdir


def losses(workdir):
    return [(m["step"], m["loss"], m["alpha/1"], m.get("eval/alpha/0")) for m in
            read_metrics(workdir)]


@pytest.mark.ci
def test_training_learns_and_writes_a_head(whole):
    told = read_metrics(whole)
    assert [m["step"] for m in told] == list(range(6))
    assert [m["step"] for m in told if "eval/alpha/0" in m] == [2, 5]
    assert told[5]["eval/alpha/0"] > told[2]["eval/alpha/0"] > 0
    assert told[5]["loss"] < told[0]["loss"]
    saved = restore_part(whole / "checkpoints", 6, "drafter")
    assert len(saved["vocab"]) == 64 and TOKENIZER.stop_ids[0] in saved["vocab"]
    arch, own, warnings, made_for = eagle_weights.load(whole / "drafter", TINY, TOKENIZER.stop_ids)
    assert arch.draft_vocab == 64 and not warnings
    assert made_for.tokenizer == TOKENIZER.identity and made_for.actor.startswith("float32 ")
    jax.tree.map(np.testing.assert_array_equal, own, saved)
    assert not train(whole)  # there is nothing left to do


@pytest.mark.ci
def test_stopped_training_ends_as_if_it_had_not_been(whole, tmp_path, monkeypatch):
    step, generate = offline.DrafterTrainer.step, drafter_data.Sampler.generate
    calls = []

    def stopping(trainer):
        if trainer.step_number == 5:
            raise KeyboardInterrupt
        return step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(offline.DrafterTrainer, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    monkeypatch.setattr(drafter_data.Sampler, "generate", lambda *a, **k: calls.append(1) or
                        generate(*a, **k))
    assert train(tmp_path) and not calls  # the rollouts were kept
    assert losses(tmp_path) == losses(whole)
    written = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    same = [restore_part(d / "checkpoints", 6, "drafter") for d in (tmp_path, whole)]
    jax.tree.map(np.testing.assert_array_equal, *same)
    shutil.rmtree(tmp_path / "checkpoints" / "6")  # of a run whose head is written already
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"old")
    assert train(tmp_path) and losses(tmp_path) == losses(whole)
    assert all((d / "drafter" / "model.safetensors").read_bytes() == written for d in (
        tmp_path, whole))


def test_other_texts_under_the_same_name_are_refused(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    texts, run = tmp_path / "texts.jsonl", tmp_path / "run"
    options = dataclasses.replace(MICRO, texts=str(texts), rollout_prompts=0)
    monkeypatch.setattr(drafter_data, "gather", stop)  # what comes after the check takes long
    texts.write_text('{"text": "one and one is two"}')
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(run, options)
    texts.write_text('{"text": "one and one is ten"}')
    with pytest.raises(ConfigError, match="the --texts examples are not those that the run in"):
        train(run, options)


@pytest.mark.ci
def test_features_that_are_not_kept_are_the_same(whole, tmp_path):
    assert train(tmp_path, dataclasses.replace(MICRO, feature_megabytes=0))
    assert losses(tmp_path) == losses(whole)


@pytest.mark.ci
def test_rollout_with_head_takes_the_replayed_rounds(whole):
    config = with_fields(
        micro_config(), draft__path=str(whole / "drafter"), control__policy="fixed",
        control__min_survival=0.0, spec__drafter="eagle", spec__depth=2, spec__nodes=3,
        spec__max_depth=2, spec__max_branch=1, spec__max_nodes=3)
    _, held = drafter_data.load_prompts(config, TOKENIZER, 0, "test", 2, print)
    sampler = Sampler(config, TINY, TOKENIZER.stop_ids, sharding.make_mesh(config.mesh), prompts=2,
                      group=2)
    state = sampler.initial_state(describe_source("random:tiny").params())
    ids = np.asarray([held.examples[i]["id"] for i in range(2)])
    *_, result = sampler.generate(PromptBatch(held.tokens, ids, ids * 0), *state, "train")
    taken = result.counters["committed"] / result.counters["row_rounds"]
    replayed = read_metrics(whole)[-1]["eval/accept_length/2"]
    assert taken == pytest.approx(replayed) and taken > 1.05


@pytest.mark.ci
def test_command_trains_and_refuses_other_options(command, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "What is 1 + 1? It is 2."}))
    flags = [f"--{f.name}={getattr(MICRO, f.name)}" for f in dataclasses.fields(MICRO)
             if f.name not in ("texts", "rollout_prompts", "own_head")]
    done = command("train_drafter.py", "--config=tiny", f"--workdir={tmp_path / 'run'}", *flags,
                   "--rollout_prompts=0", f"--texts={tmp_path / 'texts.jsonl'}")
    assert done.returncode == 0, done.stderr
    assert "held out: depth  alpha" in done.stderr and "step 6/6" in done.stderr
    assert f"the drafter is in {tmp_path / 'run' / 'drafter'}" in done.stdout
    done = command("train_drafter.py", "--config=tiny", f"--workdir={tmp_path / 'run'}",
                   "--steps=7")
    assert done.returncode == 2 and "was started with" in done.stderr
