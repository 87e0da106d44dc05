"""Outputs are checked before the work, written whole or not at all, and a cache is optional."""

import errno
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import micro_config

from specrl_jax.config import ConfigError, DataConfig, load_config
from specrl_jax.control import cost_file
from specrl_jax.data.examples import load_examples
from specrl_jax.model.export import export
from specrl_jax.model.tiny import TINY
from specrl_jax.model.weights import describe_source
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime import compilation, files, paths
from specrl_jax.runtime.files import write_atomically
from specrl_jax.sharding import make_mesh
from specrl_jax.training.run import train


@pytest.mark.parametrize("text", ["gs://bucket/run", "hdfs:/x"])
@pytest.mark.parametrize("ask", [
    paths.local_path, paths.output_file, paths.output_directory,
    lambda field, value: train(load_config("tiny"), value),
    lambda field, value: train(load_config("tiny"), Path(value)),
    lambda field, value: cost_file.check_place(value)])
def test_urls_are_refused_and_make_no_directory(
        text: str, ask: Callable[[str, str], object], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no local path; mount the bucket"):
        ask("--out", text)
    assert os.listdir(tmp_path) == []


def drafts_from(path: str) -> None:
    config = micro_config(spec__drafter="eagle", draft__path=path)
    Sampler(config, TINY, (258,), make_mesh(config.mesh), prompts=4, group=2)


@pytest.mark.parametrize("text", ["gs://bucket/x", "~nobody-of-this-name/x"])
@pytest.mark.parametrize("field, read", [
    ("model.path", describe_source), ("draft.path", drafts_from),
    ("draft.model", lambda path: describe_source(path, "draft.model")),
    ("data.path", lambda path: load_examples(DataConfig(name="jsonl", path=path))),
    ("data.data_dir", lambda path: load_examples(DataConfig(data_dir=path))),
    ("data.manual_dir", lambda path: load_examples(DataConfig(
        name="gsm8k", manual_dir=path, data_dir="/proc/x")))])
def test_inputs_that_are_no_path_name_their_field_once(
        field: str, read: Callable[[str], object], text: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{field} = {text!r}: ") as refused:
        read(text)
    assert str(refused.value).count(" = ") == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("field, read, own", [
    ("model.path", describe_source, "model"), ("draft.path", drafts_from, "drafter")])
def test_working_directory_is_no_model(field: str, read: Callable[[str], object], own: str,
                                       tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for way_out in (f"experiments/export.py --run={run} writes its model: give that",
                    f"give {run / own}"):
        with pytest.raises(ConfigError) as refused:
            read(str(run))
        assert str(refused.value) == f"{field} = {str(run)!r}: is a working directory; {way_out}"
        (run / own).mkdir(exist_ok=True)


def test_home_is_found_and_odd_names_are_taken_as_they_are(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.local_path("x", "~/a") == tmp_path / "a"
    for name in ("a b", "lr[1e-5]", "x%d_50%", "q?*", "a#b:c", "größe_数", "a~"):
        assert paths.output_directory("x", tmp_path / name) == tmp_path / name
    with pytest.raises(ConfigError, match="x = '~nobody-of-this-name/a': .*write the whole path"):
        paths.local_path("x", "~nobody-of-this-name/a")


@pytest.mark.parametrize("place", ["file/x", "file/a/b", "/proc/x/y", "link"])
def test_directories_that_cannot_be_made_are_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    source = describe_source("random:tiny")
    for ask in (lambda to: paths.output_directory("--out", to),
                lambda to: cost_file.check_place(f"{to}/x.json"),
                lambda to: export(to, source.arch, source.params(), source.tokenizer)):
        with pytest.raises(ConfigError, match="(out|table) = .*; choose another place") as refused:
            ask(tmp_path / place)
        assert "\n" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


@pytest.mark.parametrize("place, words", [
    ("file/x.json", "is no directory; make it first"), ("none/x.json", "is no directory; make it"),
    ("/proc/x.json", "is not a directory that can be written"), ("directory", "is a directory"),
    ("x" * 254, "File name too long"), ("/dev/null", "is a device or a pipe")])
def test_files_that_cannot_be_written_are_refused(place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match=f"--out = .*{words}"):
        paths.output_file("--out", tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_leaves_the_old_file_and_no_other(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ConfigError, match="x.json: cannot be written .No space left on device.;"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("error, kind", [
    (OSError(errno.ENOSPC, "No space left on device"), ConfigError), (ValueError("x"), ValueError),
    (KeyboardInterrupt(), KeyboardInterrupt)])
def test_failed_export_leaves_that_of_another(
        error: BaseException, kind: type, tmp_path: Path) -> None:
    """Both make the directory above, and one is complete before the other fails."""
    with pytest.raises(kind):
        with paths.new_directory("--out", tmp_path / "exports" / "a" / "b") as partial:
            (partial / "half").touch()
            with paths.new_directory("--out", tmp_path / "exports" / "c") as other:
                (other / "whole").touch()
            raise error
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "exports", "exports/c", "exports/c/whole"]


def test_empty_directory_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    """It may be a mount point, be in a directory that cannot be written, or be where one stands."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    before, parent = os.stat("."), os.stat("..")
    for place in (".", tmp_path / "real", tmp_path / "link"):
        with paths.new_directory("--out", place) as partial:
            (partial / "x").write_text("whole")
            (partial / "y").mkdir()
        assert sorted(os.listdir(".")) == ["x", "y"] and Path("x").read_text() == "whole"
        Path("x").unlink()
        Path("y").rmdir()
        with pytest.raises(ValueError), paths.new_directory("--out", place) as partial:
            (partial / "x").touch()
            raise ValueError
        with pytest.raises(ConfigError, match="another process has written there meanwhile"):
            with paths.new_directory("--out", place) as partial:
                (partial / "x").touch()
                Path("theirs").touch()
        assert os.listdir(".") == ["theirs"]
        Path("theirs").unlink()
    assert os.path.samestat(before, os.stat(tmp_path / "link"))
    assert os.stat("..").st_mtime_ns == parent.st_mtime_ns, "nothing was made beside it"


def test_cache_that_cannot_be_written_is_done_without(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert paths.user_cache("cost") is None and cost_file.path_of("", {"device": "x"}) is None
    asked: list[object] = []
    config = types.SimpleNamespace(jax_compilation_cache_dir=None, update=asked.append)
    monkeypatch.setattr(compilation, "jax", types.SimpleNamespace(config=config))
    compilation.use_persistent_cache()
    assert asked == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert paths.user_cache("cost") == tmp_path / "cache" / "specrl_jax" / "cost"
    actual = cost_file.path_of("", {"device": "x"})
    assert actual is not None and actual.parent == paths.user_cache("cost")
