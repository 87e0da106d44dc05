"""The layouts of accelerators emit the tokens of a CPU's, and their rounds have no inner loop."""

from typing import Any

import pytest
from helpers import Course, Dice, ask, assert_same, make_engine, random_drafter, roll_out, wandering

from specrl_jax.model import layers

FORMS = {"gpu": False, "tpu": True}


@pytest.mark.parametrize("platform", FORMS)
def test_layout_of_an_accelerator_changes_no_token(bench: Any, platform: str) -> None:
    """With compaction, refills, copies of prompts, and trees of all shapes."""
    plain = bench.run_plain(seed=1)
    dice, course = Dice(plain.sequences.tokens, hit=0.7), Course(6, 3)
    engine = make_engine(
        bench.arch, bench.task, batch=4, min_batch=2, controller=wandering(course),
        drafter=random_drafter(dice, nodes=6, depth=3, vocab=bench.arch.vocab_size),
        platform=platform)
    params = layers.arrange(bench.params, stacked=FORMS[platform])
    engine.compile(params)
    actual = roll_out(engine, params, ask(bench.task, seed=1), rounds=3)
    assert actual.counters["drafted"] > 0
    assert_same(plain, actual)
