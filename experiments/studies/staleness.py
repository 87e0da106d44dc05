"""Measures how a drafter falls behind an actor that learns, what restores it, and at what cost.

    python experiments/bench.py staleness --config=staleness
    python experiments/bench.py staleness --config=staleness --questions=losses,bugs \\
        --seeds=0,1,2,3,4

Trains a head for the initial actor (or takes --head), then runs one RL run per arm: without
speculation, with the frozen head, and those of each question:

    modes      each way to train the head during RL (distill.when); `watched` is frozen and
               measures how much of its acceptance the actor's entropy explains
    losses     each distillation loss, at equal updates and at equal seconds
    intervals  training every 1, 3 and 5 steps, at once and one step late
    bugs       rejection, and deliberately broken verification: how far the reward curve moves

Writes results/NAME_QUESTION.json, with the config's name. The same command resumes,
and adds arms and seeds. With the match rule and invariant numerics, unequal tokens are an error.
Arms take turns of one step, so that drift affects all alike. Intervals are Student's over seeds,
paired by seed. Acceptance is accepted / asked drafts; seconds are against the plain run of the
seed: `saved` in rollouts, `net` less the drafter's cost, `ahead` in whole steps.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from absl import flags
from bench import results

from specrl_jax.checkpoint.resume import check_config
from specrl_jax.config import Config, ConfigError, as_dict, build
from specrl_jax.distill.offline import DRAFTER, DrafterTraining, train_drafter
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.digest import digest
from specrl_jax.runtime.machine import give_back
from specrl_jax.runtime.stderr import say

from . import staleness_account, staleness_arms
from .staleness_account import PLAIN
from .staleness_arms import QUESTIONS
from .subprocess_runner import ProcessDied, train_interleaved

ALL = "all"
EXIT_DIED = 1  # the same command resumes
COMPLETE = "complete"  # an empty file in the workdir of an arm that is complete
CHOSEN = flags.DEFINE_list("questions", ["modes"], f"some of {', '.join(QUESTIONS)}, or {ALL}")
ARMS = flags.DEFINE_list("arms", [], "only these arms of one question, besides plain and frozen")
SEEDS = flags.DEFINE_list("seeds", ["0"], "seeds of the runs")
AT_ONCE = flags.DEFINE_integer("at_once", 9, "arms that take turns, step by step; all stay in "
                               "memory", lower_bound=1)
HEAD_UPDATES = flags.DEFINE_integer("head_updates", 300, "updates of the head before RL",
                                    lower_bound=1)
HEAD = flags.DEFINE_string("head", None, "directory of a trained head to start from, such as "
                           "train_drafter.py writes")
OUT = flags.DEFINE_string("out", None, "JSON file of one question (default: "
                          "results/NAME_QUESTION.json in experiments)")


def main(config: Config, workdir: Path) -> int:
    """Runs what the flags ask and is not in the files yet; returns the exit status."""
    chosen, seeds = _chosen(), _seeds()
    if HEAD.value and flags.FLAGS["head_updates"].present:
        raise ConfigError(f"--head_updates={HEAD_UPDATES.value}: --head is trained already; give "
                          "one of the two")
    files = {question: _open(question, config) for question in chosen}
    use_persistent_cache()
    todo = [(dataclasses.replace(config, seed=seed), workdir / str(seed), question, names,
             *files[question]) for seed in seeds for question, names in chosen.items()]
    for one in todo:
        refuse_early(*one)
    try:
        for one in todo:
            add_seed(*one)
    except ProcessDied as died:
        say(f"error: {died}")
        return EXIT_DIED
    for path, made in files.values():
        for name, row in made["summary"].items():
            say(f"{name:24} acceptance at the end {row['acceptance_end'][0]:.3f}  reward "
                f"{row['reward_end'][0]:.3f}  net {row['net_seconds'][0]:+.1f} s  ahead "
                f"{row['ahead_seconds'][0]:+.1f} s")
        print(f"wrote {path}")
    return 0


# Flags and earlier results.


def _seeds() -> list[int]:
    if not SEEDS.value or not all(seed.isdecimal() for seed in SEEDS.value):
        raise ConfigError(f"--seeds={','.join(SEEDS.value)}: give whole numbers")
    return [int(seed) for seed in SEEDS.value]


def _chosen() -> dict[str, list[str]]:
    """Returns question -> arms, plain and frozen first."""
    questions = list(QUESTIONS) if CHOSEN.value == [ALL] else CHOSEN.value
    for name in questions or [""]:
        if name not in QUESTIONS:
            raise ConfigError(f"--questions={name}: choose some of {', '.join(QUESTIONS)}, or "
                              f"{ALL}")
    for flag, value in (("arms", ",".join(ARMS.value)), ("out", OUT.value)):
        if value and len(questions) > 1:
            raise ConfigError(f"--{flag}={value}: belongs to one question; name it alone with "
                              "--questions")
    for name in ARMS.value:
        if name not in QUESTIONS[questions[0]].arms:
            raise ConfigError(f"--arms={name}: choose some of "
                              f"{', '.join(QUESTIONS[questions[0]].arms)}")
    return {question: [PLAIN, staleness_arms.FROZEN, *(ARMS.value or QUESTIONS[question].arms)]
            for question in questions}


def _open(question: str, config: Config) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a question and its content.

    Raises:
      ConfigError: the file was made with other options.
    """
    path = results.destination(OUT.value, f"{config.name}_{question}.json")
    made = results.blank(config) | {"head_updates": _head_updates(), "heads": {}, "summary": {}}
    made["cases"] = results.earlier(path)
    if not made["cases"]:
        return path, made
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, same in (("config", _same_config(before.get("config"), config)),
                       ("head_updates", before.get("head_updates") == _head_updates())):
        if not same:
            raise ConfigError(f"--out={path}: it was made with another {name}; restore it, or name "
                              "another file with --out")
    return path, made | {name: before.get(name, made[name])
                         for name in ("heads", "summary", "command", "machine")}


