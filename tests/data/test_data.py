"""The builders, the examples a run sees, and which of them each step uses."""

import collections
import gzip
import json
import sys
import urllib.error

import numpy as np
import pytest

from specrl_jax.config import ConfigError, DataConfig
from specrl_jax.data.chats import messages
from specrl_jax.data.datasets import gsm8k, levels, tfds_text
from specrl_jax.data.examples import examples_digest, load_examples
from specrl_jax.data.prompt_order import step_prompts

LEVELS = {level.name: level for level in levels.LEVELS}
ROWS = [
    {"question": "Ann has 1 egg and buys 2. How many?", "answer": "1 + 2 = <<1+2=3>>3\n#### 3"},
    {"question": "Bob earns $600 twice. How much?", "answer": "600 * 2 = 1200\n#### 1,200"},
    {"question": "Eva owes 5. What does she own?", "answer": "0 - 5 = -5\n#### -5"},
]


def quiet(line):
    """Takes the place of print."""


def load(tmp_path, **fields):
    return load_examples(DataConfig(data_dir=str(tmp_path / "tfds"), **fields), quiet)


def load_gsm8k(tmp_path, **fields):
    return load(tmp_path, name="gsm8k", manual_dir=str(tmp_path), **fields)


def write_rows(path, rows, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def work_out(expression):
    """Evaluates left to right, by other means than the package does."""
    value, *rest = expression.split()
    for op, x in zip(rest[::2], rest[1::2], strict=True):
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](int(value), int(x))
    return int(value)


def swapped(expression):
    """Every problem with the same operands, each with its sign or factor, in some order."""
    words = expression.split()
    signs = ["*" if "*" in words else "+", *words[1::2]]
    return frozenset(collections.Counter(zip(signs, words[::2], strict=True)).items())


@pytest.mark.parametrize("name", LEVELS)
def test_splits_share_no_problem_and_no_commutative_twin(name):
    problems = levels.problems(LEVELS[name])
    train = {swapped(x.expression) for x in problems if not x.is_test}
    test = {swapped(x.expression) for x in problems if x.is_test}
    assert test and not train & test
    assert 0.05 < sum(x.is_test for x in problems) / len(problems) < 0.15


def test_splits_share_no_problem_across_levels():
    mixed = {x.question for x in levels.problems(LEVELS["mixed2"]) if not x.is_test}
    for name in ("add2", "sub2"):
        test = {x.question for x in levels.problems(LEVELS[name]) if x.is_test}
        assert not mixed & test


@pytest.mark.parametrize("name, count, low, high", [
    ("add2", 8100, 10, 99), ("add1", 81, 1, 9), ("add3", 20000, 100, 999), ("sub2", 8100, 10, 99),
    ("mul1", 81, 1, 9), ("mixed2", 20000, 10, 99), ("chain", 20000, 10, 99),
])
def test_problems_are_distinct_right_and_of_their_level(name, count, low, high):
    problems = levels.problems(LEVELS[name])
    assert len({x.question for x in problems}) == len(problems) == count
    for problem in problems[:300]:
        assert all(low <= x <= high for x in problem.operands)
        assert problem.answer == work_out(problem.expression)
        assert problem.question == f"What is {problem.expression}?"


def test_the_order_of_problems_is_fixed():
    assert [x.expression for x in levels.problems(LEVELS["add2"])[:5]] == [
        "62 + 68", "51 + 80", "65 + 51", "47 + 58", "87 + 47"]
    assert [x.expression for x in levels.problems(LEVELS["chain"])[:3]] == [
        "28 - 27 + 77 - 63", "32 - 16 + 56 + 11", "84 + 64 + 16 + 88"]


def test_arithmetic_is_read_without_tensorflow(tmp_path, capfd):
    lines = []
    config = DataConfig(level="add1", data_dir=str(tmp_path))
    examples = load_examples(config, lines.append)
    problems = list(enumerate(levels.problems(LEVELS["add1"])))
    assert [(x["id"], x["question"], x["answer"]) for x in examples] == [
        (i, x.question, str(x.answer)) for i, x in problems if not x.is_test]
    assert "tensorflow" not in sys.modules
    assert len(lines) == 1 and "specrl_arithmetic/add1" in lines[0] and str(tmp_path) in lines[0]
    assert list(load_examples(config, lines.append)) == list(examples)
    assert len(lines) == 1, "prepared twice"
    assert tuple(capfd.readouterr()) == ("", "")


