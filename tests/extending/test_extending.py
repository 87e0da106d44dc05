"""The examples of docs/extending.md run, and each has its effect."""

import ast
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import objective
import pytest
import small_batches
from helpers import micro_config, stepping, stepping_to_compile
from seed_oss import SEED_OSS

import specrl_jax
from specrl_jax import Sampler, load_config, train
from specrl_jax.config import (
    Config,
    DistillConfig,
    RewardConfig,
    RLConfig,
    override,
)
from specrl_jax.control.registry import CONTROLLERS
from specrl_jax.draft.registry import DRAFTERS
from specrl_jax.metrics import trackers
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model import tiny
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export
from specrl_jax.model.families import FAMILIES
from specrl_jax.model.tensors import pack
from specrl_jax.rewards.judge import of_config
from specrl_jax.rewards.reward import REWARDS
from specrl_jax.rl.algorithm import resolve
from specrl_jax.verify.registry import RULES

FILES = Path(__file__).parent
PAGE = (FILES.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:PYTHONPATH=tests/extending )?python experiments/.*$",
                      re.sub(r"\\\n\s*", "", PAGE), re.M)  # of the lines that a backslash joins
MOST_LINES = 80


def greedy(**fields: Any) -> Config:
    """A config of greedy answers: a random model's repeat themselves, so drafts are accepted. One
    batch size is less to compile."""
    return micro_config(**dict(spec__drafter="last_token:last_token", rollout__temperature=0.0,
                               rollout__min_batch=8) | fields)


PLAIN = micro_config(spec__drafter="off")
LEARNS = greedy(
    spec__drafter="bigram:bigram", control__min_survival=0.0, learner__learning_rate=0.0,
    distill=DistillConfig(when="interval", batch=8, micro_batch=8, updates=4, unroll=2,
                          loss="forward_kl", learning_rate=0.3, probe_tokens=4))


def flags(command: str) -> dict[str, Any]:
    """Returns the values of a command's config fields."""
    given = dict(re.findall(r'--config\.([\w.]+)=("[^"]*"|\S+)', command))
    default = Config()

    def parse(name: str, text: str) -> Any:
        value: Any = default
        for part in name.split("."):
            value = getattr(value, part)
        return text if isinstance(value, str) else ast.literal_eval(text.strip('"'))

    return {name: parse(name, text) for name, text in given.items()}


# The page.


@pytest.mark.parametrize("path", sorted(
    path for path in FILES.iterdir() if path.suffix in (".py", ".jsonl")
    and not path.name.startswith("test_")), ids=lambda path: path.name)
def test_example_is_short_and_on_the_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES and f"\n{text}```\n" in PAGE


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-40:])
def test_command_names_fields_and_extensions_that_exist(command: str) -> None:
    config = override(load_config("tiny"), flags(command))
    for registry, name in ((DRAFTERS, config.spec.drafter), (RULES, config.spec.rule),
                           (CONTROLLERS, config.control.policy),
                           (FAMILIES, config.model.family or "llama")):
        registry.resolve(name)
    resolve(config.rl)
    of_config(config.reward)
    trackers.resolve(config.track)


def test_registered_name_of_the_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = re.search(r"```python\n(from specrl_jax import .*?)```", PAGE, re.S)
    assert program is not None
    actual: list[Any] = []
    monkeypatch.setattr(specrl_jax, "train", lambda config, workdir: actual.extend(
        of_config(config.reward)([("", "1234567890", {})])))
    try:
        exec(program[1], {"__name__": "notebook"})
    finally:
        REWARDS.pop("brevity", None)
    assert actual == [(0.5, {"brevity": 0.5}, {})]


# Rewards and trackers.


def test_batched_reward_counts_equal_answers_to_a_question() -> None:
    judge = of_config(RewardConfig(("agreement:agreement",)))
    answers = [("", said, {"id": id}) for id, said in ((1, "a"), (1, "a "), (1, "b"), (2, "a"))]
    assert [one.total for one in judge(answers)] == [2 / 3, 2 / 3, 1 / 3, 1]