def _same_config(old: Any, config: Config) -> bool:
    """Returns whether a file's config is this one except for the seed.

    Fields newer than the file have their defaults, which keep the older behaviour.
    """
    try:
        made = build(Config, old)
    except (ConfigError, TypeError):  # an older field or value, or no config
        return False
    return dataclasses.replace(made, seed=0) == dataclasses.replace(config, seed=0)


# Running.


def refuse_early(config: Config, workdir: Path, question: str, names: list[str], path: Path,
                 made: dict[str, Any]) -> None:
    """Checks that the missing arms of a seed can run, before the first one does.

    Raises:
      ConfigError: names the arm that cannot run.
    """
    arms = staleness_arms.configs(config, question, str(_head_of(workdir)))
    for name in _missing(names, config.seed, made):
        try:
            check_config(workdir / staleness_arms.place(config, question, name),
                         as_dict(arms[name]))
            staleness_arms.build(config, question, name, HEAD.value or "")
        except ConfigError as error:
            raise ConfigError(f"{question}, arm {name}: {error}") from error


def _missing(names: list[str], seed: int, made: dict[str, Any]) -> list[str]:
    return [name for name in names if name not in made["cases"].get(str(seed), {})]


def add_seed(config: Config, workdir: Path, question: str, names: list[str], path: Path,
             made: dict[str, Any]) -> None:
    """Runs the missing arms of a seed; writes the file after each group.

    Raises:
      ProcessDied: names the arm.
    """
    missing = _missing(names, config.seed, made)
    if missing:
        _head(config, workdir, made["heads"])
        give_back()  # freed memory, which the arms need
        new = results.blank(config)
        made |= {name: new[name] for name in ("command", "machine")}
    case = made["cases"].get(str(config.seed), {})
    arms = staleness_arms.configs(config, question, str(_head_of(workdir)))
    at_once = 1 if QUESTIONS[question].one_batch else AT_ONCE.value
    for first in range(0, len(missing), at_once):
        runs = {name: (arms[name], workdir / staleness_arms.place(config, question, name))
                for name in missing[first : first + at_once]}
        say(f"seed {config.seed}, {question}: {', '.join(runs)}")
        died = _run(runs)
        ended = [] if PLAIN in died else [name for name in runs if name not in died]
        for name in ended:
            case[name] = staleness_account.account(runs[name][1], arms[name], case.get(PLAIN))
        if ended:
            made["cases"][str(config.seed)] = case
            _conclude(question, path, made)
        if died:
            name, why = next(iter(died.items()))
            raise ProcessDied(f"seed {config.seed}, {question}, arm {name}: {why}") from why
    _conclude(question, path, made)


def _conclude(question: str, path: Path, made: dict[str, Any]) -> None:
    made["summary"] = staleness_account.summarize(made["cases"], QUESTIONS[question].reference)
    results.write(path, made)


def _run(runs: dict[str, tuple[Config, Path]]) -> dict[str, ProcessDied]:
    """Runs or resumes arms in turn, each in a subprocess; returns those that were killed.

    Arms that another question has completed are not run again.
    """
    left = {name: one for name, one in runs.items() if not (one[1] / COMPLETE).exists()}
    died = train_interleaved(left)
    for name in left.keys() - died.keys():
        (left[name][1] / COMPLETE).touch()
    return died


def _head_of(workdir: Path) -> Path:
    return Path(HEAD.value) if HEAD.value else workdir / "head" / DRAFTER


def _head_updates() -> int:
    """Returns the updates of the head before RL; 0 with --head."""
    return 0 if HEAD.value else HEAD_UPDATES.value


def _head(config: Config, workdir: Path, heads: dict[str, Any]) -> None:
    """Trains the head of a seed unless it is there or given.

    Raises:
      ConfigError: it is another head than the one that earlier arms started from.
    """
    plain = staleness_arms.plain(config)
    place = _head_of(workdir)
    if not HEAD.value:
        train_drafter(plain, _training(config), place.parent)
    checksum = digest([(place / "model.safetensors").read_bytes()])
    if HEAD.value:
        known, flag = heads.values(), "head"
    else:
        known, flag = [one for seed, one in heads.items() if seed == str(config.seed)], "workdir"
    if any(one["checksum"] != checksum for one in known):
        raise ConfigError(f"--{flag}: the head in {place} is not the one that arms in the file "
                          "started from; name another file with --out")
    heads.setdefault(str(config.seed), {"checksum": checksum})


def _training(config: Config) -> DrafterTraining:
    """Returns the options of the head's training before RL, on the run's prompts."""
    return DrafterTraining(
        rollout_prompts=config.data.examples, samples=4, eval_prompts=8, eval_every=100,
        draft_vocab=0, steps=HEAD_UPDATES.value, batch_tokens=512, micro_batch_tokens=512,
        unroll=config.distill.unroll, checkpoint_every=100)