def test_slices_and_limits(tmp_path):
    whole = load(tmp_path, level="add1")
    half = load(tmp_path, level="add1", split="train[:50%]")
    assert list(half) == list(whole)[:len(half)] and abs(len(half) - len(whole) / 2) <= 1
    assert list(load(tmp_path, level="add1", examples=3)) == list(whole)[:3]
    assert len(load(tmp_path, level="add1", examples=10**6)) == len(whole)
    with pytest.raises(IndexError, match="has 3"):
        load(tmp_path, level="add1", examples=3)[3]


def test_full_disk_while_data_are_prepared_is_one_line(tmp_path, monkeypatch):
    def full(*arguments):  # as array_record does
        raise RuntimeError('Failed to finalize writing of split "train":\nNo space left on device')

    monkeypatch.setattr(tfds_text, "prepare", full)
    with pytest.raises(ConfigError, match='^data.data_dir = .*"train": No space left .* room$'):
        load(tmp_path, level="add1")


@pytest.mark.parametrize("fields, words", [
    ({"name": "gsm9k"}, ["data.name = 'gsm9k': choose one of specrl_arithmetic, "]),
    ({"level": "add9"}, ["data.level", "add9", "add2", "chain"]),
    ({"name": "jsonl", "path": "missing.jsonl"}, ["data.path = 'missing.jsonl': no such file"]),
    ({"level": "add1", "split": "dev"}, ["data.split", "dev", "train (75)", "test (6)"]),
    ({"level": "add1", "split": "train[:0]"}, ["data.split", "train[:0]"]),
    ({"path": "my.jsonl"}, ["data.path = 'my.jsonl': ", " set data.name=jsonl"]),
])
def test_bad_fields_are_refused_in_a_line(tmp_path, fields, words):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **fields)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix, opener", [("", open), (".gz", gzip.open)])
def test_gsm8k(tmp_path, suffix, opener):
    write_rows(tmp_path / f"train.jsonl{suffix}", ROWS, opener)
    write_rows(tmp_path / f"test.jsonl{suffix}", ROWS[:1], opener)
    train, test = load_gsm8k(tmp_path), load_gsm8k(tmp_path, split="test")
    assert [x["id"] for x in train] == [0, 1, 2] and [x["id"] for x in test] == [1_000_000]
    assert [x["question"] for x in train] == [x["question"] for x in ROWS]
    assert [x["answer"] for x in train] == ["3", "1200", "-5"]
    assert [x["solution"] for x in train] == [x["answer"] for x in ROWS]
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("fields, place", [
    ({"manual_dir": "{}"}, ""), ({"manual_dir": "{}/missing"}, "missing"),
    ({}, "tfds/downloads/manual")])
def test_gsm8k_without_files_and_network_is_refused(tmp_path, monkeypatch, fields, place):
    def unreachable(url):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(gsm8k, "_check_reachable", unreachable)
    with pytest.raises(ConfigError) as error:
        load(tmp_path, name="gsm8k", **{k: v.format(tmp_path) for k, v in fields.items()})
    for words in (str(tmp_path / place), "train.jsonl", "test.jsonl", gsm8k.HOMEPAGE):
        assert words in str(error.value)
    assert not (tmp_path / "tfds" / "specrl_gsm8k" / "1.0.0").exists()


@pytest.mark.parametrize("now", [
    ROWS[:2], [ROWS[0], ROWS[2], ROWS[1]],
    [*ROWS[:2], ROWS[2] | {"answer": "0 - 5 = -5\n#### -6"}]])
