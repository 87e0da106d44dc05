"""Does a drafter fall behind an actor that learns, what brings it back, and what does that cost?

    python experiments/staleness.py --config=staleness
    python experiments/staleness.py --config=staleness --questions=losses,bugs --seeds=0,1,2,3,4
    python experiments/staleness.py --config=staleness --questions=all --seeds=0,1,2,3,4 --plan

A head is trained for the actor as it starts, or given by --head. Then every arm is a whole RL run
from there: without speculation, with the head as it is, and those of the questions:

    modes      each way of training the head (distill.when); `watched` is frozen too,
               and tells how much of what it accepts its actor's entropy explains
    losses     what it learns from, at equal updates and at equal seconds
    intervals  every 1, 3 and 5 steps, at once and one step late
    bugs       verification that keeps the law but not the tokens, and bugs that keep neither: how
               far does the reward curve move?

Under the match rule and with invariant numerics all arms of a seed must say the same tokens; that
they do is checked. Each question has one file, results/NAME_QUESTION.json with the config's name,
to which arms and seeds are added: what it holds is not run again, and an arm that was killed goes
on from its last checkpoint (config.checkpoint_every) in WORKDIR. The same command again also draws
the figure anew. `--plan` tells what is missing and how long it will take. What an arm cannot do is
refused before the first one runs. Intervals are Student's over seeds, and differences are paired by
seed.

Acceptance is that of the rollouts: drafts accepted of the config.spec.steps asked for in each round
of a row. Seconds saved are those of rollouts, seconds ahead those of whole steps, both against the
run without speculation of the same seed; by the second, updates that run beside others have no
hidden cost. Arms of a question take turns, each a step, so that a machine whose speed drifts meets
all alike; arms added later, and those of `bugs`, which asks for no seconds, do not. Seconds mean
something only where nothing else ran, which `load` in the file tells.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import config_flags
import numpy as np
from absl import flags
from bench import results, staleness, staleness_arms
from bench.apart import ProcessDied, train_by_turns
from bench.staleness import PLAIN
from bench.staleness_arms import QUESTIONS

from specrl_jax.config import Config, ConfigError, as_dict, build
from specrl_jax.distill.offline import DRAFTER, DrafterTraining, train_drafter
from specrl_jax.io.compilation import use_persistent_cache
from specrl_jax.io.memory import give_back
from specrl_jax.io.metrics import check_config, read_metrics, write_atomically
from specrl_jax.model.source import open_actor

ALL = "all"
EXIT_DIED = 1  # the same command again goes on
GUESS = 60.0  # seconds of an arm, where none is done yet
TOOK = "took.json"  # in an arm's workdir, once it has ended
CHOSEN = flags.DEFINE_list("questions", ["modes"], f"some of {', '.join(QUESTIONS)}, or {ALL}")
ARMS = flags.DEFINE_list("arms", [], "only these arms of one question, besides plain and frozen")
SEEDS = flags.DEFINE_list("seeds", ["0"], "seeds of the runs")
AT_ONCE = flags.DEFINE_integer("at_once", 9, "arms that take turns, step by step; each holds its "
                               "memory until all have ended", lower_bound=1)
PLAN = flags.DEFINE_bool("plan", False, "run nothing: tell what is missing, and how long it takes")
HEAD_UPDATES = flags.DEFINE_integer("head_updates", 300, "updates of the head before RL",
                                    lower_bound=1)
HEAD = flags.DEFINE_string("head", None, "directory of a trained head, such as train_drafter.py "
                           "writes, that all arms of all seeds start from instead")
OUT = flags.DEFINE_string("out", None, "JSON file of one question (default: "
                          "results/NAME_QUESTION.json in experiments, NAME the config's); the "
                          "figure lies beside it as .png")


def main(config: Config, workdir: Path) -> int:
    asked, seeds = _asked(), _seeds()  # refused before anything runs
    if HEAD.value and flags.FLAGS["head_updates"].present:
        raise ConfigError(f"--head_updates={HEAD_UPDATES.value}: --head is trained already; give "
                          "one of the two")
    files = {question: _open(question, config) for question in asked}
    if PLAN.value:
        for question, names in asked.items():
            plan(question, names, seeds, files[question][1])
        return 0
    use_persistent_cache()
    todo = [(dataclasses.replace(config, seed=seed), workdir / str(seed), question, names,
             *files[question]) for seed in seeds for question, names in asked.items()]
    for one in todo:
        refuse_early(*one)
    try:
        for one in todo:
            add_seed(*one)
    except ProcessDied as died:
        _say(f"error: {died}")
        return EXIT_DIED
    for path, made in files.values():
        for name, found in made["summary"].items():
            _say(f"{name:24} acceptance at the end {found['acceptance_end'][0]:.3f}  reward "
                 f"{found['reward_end'][0]:.3f}  net {found['net_seconds'][0]:+.1f} s  ahead "
                 f"{found['ahead_seconds'][0]:+.1f} s")
        print(f"wrote {path}")
    return 0


# What is asked for, and what is there.


def _seeds() -> list[int]:
    if not SEEDS.value or not all(seed.isdecimal() for seed in SEEDS.value):
        raise ConfigError(f"--seeds={','.join(SEEDS.value)}: give whole numbers")
    return [int(seed) for seed in SEEDS.value]


def _asked() -> dict[str, list[str]]:
    """Question -> its arms, plain and frozen first."""
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
    """The file of a question, and what is in it.

    Raises:
      ConfigError: it was made with other options.
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
    """Whether a file's config is this one but for the seed.

    Fields that came after the file have their defaults, which do what the code did without them.
    """
    try:
        made = build(Config, old)
    except (ConfigError, TypeError):  # a field is gone, a value not allowed, or no config at all
        return False
    return dataclasses.replace(made, seed=0) == dataclasses.replace(config, seed=0)


