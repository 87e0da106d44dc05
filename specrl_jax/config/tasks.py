"""Options of what a run works on: prompts, rewards, evaluation, and who shows its metrics."""

import dataclasses
import datetime
import math
import re

from specrl_jax.config.fields import ConfigError, Section, check, option

STOP = "stop"  # of reward.on_failure


class RewardError(ConfigError):
    """A reward raised or returned no finite number; the message names reward, example, answer."""


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, prefix="data"):
    """The prompts."""

    name: str = option("specrl_arithmetic", "dataset: specrl_arithmetic, gsm8k, jsonl, hf (extra "
                       "`hf`), reasoning_gym (extra `tasks`), or package.module:function that "
                       "returns a sequence of dicts")
    path: str = option("", "jsonl: a file with one JSON object per line, gzipped or not, a "
                       "pattern, or several with commas; hf: ORG/NAME of the hub, a directory, "
                       "or a file")
    question_field: str = option("question", "field with the user's message, or with a list of "
                                 "chat messages that ends with it")
    answer_field: str = option("answer", "field with the expected answer")
    split: str = option("train", "specrl_arithmetic, gsm8k, hf, reasoning_gym: split to train on")
    subset: str = option("", "hf: configuration of the dataset")
    task: tuple[str, ...] = option((), "reasoning_gym: tasks, each as NAME:WEIGHT,OPTION=VALUE, "
                                   "such as chain_sum:2,min_terms=2,max_terms=3")
    seed: int = option(0, "reasoning_gym: seed of the examples", within="[0, 2000)")
    data_dir: str = option("", "TFDS directory; empty means TFDS's own, ~/tensorflow_datasets")
    manual_dir: str = option("", "directory with gsm8k's train.jsonl[.gz] and test.jsonl[.gz]")
    level: str = option("add2", "specrl_arithmetic: add1, add2, add3, sub2, mul1, mixed2 "
                                "(operation and digits), or chain (four numbers, step by step)")
    examples: int = option(0, "use only the first N examples; 0 is all of them", low=0)
    system: str = option("", "system message; empty means none")
    template: tuple[str, ...] = option((), "variables of the chat template, each as NAME=VALUE, "
                                       "such as enable_thinking=False")
    date: str = option("", "date that the chat template sees as today's, such as 2026-01-31; empty "
                       "is the day on which a process starts")
    long_prompts: str = option(
        "refuse", "prompts longer than rollout.max_prompt_tokens: refuse the run, or drop these "
        "prompts and say how many", choose=("refuse", "drop"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.template:
            check(re.match(r"[A-Za-z_]\w*=", text) is not None
                  and not text.startswith(("messages=", "add_generation_prompt=")),
                  "data.template", text, "give NAME=VALUE, such as enable_thinking=False")
        try:
            datetime.date.fromisoformat(self.date or "2026-01-31")
        except ValueError:
            self.check(False, "date", "give a date as YYYY-MM-DD")
        self.check(bool(self.name), "name", "name a dataset")


@dataclasses.dataclass(frozen=True)
class RewardConfig(Section, prefix="reward"):
    """The reward is the weighted sum of its terms."""

    terms: tuple[str, ...] = option(("exact",), "exact, exact_only, has_answer_marker, "
                                    "digit_fraction, latex, reasoning_gym, or "
                                    "package.module:function")
    weights: tuple[float, ...] = option((1.0,), "one weight per term")
    workers: int = option(0, "processes that judge responses; 0: rewards run in the training "
                             "process, which a crash ends, and latex in one worker per core", low=0)
    seconds: float = option(2.0, "CPU seconds of a worker per response; beyond them latex scores "
                                 "it wrong, any other reward fails", within="(0, 86400]")
    on_failure: str = option(STOP, "a term that raises, hangs or dies in a worker, or returns no "
                             "finite number: stop ends the run with its example, a number is what "
                             "the term counts as; samples.jsonl says where")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(len(self.terms) > 0, "terms", "name at least one reward")
        self.check(self.on_failure == STOP or _is_finite(self.on_failure), "on_failure",
                   f"give {STOP}, or a number such as 0")
        self.check(len(self.terms) == len(self.weights), "weights",
                   f"give one weight for each of the {len(self.terms)} terms")
        self.check(len(set(self.terms)) == len(self.terms), "terms", "name each term once")
        self.check(all(map(math.isfinite, self.weights)), "weights", "must be finite")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section, prefix="eval"):
    """Evaluation: which problems, how many answers to each, and how often in a run."""

    every: int = option(0, "steps of a run between evaluations on held-out problems; the best "
                           "checkpoint is kept; 0 is none", low=0)
    split: str = option("test", "split of the data that is held out, such as test or test[:50%]")
    path: str = option("", "data.path of what is held out, where the data has no splits; empty is "
                           "data.path")
    examples: int = option(200, "use the first N problems; 0 is all of them", low=0)
    samples: int = option(1, "k, responses per problem; with group_size of them, a run "
                             "without greedy_baseline compiles nothing more", low=1)
    temperature: float = option(0.0, "0 is greedy", low=0)
    reward: str = option("", "a response is correct where this reward is at least 1: exact, latex "
                             "or package.module:function; empty is exact, or the run's own where "
                             "it does not use exact")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.samples == 1 or self.temperature > 0, "samples", "at temperature 0 all "
                   "answers are the same; set eval.temperature = 1, or 1 sample")


@dataclasses.dataclass(frozen=True)
class TrackConfig(Section, prefix="track"):
    """Where metrics are shown besides metrics.jsonl."""

    to: tuple[str, ...] = option(("tensorboard",), "tensorboard (WORKDIR/events), wandb (extra "
                                 "`wandb`; WANDB_MODE=offline needs no network), jsonl (nothing "
                                 "besides the run's own files), or package.module:name")
    project: str = option("specrl_jax", "wandb: project")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(len(set(self.to)) == len(self.to), "to", "name each tracker once")