def test_gsm8k_prepared_from_other_files_is_refused(tmp_path, now):
    write_rows(tmp_path / "train.jsonl", ROWS)
    assert len(load_gsm8k(tmp_path)) == len(load_gsm8k(tmp_path)) == 3
    write_rows(tmp_path / "train.jsonl", now)
    with pytest.raises(ConfigError, match="manual_dir.*specrl_gsm8k/1.0.0 was prepared from other"):
        load_gsm8k(tmp_path)
    write_rows(tmp_path / "train.jsonl", [*ROWS[:2], *now])
    assert len(load_gsm8k(tmp_path, examples=2)) == 2  # the others are not used
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match="data.manual_dir = .*: no files"):
        load_gsm8k(tmp_path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("file, damage", [
    ("*train*", cut), ("*train*", flip), ("*.array_record*", lambda path: path.unlink()),
    ("dataset_info.json", lambda path: path.write_text("{"))])
def test_damaged_prepared_data_is_refused_in_a_line(tmp_path, file, damage):
    load(tmp_path, level="add1")
    place = tmp_path / "tfds" / "specrl_arithmetic" / "add1" / "1.0.0"
    for path in place.glob(file):
        damage(path)
    with pytest.raises(ConfigError) as refused:
        list(load(tmp_path, level="add1"))
    assert "\n" not in str(refused.value) and f"{place}: damaged" in str(refused.value)
    assert "delete that directory" in str(refused.value)


def test_digest_changes_with_any_field_and_the_order():
    base = [{"id": 0, "question": "a", "answer": "b"}, {"id": 1, "question": "c", "answer": "d"}]
    others = [base[::-1], base[:1], [base[0] | {"answer": "x"}, base[1]],
              [base[0] | {"more": [1]}, base[1]]]
    assert len({examples_digest(rows) for rows in [base, *others]}) == 5
    assert examples_digest([base[0] | {"object": object()}, base[1]]) == examples_digest(base)


def test_a_byte_order_mark_and_blank_lines_are_no_problem(tmp_path):
    line = json.dumps(ROWS[0]).encode()
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line + b"\r\n")
    assert [x["answer"] for x in load_gsm8k(tmp_path)] == ["3", "3"]
    config = DataConfig(name="jsonl", path=str(tmp_path / "train.jsonl"))
    assert [x["id"] for x in load_examples(config, print)] == [1, 3]


@pytest.mark.parametrize("text, words", [
    (b"\n\n", "train.jsonl: holds no problems"),
    (b'{"question": "a", "answer": "#### 1"}\n{"question"\n', r"train.jsonl:2: '{\"question\"'"),
    (b'{"question": "a", "answer": "1"}\n', "train.jsonl:1: .*#### NUMBER"),
    (b'{"question": "a"}\n', "train.jsonl:1: .*the fields"),
    (b"[1]\n", "train.jsonl:1: "),
    (b'{"question": "\xff"}\n', "train.jsonl:1: .*utf-8"),
    (b'\n{"question": "\\ud83d", "answer": "#### 1"}\n', "train.jsonl:2: .*half a surrogate"),
    (b"\x1f\x8b not gzip", "train.jsonl: "),
    (gzip.compress(b'{"question": "a", "answer": "#### 1"}\n', mtime=0)[:-9], "train.jsonl: .*end"),
])
def test_damaged_gsm8k_files_are_refused(tmp_path, text, words):
    (tmp_path / "train.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        load_gsm8k(tmp_path)


@pytest.mark.parametrize("text, words", [
    ('{"question": "a", "answer": "b"}\n{nonsense', "mine.jsonl:2: '{nonsense' is not JSON"),
    ("[1]", r"mine.jsonl:1: '\[1\]' is not an object"),
    ('\n{"question": "a"}', "data.answer_field = 'answer': .*mine.jsonl:2 has no such field; it"),
    ("", "data.name = 'jsonl': the dataset has no examples"),
    *((json.dumps({"question": chat, "answer": "2"}), f"data.question_field = .*example 1.*{words}")
      for chat, words in (
          ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "must end"),
          ([{"role": ["user"], "content": "a"}], "must have a role among"),
          ([{"role": "user", "content": 3}], "and a text as its content"),
          (None, "has None there")))])
def test_damaged_jsonl_files_are_refused(tmp_path, text, words):
    path = write_jsonl(tmp_path / "mine.jsonl", text)
    with pytest.raises(ConfigError, match=words):
        list(load(tmp_path, name="jsonl", path=path))