class Sandbox(BaseHTTPRequestHandler):
    """Passes programs that are the number 4."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["programs"]
        passed = [float(x["code"].strip() == "4" and x["tests"] == "t") for x in asked]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"passed": passed}).encode())

    def log_message(self, *args: object) -> None:
        pass


def test_sandbox_gets_code_and_a_service_that_is_down_fails(
        monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [("", said, {"id": 0, "tests": "t"}) for said in (
        "```python\n3\n```\nno:\n```\n4\n```", "4", "```py\n5\n```")]
    with HTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SANDBOX_URL", f"http://127.0.0.1:{server.server_port}")
        judge = of_config(RewardConfig(("sandbox:passes",), on_failure="-1"))
        assert [one.total for one in judge(answers)] == [1, 0, 0]
        server.shutdown()
    actual = judge(answers)
    assert [one.total for one in actual] == [-1] * 3
    assert "a batch of 3 answers" in actual[0].failures["sandbox:passes"]


# Drafting.


@pytest.mark.ci
def test_one_draft_rule_accepts_at_most_one_a_round() -> None:
    with_rule = greedy(spec__rule="one_draft:ONE_DRAFT")
    rollout, metrics = stepping_to_compile(with_rule).rollout()
    assert rollout.commits.max() == 2 and metrics["spec/lossy"] == 0
    plain, _ = stepping_to_compile(greedy(spec__drafter="off")).rollout()
    np.testing.assert_array_equal(rollout.tokens, plain.tokens)


@pytest.mark.ci
@pytest.mark.parametrize("few, drafts", [(9, True), (1, False)])
def test_small_batches_controller_drafts_below_few_rows(
        few: int, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batches, "FEW", few)
    config = greedy(control__policy="small_batches:small_batches")
    _, metrics = stepping_to_compile(config).rollout()
    assert (metrics["rollout/drafted"] > 0) == drafts


@pytest.mark.ci
def test_bandit_controller_trains_and_drafts() -> None:
    trainer = stepping(micro_config(
        spec__drafter="last_token:last_token", control__policy="bandit:bandit",
        rollout__rounds_per_launch=2))
    rows = [trainer.step()[0] for _ in range(2)]
    assert all(row["applied"] for row in rows)
    assert max(row["control/draft_depth"] for row in rows) > 0


@pytest.mark.ci
def test_bigram_drafter_learns_while_rl_runs() -> None:
    warnings: list[str] = []
    trainer = stepping(LEARNS, warn=warnings.append)
    rows = [trainer.step()[0] for _ in range(5)]
    assert rows[-1]["distill/loss"] < rows[0]["distill/loss"]
    assert rows[-1]["distill/alpha/0"] > rows[0]["distill/alpha/0"] + 0.05
    assert rows[-1]["rollout/accept_length"] > rows[0]["rollout/accept_length"] + 0.1
    assert [row["version/drafter"] for row in rows] == [0, 1, 2, 3, 4]
    assert not [line for line in warnings if "temperature" not in line]  # it is greedy


@pytest.mark.ci
def test_bigram_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    config = override(LEARNS, {
        "model.path": "random:tiny", "data.name": "squares:squares", "steps": 1,
        "rollout.max_prompt_tokens": 96, "reward.terms": ("digit_fraction",)})
    assert train(config, tmp_path) and train(override(config, {"steps": 2}), tmp_path)
    assert [row["version/drafter"] for row in read_metrics(tmp_path)] == [0, 1]


BRANCHING: dict[str, Any] = {"spec.drafter": "medusa:medusa", "spec.branch": 2, "spec.nodes": 5,
                             "spec.max_branch": 2, "spec.max_nodes": 5}


@pytest.mark.ci
def test_medusa_heads_learn_and_change_no_token() -> None:
    warnings: list[str] = []
    trainer = stepping(override(LEARNS, BRANCHING | {"distill.learning_rate": 0.01}),
                       warn=warnings.append)
    plain, _ = stepping_to_compile(greedy(spec__drafter="off")).rollout()
    rollout, _ = trainer.rollout()
    np.testing.assert_array_equal(rollout.tokens, plain.tokens)
    rows = [trainer.step()[0] for _ in range(6)]
    assert rows[-1]["distill/loss"] < rows[0]["distill/loss"]
    assert rows[-1]["distill/alpha/0"] > 0.7  # 0.64 if they read a column too early
    assert rows[-1]["rollout/accept_length"] > rows[0]["rollout/accept_length"] + 0.1
    assert not [line for line in warnings if "temperature" not in line]  # it is greedy


# RL.


@pytest.mark.ci
def test_objective_and_reward_are_what_a_step_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}
    functions = ("best_of_group", "positive_only", "within_factor_2")
    for name in functions:
        original = getattr(objective, name)

        def recorded(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            called[name] = original(*args, **kwargs)
            return called[name]

        monkeypatch.setattr(objective, name, recorded)
    config = override(PLAIN, {
        "rl.advantage": "objective:best_of_group", "rl.loss": "objective:positive_only",
        "rl.correction": "objective:within_factor_2", "reward.terms": ("brevity:brevity",)})
    metrics, samples = stepping(config).step()
    assert metrics["applied"] and set(called) == {*functions}
    assert called["best_of_group"].shape == (8, 2)
    for sample in samples:
        assert sample["reward"] == pytest.approx(10 / (10 + len(sample["completion"])))
    assert resolve(config.rl) != resolve(RLConfig())


# Data and models.


def test_family_generates_from_its_checkpoint(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=264, hidden_size=16, intermediate_size=8, num_layers=1,
                        num_heads=4, num_kv_heads=2, head_dim=4, qkv_bias=True,
                        family="seed_oss:SEED_OSS")
    export(tmp_path / "model", arch, pack(arch, tiny.random_tensors(arch, seed=3)),
           tiny.byte_tokenizer())
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["model_type"] == SEED_OSS.model_type and stored["attention_bias"]
    config = override(PLAIN, {
        "model.path": str(tmp_path / "model"), "model.family": "seed_oss:SEED_OSS",
        "rollout.max_prompt_tokens": 64})
    sampler, state = Sampler.from_config(config)
    assert state.policy.params["layers"][0]["qkv_bias"].any()
    rollout, *_ = sampler.generate(sampler.encode(["Hi"]), *state)
    assert rollout.length[0] > 0
