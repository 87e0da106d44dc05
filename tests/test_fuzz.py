"""Damaged, swapped and malformed files end in one line, or load; nothing half-written is left.

Each input is a directory of good files, one of which is changed in a random way. The fast tier
tries a few of each kind; the full tier 300 in all.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf_writer import write_gguf

from specrl_jax.checkpoint import resume
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import ConfigError, DataConfig, as_dict, load_config
from specrl_jax.control import cost_file
from specrl_jax.control.cost_model import CostTable
from specrl_jax.data.examples import digest, load_examples
from specrl_jax.evaluation.compare import compare_steps, config_differences
from specrl_jax.evaluation.evaluate import paired, read_evaluation
from specrl_jax.metrics.report import REPORT, write_report
from specrl_jax.metrics.run_files import Writer, read_metrics, read_samples
from specrl_jax.model.export import export
from specrl_jax.model.source import open_actor, run_config
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source, describe_source
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.runtime.workdir import write_config
from specrl_jax.sharding import make_mesh
from specrl_jax.structs import carrier

ARCH = dataclasses.replace(TINY, num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2,
                           num_kv_heads=1, head_dim=8, vocab_size=272)
WRONG = (None, True, -1, 0, 2**40, 1e300, float("nan"), "", "x", "\ud800", [], [None], {}, {"a": 1})


# What is made once: good files of each kind.

def a_model(place: Path) -> None:
    source = Source(ARCH, byte_tokenizer(), random_tensors(ARCH, 0), "random")
    export(place / "model", ARCH, source.params(), source.tokenizer, shard_bytes=20_000)


def a_gguf(place: Path) -> None:
    write_gguf(place / "model.gguf", ARCH, random_tensors(ARCH, 0))


def data_files(place: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(4)]
    for name in ("train.jsonl", "test.jsonl"):
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    list(load_examples(gsm8k(place), print))


def a_run(place: Path) -> None:
    config = as_dict(load_config("tiny"))
    write_config(place, config)
    resume.check_data(place, {"training": "0"})
    sample = {"prompt_id": 1, "occurrence": 0, "sample_id": 0, "prompt": "1 + 1 =",
              "completion": "2", "tokens": [3], "reward": 1.0, "commits": [1]}
    with Writer(place, 0) as writer:
        for step in range(3):
            writer.write_step({"step": step, "reward/mean": 0.5, "loss": 0.1, "time/step": 1.0,
                               "rollout/accept_length": 1.5}, [sample])
    params = describe_source("random:tiny").params()
    with Checkpoints(place / CHECKPOINTS, 2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"actor": params}, {"step": step})


def json_files(place: Path) -> None:
    table = carrier(CostTable, **{field.name: np.ones(2, np.float32)
                                  for field in dataclasses.fields(CostTable)})
    cost_file.store(place / "cost.json", {"device": "x"}, table)
    (place / "evaluation.json").write_text(json.dumps(evaluation()))


def evaluation() -> dict[str, Any]:
    return {"problems": [0, 1], "questions_sha256": "x", "correct": [[1], [0]],
            "reward": "exact", "data": {"name": "a", "level": "b", "split": "c"}}


# What reads them: every way in which a user comes to them.

def read_model(place: Path) -> None:
    actual = describe_source(str(place / "model"))
    actual.params()
    tokens = actual.tokenizer.encode(actual.tokenizer.chat([{"role": "user", "content": "hé"}]))
    actual.tokenizer.decode(tokens)


def read_gguf(place: Path) -> None:
    actual = describe_source(str(place / "model.gguf"))
    actual.params()
    actual.tokenizer.decode(actual.tokenizer.encode("hé"))


def gsm8k(place: Path) -> DataConfig:
    return DataConfig(name="gsm8k", manual_dir=str(place), data_dir=str(place / "tfds"))


def read_data(place: Path) -> None:
    jsonl = DataConfig(name="jsonl", path=str(place / "train.jsonl"))
    for config in (gsm8k(place), jsonl):
        read_or_line(lambda config=config: digest(load_examples(config, print)))


def read_run(place: Path) -> None:
    config = load_config("tiny")

    def restore() -> None:
        with Checkpoints(place / CHECKPOINTS, 2, warn=lambda line: None) as checkpoints:
            checkpoints.restore_latest({"actor": describe_source("random:tiny").params()})

    for read in (lambda: run_config(place), lambda: read_metrics(place),
                 lambda: list(read_samples(place)), lambda: write_report(place),
                 lambda: resume.check_config(place, as_dict(config), resume.EQUAL),
                 lambda: resume.check_data(place, {"training": "0"}),
                 lambda: config_differences(place, place),
                 lambda: list(compare_steps(place, place)),
                 lambda: open_actor(config, place).params(make_mesh(config.mesh)), restore):
        read_or_line(read)
    (place / REPORT).unlink(missing_ok=True)


def read_json_files(place: Path) -> None:
    blank = carrier(CostTable, **{field.name: np.ones(2, np.float32)
                                  for field in dataclasses.fields(CostTable)})
    for read in (lambda: cost_file.load(place / "cost.json", {"device": "x"}, blank),
                 lambda: paired(read_evaluation(place / "evaluation.json"), evaluation())):
        read_or_line(read)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], int]] = {
    "model": (a_model, read_model, 90), "gguf": (a_gguf, read_gguf, 50),
    "data": (data_files, read_data, 50), "run": (a_run, read_run, 70),
    "json": (json_files, read_json_files, 40)}


# How they are changed.

def change(rng: random.Random, place: Path) -> str:
    """Changes one file at random; returns what was done."""
    paths = sorted(path for path in place.rglob("*") if path.is_file())
    path = rng.choice(paths)
    how = rng.choice([cut, flip, swap, lose, folder, *[retype] * 3])
    if how is retype:
        path = rng.choice([p for p in paths if p.suffix in (".json", ".jsonl")] or [path])
    how(rng, path, paths)
    return f"{how.__name__} {path.relative_to(place)}"


def cut(rng: random.Random, path: Path, paths: list[Path]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def flip(rng: random.Random, path: Path, paths: list[Path]) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice([1, 1, 8])):
        content[rng.randrange(min(len(content), rng.choice([64, 4096, 2**30])))] ^= (
            1 << rng.randrange(8))
    path.write_bytes(content)


def swap(rng: random.Random, path: Path, paths: list[Path]) -> None:
    path.write_bytes(rng.choice(paths).read_bytes())


def lose(rng: random.Random, path: Path, paths: list[Path]) -> None:
    path.unlink()


def folder(rng: random.Random, path: Path, paths: list[Path]) -> None:
    path.unlink()
    path.mkdir()


def retype(rng: random.Random, path: Path, paths: list[Path]) -> None:
    """Gives one value of a JSON file another type."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()
                 ] if path.suffix == ".jsonl" else [json.loads(path.read_text())]
    except ValueError:
        return
    at, place = rng.randrange(len(lines)), lines
    key: Any = at
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    place[key] = rng.choice(WRONG)
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def read_or_line(read: Callable[[], object]) -> None:
    try:
        read()
    except ConfigError as error:
        assert str(error) and "\n" not in str(error), repr(str(error))