def write_jsonl(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_jsonl_maps_fields_and_numbers_lines(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", '{"q": "1 + 1?", "a": 2, "id": "x"}', "",
                       '{"q": "Über?", "a": "ja", "note": 1}')
    actual = load(tmp_path, name="jsonl", path=path, question_field="q", answer_field="a",
                  level="of no account")
    assert [(x["id"], x["question"], x["answer"]) for x in actual] == [
        (1, "1 + 1?", "2"), (3, "Über?", "ja")]
    assert actual[1]["note"] == 1
    assert len(load(tmp_path, name="jsonl", path=path, question_field="q", answer_field="a",
                    examples=1)) == 1


def test_jsonl_reads_patterns_lists_and_gzip_in_order(tmp_path):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(5)]
    write_rows(tmp_path / "a.jsonl", rows[:2])
    write_rows(tmp_path / "b.jsonl.gz", rows[2:4], gzip.open)
    write_rows(tmp_path / "c,d.jsonl", rows[4:])
    for path, want in (("{0}/*.jsonl", [0, 1, 4]), ("{0}/b*, {0}/a.jsonl", [2, 3, 0, 1]),
                       ("{0}/c,d.jsonl", [4]), ("{0}/**/*.gz", [2, 3])):
        actual = load(tmp_path, name="jsonl", path=path.format(tmp_path))
        assert [int(x["answer"]) for x in actual] == want, path
        assert [x["id"] for x in actual] == list(range(1, len(want) + 1))
    with pytest.raises(ConfigError, match=r"data.path = '.*x\*.jsonl': no such file"):
        load(tmp_path, name="jsonl", path=f"{tmp_path}/a.jsonl,{tmp_path}/x*.jsonl")


def test_jsonl_question_may_be_chat_messages(tmp_path):
    chat = [{"role": "system", "content": "Be kind."}, {"from": "human", "value": "1 + 1?"}]
    path = write_jsonl(tmp_path / "x.jsonl", json.dumps({"messages": chat, "answer": 2}),
                       json.dumps({"messages": chat[1:], "answer": 3}))
    first, second = load(tmp_path, name="jsonl", path=path, question_field="messages")
    user = {"role": "user", "content": "1 + 1?"}
    system = {"role": "system", "content": "Be brief."}
    assert messages(first, "Be brief.") == [chat[0], user]
    assert messages(second, "Be brief.") == [system, user]
    assert messages(second) == [user] and second["answer"] == "3"


def badly(data, say):
    if data.path == "raise":
        raise KeyError("no such\nkey")
    return {"none": None, "number": [3], "large": [{"id": 2**40}]}[data.path]


@pytest.mark.parametrize("path, words", [
    ("raise", "KeyError: 'no such"), ("none", "returned a NoneType; return a sequence of dicts"),
    ("number", "example 0 is a int; give dicts"), ("large", "has the id 1099511627776; give a nu")])
def test_python_function_that_returns_something_else_is_refused(tmp_path, path, words):
    with pytest.raises(ConfigError, match=f"data.name = .*badly'.*{words}") as refused:
        list(load(tmp_path, name=f"{__name__}:badly", path=path))
    assert "\n" not in str(refused.value)


def test_each_epoch_covers_every_example_once():
    stream = np.concatenate([step_prompts(10, 3, step, 4) for step in range(15)])
    epochs = stream.reshape(6, 10)
    assert (np.sort(epochs) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 6, "epochs are in the same order"
    more = step_prompts(3, 0, 1, 7)  # than there are examples
    assert sorted(collections.Counter(more.tolist()).values()) == [2, 2, 3]


def test_step_prompts_is_a_pure_function_of_seed_and_step():
    late = step_prompts(1000, 5, 123, 8)
    assert late.dtype == np.int64 and late.shape == (8,)
    for step in (0, 7):
        step_prompts(1000, 5, step, 8)
    np.testing.assert_array_equal(step_prompts(1000, 5, 123, 8), late)
    assert (step_prompts(1000, 6, 123, 8) != late).any()
    np.testing.assert_array_equal(step_prompts(10, 0, 0, 5), [0, 2, 9, 1, 8])


def test_losing_the_race_is_no_error(tmp_path):
    config = DataConfig(level="add1", data_dir=str(tmp_path))
    late = tfds_text.make_builder("specrl_arithmetic/add1", config)
    split_generators = late._split_generators

    def while_another_finishes(manager):
        load_examples(config, quiet)
        return split_generators(manager)

    late._split_generators = while_another_finishes
    tfds_text.prepare(late, config, quiet)
    assert len(load_examples(config, quiet)) == 75
    assert not list(tmp_path.glob("**/*incomplete*"))


def riddles(data, say):
    say(f"{data.examples} riddles")
    return [{"question": f"{i}?", "answer": i} for i in range(5)]


def test_python_function_is_a_dataset(tmp_path):
    actual = load(tmp_path, name=f"{__name__}:riddles", examples=3)
    assert [(x["id"], x["question"], x["answer"]) for x in actual] == [
        (0, "0?", "0"), (1, "1?", "1"), (2, "2?", "2")]