def plan(question: str, names: list[str], seeds: list[int], made: dict[str, Any]) -> None:
    """Prints what a question still lacks."""
    took, todo = [], 0
    for name in names:
        done = {seed: made["cases"][str(seed)][name] for seed in seeds
                if name in made["cases"].get(str(seed), {})}
        missing = [str(seed) for seed in seeds if seed not in done]
        seconds = [arm["wall_seconds"] for arm in done.values()]
        mean = f"{np.mean(seconds):.0f} s each" if done else "none done"
        took += seconds
        print(f"{question:10} {name:24} {len(done)} of {len(seeds)} seeds, {mean}"
              + (f", missing {','.join(missing)}" if missing else ""))
        todo += len(missing)
    each = float(np.mean(took)) if took else GUESS
    print(f"{question:10} {todo} runs are missing, about {todo * each / 60:.0f} min at "
          f"{each:.0f} s a run; runs that questions share count once for each")


# Running.


def refuse_early(config: Config, workdir: Path, question: str, names: list[str], path: Path,
                 made: dict[str, Any]) -> None:
    """Builds what the missing arms of a seed would start with, heads apart, and lets it go.

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
    """Runs what is missing of a seed, and writes the file after each arm and the figure at the end.

    Raises:
      ProcessDied: names the arm.
    """
    missing = _missing(names, config.seed, made)
    if missing:
        _head(config, workdir, made["heads"])
        give_back()  # arms need it
        new = results.blank(config)
        made |= {name: new[name] for name in ("command", "machine")}
    case = made["cases"].get(str(config.seed), {})
    arms = staleness_arms.configs(config, question, str(_head_of(workdir)))
    at_once = 1 if QUESTIONS[question].together else AT_ONCE.value
    for first in range(0, len(missing), at_once):
        runs = {name: (arms[name], workdir / staleness_arms.place(config, question, name))
                for name in missing[first : first + at_once]}
        _say(f"seed {config.seed}, {question}: {', '.join(runs)}")
        died = _run(runs)
        ended = [] if PLAIN in died else [name for name in runs if name not in died]
        for name in ended:
            place = runs[name][1]
            took = json.loads((place / TOOK).read_text(encoding="utf-8"))
            case[name] = staleness.account(place, arms[name], case.get(PLAIN)) | took
        if ended:
            made["cases"][str(config.seed)] = case
            _conclude(question, path, made)
        if died:
            name, why = next(iter(died.items()))
            raise ProcessDied(f"seed {config.seed}, {question}, arm {name}: {why}") from why
    _conclude(question, path, made)
    staleness.draw(made["cases"], path.with_suffix(".png"), QUESTIONS[question].panels)


def _conclude(question: str, path: Path, made: dict[str, Any]) -> None:
    made["summary"] = staleness.summarize(made["cases"], QUESTIONS[question].reference)
    results.write(path, made)


def _run(runs: dict[str, tuple[Config, Path]]) -> dict[str, ProcessDied]:
    """Runs or resumes arms by turns, and writes each one's seconds, see `wall_seconds`, and the
    load before; returns those that were killed.

    In processes of their own: after some arms in one, programs would fill the memory. What another
    question ran already is not run again, and has the seconds and load that it had then.
    """
    load, at = os.getloadavg()[0], time.time()
    found = train_by_turns({name: one for name, one in runs.items()
                            if not (one[1] / TOOK).exists()})
    for name in [name for name in found if not isinstance(found[name], ProcessDied)]:
        place = runs[name][1]
        took = round(staleness.wall_seconds(read_metrics(place), at, found[name]), 1)
        write_atomically(place / TOOK, [json.dumps({"wall_seconds": took, "load": load})])
    return {name: why for name, why in found.items() if isinstance(why, ProcessDied)}


def _head_of(workdir: Path) -> Path:
    return Path(HEAD.value) if HEAD.value else workdir / "head" / DRAFTER


def _head_updates() -> int:
    """0 where the head is given."""
    return 0 if HEAD.value else HEAD_UPDATES.value


def _head(config: Config, workdir: Path, heads: dict[str, Any]) -> None:
    """Trains the head of a seed where it is missing and none is given.

    Raises:
      ConfigError: it is not the one that the file's arms of this seed started from.
    """
    began = time.perf_counter()
    plain = staleness_arms.plain(config)
    place = _head_of(workdir)
    if not HEAD.value:
        train_drafter(plain, open_actor(plain), _training(config), place.parent)
    checksum = hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
    if HEAD.value:
        known, flag = heads.values(), "head"
    else:
        known, flag = [one for seed, one in heads.items() if seed == str(config.seed)], "workdir"
    if any(one["checksum"] != checksum for one in known):
        raise ConfigError(f"--{flag}: the head in {place} is not the one that arms in the file "
                          "started from; name another file with --out")
    heads.setdefault(str(config.seed), {
        "checksum": checksum, "wall_seconds": round(time.perf_counter() - began, 1)})


def _training(config: Config) -> DrafterTraining:
    """The head's training before RL, on the run's own prompts and the actor's own answers."""
    return DrafterTraining(
        rollout_prompts=config.data.examples, samples=4, eval_prompts=8, eval_every=100,
        draft_vocab=0, steps=HEAD_UPDATES.value, batch_tokens=512, micro_batch_tokens=512,
        unroll=config.distill.unroll, checkpoint_every=100)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