def left_behind(place: Path) -> list[str]:
    return [path.name for path in place.rglob("*") if path.suffix in (".tmp", ".partial")
            or ".partial" in path.name or path.name.startswith(".specrl_jax")]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            KINDS[kind][0](made[kind])
        return made[kind]

    return get


def attempt(kind: str, seed: int, originals: Callable[[str], Path], place: Path) -> None:
    shutil.copytree(originals(kind), place)
    did = change(random.Random(f"{kind} {seed}"), place)
    try:
        read_or_line(lambda: KINDS[kind][1](place))
    except BaseException as error:
        raise AssertionError(f"{kind}, seed {seed}: {did}") from error
    assert left_behind(place) == [], did
    shutil.rmtree(place)


@pytest.mark.parametrize("kind", KINDS)
def test_good_files_are_read(kind: str, originals: Callable[[str], Path], tmp_path: Path) -> None:
    place = shutil.copytree(originals(kind), tmp_path / "x")
    KINDS[kind][1](place)
    assert left_behind(place) == [] and jax.device_count()


@pytest.mark.parametrize("start, share", [
    (0, 10), pytest.param(1000, 1, marks=pytest.mark.full)], ids=["few", "300"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_end_in_a_line_or_load(
        kind: str, start: int, share: int, originals: Callable[[str], Path], tmp_path: Path
        ) -> None:
    for seed in range(start, start + KINDS[kind][2] // share):
        attempt(kind, seed, originals, tmp_path / str(seed))
