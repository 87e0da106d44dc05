"""Runs compared by their files."""

import json

import pytest

from specrl_jax.config import Config, ConfigError, as_dict
from specrl_jax.evaluation import compare
from specrl_jax.evaluation.compare import Difference
from specrl_jax.runtime.workdir import write_config


def record(step, prompt_id, sample_id, tokens, prompt="p"):
    return {"step": step, "prompt_id": prompt_id, "occurrence": 0, "sample_id": sample_id,
            "prompt": prompt, "tokens": tokens}


def write(run, records, steps=None, **config):
    """A run's files; `steps` completed ones, or as many as there are samples of."""
    run.mkdir()
    steps = 1 + max(r["step"] for r in records) if steps is None else steps
    for name, rows in (("samples", records), ("metrics", [{"step": s} for s in range(steps)])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    write_config(run, as_dict(Config(**config)))
    return run


def test_steps_are_compared_by_key_whatever_the_order(tmp_path):
    a = write(tmp_path / "a", [record(0, 1, 0, [5, 6]), record(0, 2, 0, [7]),
                               record(1, 1, 0, [1, 2, 3]), record(1, 2, 1, [4, 4, 4])])
    b = write(tmp_path / "b", [record(0, 2, 0, [7]), record(0, 1, 0, [5, 6]),
                               record(1, 1, 0, [1, 9, 3]), record(1, 2, 1, [4, 4, 4])])
    first, second = compare.compare_steps(a, b)
    assert (first.step, first.sequences, first.tokens, first.differences) == (0, 2, 3, [])
    assert second.differences == [Difference(1, (1, 0, 0, -1), 1, 2, 9, "p", [1])]
    assert second.tokens == 2 + 3


def test_compare_steps_stops_where_one_run_stops(tmp_path):
    rows = [record(s, 0, 0, [s]) for s in range(3)]
    a, b = write(tmp_path / "a", rows), write(tmp_path / "b", rows[:2])
    torn = write(tmp_path / "torn", rows, steps=1)
    assert [s.step for s in compare.compare_steps(a, b)] == [0, 1]
    assert [s.step for s in compare.compare_steps(torn, a)] == [0]


def test_steps_of_equal_bits_are_counted(tmp_path):
    a, b = (write(tmp_path / name, [record(s, 0, 0, [s]) for s in range(4)]) for name in "ab")
    metrics = [{"step": s} | {name: 0.1 * s for name in compare.BITS} for s in range(4)]

    def counted(*changes):
        changed = [m | c for m, c in zip(metrics, changes, strict=True)]
        for run, rows in ((a, metrics), (b, changed)):
            (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in rows))
        return compare.equal_bits(a, b, range(4))

    assert counted({}, {}, {}, {"time/step": 3.0}) == 4
    for name in compare.BITS:
        assert counted({}, {name: 0.1 + 2**-55}, {}, {name: 0.3}) == 2
        assert counted({}, {}, {}, {name: None}) == 3
    missing = [{"step": s} for s in range(4)]
    for run in (a, b):
        (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in missing))
    assert compare.equal_bits(a, b, range(4)) == 0


@pytest.mark.parametrize("rows, message", [
    ([record(0, 1, 0, [1])], r"step 0: prompt 0 \(occurrence 0, sample 0\) is only in A"),
    ([record(0, 0, 0, [1], "q")], "is 'p' in A and 'q' in B"),
    ([], "no completed step"),
])
def test_runs_that_were_asked_something_else_are_refused(tmp_path, rows, message):
    a = write(tmp_path / "a", [record(0, 0, 0, [1])])
    b = write(tmp_path / "b", rows, steps=len(rows))
    with pytest.raises(ConfigError, match=message):
        list(compare.compare_steps(a, b))
    (a / "samples.jsonl").unlink()
    with pytest.raises(ConfigError, match="samples.jsonl must be in both"):
        list(compare.compare_steps(a, a))


@pytest.mark.parametrize("field, value, refused", [
    ("spec", {"drafter": "off"}, False), ("rollout", {"batch_size": 8}, False),
    ("steps", 3, False), ("rollout", {"temperature": 0.5}, True), ("seed", 1, True),
    ("steps_", 1, True), ("spectrum", 1, True),
])
def test_configs_may_differ_only_where_tokens_may_not(tmp_path, field, value, refused):
    run = write(tmp_path / "a", [record(0, 0, 0, [1])])
    changed = json.loads((run / "config.json").read_text())
    changed[field] = changed[field] | value if isinstance(value, dict) else value
    other = write(tmp_path / "b", [record(0, 0, 0, [1])])
    (other / "config.json").write_text(json.dumps(changed))
    actual = compare.config_differences(run, other)
    assert len(actual) == 1 and next(iter(actual)).startswith(field)
    if refused:
        with pytest.raises(ConfigError, match=f"^{field}.* in A and .* in B"):
            compare.check_comparable(actual)
    else:
        compare.check_comparable(actual)


def test_rewards_that_failed_in_one_run_alone_are_told_apart(tmp_path):
    rows = [record(0, 0, i, [1]) | {"reward": 1.0} for i in range(4)]
    failed = [rows[0], rows[1] | {"reward": 0.0, "failures": {"exact": "late"}},
              rows[2] | {"failures": {"exact": "late"}}, rows[3] | {"reward": 0.5}]
    a, b = write(tmp_path / "a", rows), write(tmp_path / "b", failed)
    for pair in ((a, b), (b, a)):
        step, = compare.compare_steps(*pair)
        assert (step.failed_apart, step.differences) == (1, [])
    assert next(compare.compare_steps(b, b)).failed_apart == 0


def test_failure_in_one_run_excuses_what_its_filter_chose(tmp_path):
    """In B an answer to prompt 1 failed, and so its group was left out for that of prompt 2."""
    rows = [record(0, i, 0, [1]) | {"reward": 1.0} for i in range(3)]
    lost = rows[1] | {"reward": 0.0, "failures": {"exact": "late"}, "learned": False}
    a, b = write(tmp_path / "a", rows[:2]), write(tmp_path / "b", [rows[0], rows[2], lost])
    for pair in ((a, b), (b, a)):
        step, = compare.compare_steps(*pair)
        assert (step.failed_apart, step.differences, step.tokens) == (1, [], 2)
    also = write(tmp_path / "c", [rows[0], rows[2], lost | {"prompt_id": 7}])
    assert next(compare.compare_steps(a, also)).failed_apart == 1
    assert next(compare.compare_steps(also, also)).failed_apart == 0
