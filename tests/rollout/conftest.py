"""Engines that the tests of the rollout share: they are what takes time."""

import dataclasses
from typing import Any

import pytest
from helpers import (
    Course,
    Dice,
    Task,
    ask,
    make_engine,
    make_task,
    random_drafter,
    roll_out,
    tiny_arch,
    tiny_params,
    wandering,
)

from specrl_jax.model.architecture import Architecture
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.structs import SpecConfig

NODES, DEPTH = 6, 3


@dataclasses.dataclass
class Bench:
    """One task, with plain decoding and with random trees over it."""

    arch: Architecture
    params: Any
    task: Task
    plain: Engine  # five slots that stay five
    trees: Engine  # four slots, compacted to two
    dice: Dice  # what the trees are made of
    course: Course  # how they are cut, from launch to launch

    def run_plain(self, **asked: Any) -> Result:
        return roll_out(self.plain, self.params, ask(self.task, **asked))

    def run_trees(self, rounds: int = 3, hold: SpecConfig | None = None, **asked: Any) -> Result:
        """With settings that change after every launch, or with `hold`."""
        self.course.hold = hold
        return roll_out(self.trees, self.params, ask(self.task, **asked), rounds=rounds)


@pytest.fixture(scope="session")
def bench() -> Bench:
    arch, task = tiny_arch(), make_task()
    params = tiny_params(arch)
    plain = make_engine(arch, task, batch=5, truncates=True)
    plain.compile(params)
    course = Course(NODES, DEPTH)
    dice = Dice(roll_out(plain, params, ask(task)).sequences.tokens)
    trees = make_engine(
        arch, task, batch=4, min_batch=2, truncates=True, controller=wandering(course),
        drafter=random_drafter(dice, nodes=NODES, depth=DEPTH, vocab=arch.vocab_size))
    trees.compile(params)
    roll_out(trees, params, ask(task))
    return Bench(arch, params, task, plain, trees, dice, course)
