"""Which config fields and which examples a resumed run must share with the run as it was left.

A field is one of three kinds. Changing a FREE one changes nothing that is computed. Changing one of
EQUAL leaves tokens equal except where rounding decides between two, or rewards except for slow
answers; a line says so, and parts of the checkpoint that depend on it start anew. All others
are refused.
"""

import datetime
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specrl_jax.config import ConfigError, check
from specrl_jax.config.tasks import STOP
from specrl_jax.runtime import processes
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.paths import output_directory
from specrl_jax.runtime.workdir import (
    BEST_FILE,
    CONFIG,
    METRICS,
    REPORT,
    SAMPLES,
    flat,
    read_config,
    read_object,
)
from specrl_jax.structs import Json

DATA, RENDERED = "data.json", "rendered"
ABSENT = "(absent)"  # a field that only one of two versions of this package has
FREE = ("name", "steps", "checkpoint_every", "checkpoint_keep", "learner.max_bad_steps",
        "mesh.fallback", "reward.workers", "rollout.stop", "rollout.repetition_penalty",
        "data.date", "data.data_dir", "data.manual_dir", "data.path", "eval", "track")
PATH_FIELDS = ("model.path", "data.data_dir", "data.manual_dir", "data.path", "eval.path",
               "draft.path", "draft.model", "rl.teacher", "control.cost_table")  # hosts may differ
LOSS, SPEED = "losses within rounding", "accept lengths and times not"
LIMIT = "rewards stay equal except for answers that exceed a limit"
# By name, or by whole section. Under a rule but `match`, tokens are drawn otherwise if one of SPEED
# changes.
EQUAL: Mapping[str, str] = {
    "learner.micro_batch": LOSS, "learner.packing": LOSS, "learner.tokens_per_row": LOSS,
    "learner.remat": LOSS, "learner.optimizer_offload": LOSS, "mesh": LOSS,
    "rollout.batch_size": SPEED, "rollout.min_batch": SPEED, "rollout.rounds_per_launch": SPEED,
    "rollout.max_prompt_tokens": SPEED, "spec": SPEED, "draft": SPEED,
    "distill": SPEED, "control": SPEED, "reward.seconds": LIMIT}
RULE = "spec.rule"
STOPPED = ("reward.on_failure", json.dumps(STOP))  # field and value: no answer has counted by it
# Parts of a checkpoint that start anew where a field of these sections changed.
RENEWED: Mapping[str, tuple[str, ...]] = {
    "control": ("spec", "draft", "control", "mesh", "rollout"), "acceptance": ("spec", "draft"),
    "drafter": ("spec.drafter", "draft", "distill")}


def check_config(workdir: str | Path, config: Json, equal: Collection[str] = ()) -> dict[str, str]:
    """Checks that a working directory, perhaps absent or empty, is that of this config.

    Args:
      equal: fields and sections that may differ, such as EQUAL.

    Returns:
      "NOW (was BEFORE)" of those that do, by name.

    Raises:
      ConfigError: the directory cannot be written, or one of a run's files is a directory there;
        config.json differs in another field, has another format, cannot be read, or is missing
        although metrics.jsonl is there.
    """
    workdir = output_directory("workdir", workdir, new=False)
    for name in (CONFIG, METRICS, SAMPLES, BEST_FILE, DATA, REPORT):
        check(not (workdir / name).is_dir(), "workdir", str(workdir),
              f"{name} is a directory there; choose another workdir")
    stored = read_config(workdir)
    if stored is None:
        return {}
    old, new = flat(stored), flat(config)
    if old.get(RULE) != "match":
        equal = [name for name in equal if EQUAL.get(name) != SPEED]
    texts = {field: tuple(json.dumps(of[field]) if field in of else ABSENT for of in (old, new))
             for field in sorted(old.keys() | new.keys())}
    differ = {field: pair for field, pair in texts.items()
              if pair[0] != pair[1] and not among(field, FREE) and (field, pair[0]) != STOPPED}
    refused = [field for field, pair in differ.items()
               if field == RULE or ABSENT in pair or not among(field, equal)]
    if refused:
        raise _refused(workdir, refused, *differ[refused[0]])
    return {field: f"{now} (was {before})" for field, (before, now) in differ.items()}


def check_same(config: Json) -> None:
    """Checks that all processes of a run were given the same config, except for paths of files.
    Raises ConfigError naming the first field that differs."""
    mine = flat(json.loads(json.dumps(config)))
    for other, field, theirs in _differing("the config", mine):
        check(field in PATH_FIELDS, field, mine.get(field, ABSENT),
              f"process {other} has {theirs!r}; give all processes the same flags, and the same "
              "version of this package")


