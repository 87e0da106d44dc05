"""bench.py algorithms: its arms, and what it says of a run."""

from pathlib import Path

import pytest

from experiments.studies import algorithms
from specrl_jax.config import load_config
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.metrics.run_files import Writer


def test_arms_are_all_algorithms_seeds_adapters_and_tasks(tmp_path: Path) -> None:
    config = load_config("smollm2")
    arms = algorithms.configs(config, tmp_path)
    assert list(arms) == [*ALGORITHMS, "grpo_seed_1", "grpo_seed_2", "lora", "chain_sum",
                          "spell_backward"]
    assert {arm.eval.every for arm in arms.values()} == {config.steps}
    assert [arms[name].seed for name in ("grpo", "grpo_seed_1", "grpo_seed_2")] == [0, 1, 2]
    assert arms["lora"].learner.lora_rank and arms["lora"].rl == arms["grpo"].rl
    assert arms["chain_sum"].data.name == "reasoning_gym"


def test_account_means_the_first_and_the_last_steps(tmp_path: Path) -> None:
    with Writer(tmp_path, 0) as writer:
        for step in range(12):
            writer.write_step({"step": step, "reward/exact": step / 11, "time/step": 2.0,
                               "rollout/accept_length": 1.5, "eval/accuracy": 0.5,
                               "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}, [])
    actual = algorithms.account(tmp_path, "exact")
    assert actual == {"steps": 12, "reward_first": pytest.approx(2 / 11),
                      "reward_last": pytest.approx(9 / 11), "accuracy": 0.5, "accuracy_low": 0.4,
                      "accuracy_high": 0.6, "accept_length": 1.5, "seconds": 24}
    assert algorithms.table({"grpo": actual}).row_count == 1
