"""`specrl_gsm8k`: the public GSM8K files (arXiv:2110.14168), from a directory or downloaded.

TFDS's own catalogue has a `gsm8k` with other features, hence the prefix.
"""

import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.util import DownloadError

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.data.datasets.tfds_text import OrderedTextBuilder, Rows, read
from specrl_jax.runtime.json_lines import read_json_lines
from specrl_jax.runtime.paths import local_path

NAME = "specrl_gsm8k"
HOMEPAGE = "https://github.com/openai/grade-school-math"
URL = ("https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
       "{split}.jsonl")
SPLITS = ("train", "test")
FIRST_ID = {"train": 0, "test": 1_000_000}
HOW_TO_GET = ("put train.jsonl or test.jsonl or both (or .jsonl.gz) there, from "
              f"{HOMEPAGE} (grade_school_math/data), or name another directory in data.manual_dir")


def load(data: DataConfig, say: Callable[[str], None]) -> Rows:
    """Returns a split of GSM8K, from `data.manual_dir` if it is set, else downloaded. Raises
    ConfigError if files are missing or damaged, prepared data was made from other files, or as
    `tfds_text.read` does."""
    if not data.manual_dir:
        return read(NAME, data, say)
    files = find_files(data.manual_dir)
    check(bool(files), "data.manual_dir", data.manual_dir, f"no files; {HOW_TO_GET}")
    rows = read(NAME, data, say)
    check_source(rows, data, files)
    return rows


def check_source(rows: Rows, data: DataConfig, files: Mapping[str, Path]) -> None:
    """Raises ConfigError if prepared rows, those that a run uses, are not those of the files."""
    parts = {split: read_rows(path) for split, path in files.items()}
    wanted = {FIRST_ID[split] + i: row for split, part in parts.items()
              for i, row in enumerate(part)}
    used = [rows[i] for i in range(min(data.examples or len(rows), len(rows)))]
    same = all(row == {"id": row["id"]} | wanted.get(row["id"], {}) for row in used)
    if data.split in parts and not data.examples:
        same &= len(used) == len(parts[data.split])
    if not same:
        raise ConfigError(f"data.manual_dir = {data.manual_dir!r}: {rows.place} was prepared from "
                          f"other files; delete it to use these, or set another data.data_dir")


class SpecrlGsm8k(OrderedTextBuilder):
    """Builds the splits whose files are in the manual directory; without any, downloads both."""

    RELEASE_NOTES = {"1.0.0": "First release."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"Not needed if there is a network; otherwise {HOW_TO_GET}."

    def _info(self) -> tfds.core.DatasetInfo:
        return self.text_info("Grade school mathematics problems with worked answers.", HOMEPAGE)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        try:
            paths = find_files(dl_manager.manual_dir)
        except AssertionError:  # TFDS raises it if the directory is missing or empty
            paths = {}
        rows = {s: read_rows(p) for s, p in (paths or _download(dl_manager)).items()}
        return {s: self._generate_examples(FIRST_ID[s], x) for s, x in rows.items()}

    def _generate_examples(self, first_id: int, rows: list[dict[str, str]]
                           ) -> Iterator[tuple[int, dict[str, Any]]]:
        for id, row in enumerate(rows, first_id):
            yield id, {"id": id, **row}


def find_files(directory: Any) -> dict[str, Path]:
    """Returns the split files in `directory`, by split; a plain file wins over a gzipped one."""
    paths = ((split, local_path("data.manual_dir", directory) / f"{split}.jsonl{ending}")
             for split in SPLITS for ending in (".gz", ""))
    return {split: path for split, path in paths if path.is_file()}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns question, answer and solution of each line of a GSM8K file. Raises ConfigError if
    there is no problem, or a line is not one of GSM8K's."""
    rows = [_problem(row, f"{path}:{number}") for number, row in read_json_lines(path)]
    if not rows:
        raise ConfigError(f"{path}: holds no problems; get it again from {HOMEPAGE}")
    return rows


def _problem(row: Any, where: str) -> dict[str, str]:
    try:
        question, solution = row["question"], row["answer"]
        _, answer = solution.split("####")
        answer = answer.strip().replace(",", "")
        if not answer or not isinstance(question, str):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(row)[:60]!r} is no GSM8K problem; it needs the fields "
                          '"question" and "answer", with "#### NUMBER" in it') from error
    return {"question": question, "answer": answer, "solution": solution}


def _download(dl_manager: tfds.download.DownloadManager) -> dict[str, Path]:
    urls = {split: URL.format(split=split) for split in SPLITS}
    try:
        _check_reachable(urls["train"])
        paths: Any = dl_manager.download(urls)
    except (OSError, DownloadError) as error:
        raise ConfigError(f"data.name = 'gsm8k': no files in {dl_manager.download_dir / 'manual'} "
                          f"and the download failed; {HOW_TO_GET}") from error
    return {split: Path(path) for split, path in paths.items()}


def _check_reachable(url: str) -> None:
    """Raises OSError at once if there is no network; TFDS itself retries for minutes."""
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10):
        pass