def check_contents(config: Json, contents: Mapping[str, Mapping[str, str]]) -> None:
    """Checks that what the paths of files hold is the same in all processes of a run. Raises
    ConfigError naming the first field whose content differs.

    Args:
      contents: digests by the config field that names the path, and by what they are of.
    """
    mine = {f"{field} {part}": value for field, digests in contents.items()
            for part, value in digests.items()}
    for other, name, _ in _differing("the files", mine):
        field, _, part = name.partition(" ")
        check(False, field, flat(config)[field], f"process {other} has different contents for it "
              f"({part}); give all processes the same files")


def _differing(name: str, mine: Json) -> Iterator[tuple[int, str, Any]]:
    """Yields (process, key, its value) wherever another process has another value."""
    for other, values in enumerate(processes.share(name, mine)):
        for key in mine | values:
            if values.get(key, ABSENT) != mine.get(key, ABSENT):
                yield other, key, values.get(key, ABSENT)


def _refused(workdir: Path, fields: list[str], before: str, now: str) -> ConfigError:
    more = f" ({', '.join(fields[1:4])} also changed)" if len(fields) > 1 else ""
    restore = ("go on with the version that started it" if ABSENT in (before, now)
               else "restore the value")
    return ConfigError(f"{fields[0]} = {now}, but the run in {workdir} was started with {before}"
                       f"{more}: {restore}, or choose another workdir")


def among(field: str, names: Iterable[str]) -> bool:
    """Returns whether a dotted field is one of the names, or in a section among them."""
    return any(f"{field}.".startswith(f"{name}.") for name in names)


def describe_changes(changed: Mapping[str, str]) -> str:
    """Returns the line about a resume with other values: what stays equal, what need not, and what
    starts anew."""
    kinds = {kind: None for field in changed for name, kind in EQUAL.items()
             if among(field, [name])}
    parts, rounding = ", ".join(sorted(renewed(changed))), [x for x in kinds if x != LIMIT]
    effects = [*(["tokens stay equal except where rounding decides", ", ".join(rounding)]
                 if rounding else []), *([LIMIT] if LIMIT in kinds else []),
               *([f"these parts of the checkpoint start anew: {parts}"] if parts else [])]
    return (f"resuming with {', '.join(f'{field} = {text}' for field, text in changed.items())}: "
            + "; ".join(effects))


def renewed(changed: Iterable[str]) -> set[str]:
    """Returns the parts of a checkpoint that start anew after these fields changed."""
    return {part for part, sections in RENEWED.items()
            if any(among(field, sections) for field in changed)}


def check_data(workdir: Path, digests: dict[str, str]) -> None:
    """Checks that a run has the examples that it was started with; records those that are new
    to it.

    Args:
      digests: `data.examples.digest` of each part of the data, by its name.

    Raises:
      ConfigError: they differ, or DATA cannot be read.
    """
    path = workdir / DATA
    stored = read_object(path) or {}
    for name, value in digests.items():
        if stored.get(name, value) != value:
            raise ConfigError(f"data: the {name} examples are not those that the run in {workdir} "
                              f"was started with (data.data_dir, data.manual_dir, data.path); "
                              f"restore them, or choose another workdir")
    if jax.process_index() == 0 and not digests.keys() <= stored.keys():
        write_atomically(path, json.dumps(stored | digests) + "\n")


def check_rendering(workdir: Path, name: str, texts: Sequence[str], warn: Callable[[str], None]
                    ) -> None:
    """Warns of prompts that the chat template renders otherwise than when the run was started.

    A template may hold the date. The first call records a checksum of each prompt, after
    `check_data`, which refuses other examples; `name` is the part of the data.
    """
    now = [digest([text])[:8] for text in texts]
    path, key = workdir / DATA, f"{RENDERED} {name}"
    stored = read_object(path) or {}
    if (then := stored.get(key)) is None:
        if jax.process_index() == 0:
            record = {"on": datetime.date.today().isoformat(), "digests": now}
            write_atomically(path, json.dumps(stored | {key: record}) + "\n")
    elif then["digests"] != now:
        differs = [a != b for a, b in zip(now, then["digests"], strict=False)]
        first = differs.index(True) if True in differs else 0
        warn(f"the chat template renders the {name} prompts otherwise than when the run was "
             f"started on {then['on']}, first number {first}: {texts[first][:60]!r}...; if it "
             f"holds the date, data.date={then['on']} restores them")
