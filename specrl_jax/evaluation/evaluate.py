"""Accuracy of a model on problems, and comparison of two evaluations of the same problems."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, check, override
from specrl_jax.config.tasks import STOP
from specrl_jax.data.prompts import Prompts, make_prompts, prompt_batches
from specrl_jax.evaluation.statistics import bootstrap, interval, pass_at_k
from specrl_jax.metrics.progress import Progress
from specrl_jax.model.source import Actor, open_actor
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.rewards import judge
from specrl_jax.rewards.scoring import score_rollout
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.rollout.state import RolloutInputs
from specrl_jax.runtime.digest import digest
from specrl_jax.structs import Json, Rollout
from specrl_jax.verify.registry import RULES

SEQUENCES_AT_ONCE = 4096  # of one rollout: enough that its tail of few live rows does not count
CORRECTNESS = ("latex", "reasoning_gym")  # rewards that are 1 where an answer is correct
COUNTERS = ("committed", "row_rounds")


def task_config(config: Config) -> Config:
    """Returns `config` with the data and temperature of its `eval` section."""
    task = config.eval
    return override(config, {"data.split": task.split, "data.path": task.path or config.data.path,
                             "data.examples": task.examples,
                             "rollout.temperature": task.temperature})


def reward_of(config: Config) -> str:
    """Returns the name of the reward that decides what is correct.

    That is `eval.reward`. Without one it is `exact`, unless the config does not use that, but one
    of CORRECTNESS or a function of the user's own.
    """
    terms = config.reward.terms
    own = [name for name in terms if name in CORRECTNESS or ":" in name]
    return config.eval.reward or ("exact" if "exact" in terms or not own else own[0])


class Problems:
    """The problems of `config.eval`, and the judge of their answers.

    Raises:
      ConfigError: see `make_prompts` and `judge.of_config`.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, say: Callable[[str], None],
                 warn: Callable[[str], None]) -> None:
        self.samples, self.reward, self.tokenizer = (
            config.eval.samples, reward_of(config), tokenizer)
        failure = STOP if config.reward.on_failure == STOP else "0"
        self.judge = judge.of_config(dataclasses.replace(
            config.reward, terms=(self.reward,), weights=(1.0,), on_failure=failure), warn)
        self.prompts = make_prompts(task_config(config), tokenizer, say)
        judge.check_answers((self.reward,), self.prompts.examples)

    def at_once(self, shards: int) -> int:
        """Returns the prompts of each rollout of an engine that is made for these problems."""
        return prompts_at_once(len(self.prompts.tokens), self.samples, shards)

    def solve(self, sampler: Sampler, state: RolloutInputs, at_once: int, progress: Progress
              ) -> "Tally":
        """Generates and judges all answers. `sampler` takes `at_once` prompts a call; what
        speculation learns is passed from call to call, and dropped in the end."""
        tally = Tally(self.prompts, self.tokenizer, self.samples, self.judge)
        progress.phase("evaluating")
        policy, drafter, speculation = state
        for batch in prompt_batches(self.prompts, at_once):
            rollout, speculation, result = sampler.generate(
                batch, policy, drafter, speculation, "eval", 0, progress=progress.rollout)
            if result.counters["broken"]:
                drafter = drafter.replace(enabled=False)
            tally.add(rollout, result)
        return tally


def evaluate(config: Config, actor: Actor | None = None, progress: Progress | None = None) -> Json:
    """Generates `eval.samples` answers to each problem and judges them by `reward_of`.

    Args:
      config: its eval, data, rollout, spec, control and mesh sections are read, and its seed.
      actor: see `open_actor`; None is the model at config.model.path.

    Returns:
      JSON values by name, as `experiments/eval.py --out` writes them.

    Raises:
      ConfigError: see `Problems` and `sampler.Sampler`.
    """
    actor, progress = actor or open_actor(config), progress or Progress(1, 0)
    problems = Problems(config, actor.source.tokenizer, progress.say, progress.warn)
    config = task_config(config)
    mesh = sharding.make_mesh(config.mesh)
    at_once = problems.at_once(sharding.shard_count(mesh))
    progress.say(f"loading {actor.name}")
    sampler, state = Sampler.from_config(config, prompts=at_once, group=problems.samples,
                                         actor=actor)
    state = sampler.prepare(state, progress.say)
    with progress:
        tally = problems.solve(sampler, state, at_once, progress)
    return _describe(config, actor) | {
        "device": mesh.devices.flat[0].device_kind, "samples": problems.samples,
        "reward": problems.reward} | tally.results()


def prompts_at_once(problems: int, samples: int, shards: int) -> int:
    """Returns the prompts of each rollout: equal parts with as little padding as possible."""
    rollouts = -(-problems * samples // SEQUENCES_AT_ONCE)
    share = -(-problems // rollouts)
    return -(-share // shards) * shards


class Tally:
    """Accumulates scored answers, and what they cost."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer, samples: int, reward: judge.Judge
                 ) -> None:
        self.prompts, self.tokenizer, self.reward = prompts, tokenizer, reward
        self.correct = np.zeros((len(prompts.tokens), samples), np.int32)
        self.length = np.zeros_like(self.correct)
        self.stopped = np.zeros_like(self.correct)
        self.seconds, self.counters = 0.0, dict.fromkeys(COUNTERS, 0)

    def add(self, rollout: Rollout, result: Result) -> None:
        """Scores a rollout; prompts that only fill it up do not count."""
        rewards = score_rollout(rollout, self.prompts, self.tokenizer, self.reward).rewards
        for q in np.flatnonzero(rollout.occurrence == 0):
            at = self.prompts.index_of[int(rollout.prompt_id[q])], int(rollout.sample_id[q])
            self.correct[at], self.length[at] = rewards[q] >= 1, rollout.length[q]
            self.stopped[at] = rollout.stopped[q]
        self.seconds += result.seconds
        for name in COUNTERS:
            self.counters[name] += result.counters[name]

    def results(self) -> Json:
        """Returns accuracy with its interval, pass@k, speed and the answers, by name."""
        share, samples = self.correct.mean(1), self.correct.shape[1]
        low, high, method = interval(share.tolist())
        ks = [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples]
        passed = {k: [pass_at_k(samples, int(c), k) for c in self.correct.sum(1)] for k in ks}
        return {
            "accuracy": float(share.mean()), "interval": [low, high], "interval_method": method,
            "pass_at": {str(k): {"mean": float(np.mean(x)), "interval": interval(x)[:2],
                                 "interval_method": interval(x)[2]} for k, x in passed.items()},
            "tokens": int(self.length.sum()), "seconds": self.seconds,
            "tokens_per_second": int(self.length.sum()) / self.seconds,
            "accept_length": self.counters["committed"] / self.counters["row_rounds"],
            "mean_length": float(self.length.mean()), "stopped": float(self.stopped.mean()),
            "problems": list(self.prompts.index_of),
            "questions_sha256": questions_digest(self.prompts),
            "correct": self.correct.tolist()}


def _describe(config: Config, actor: Actor) -> Json:
    rollout, data = config.rollout, config.data
    return {
        "model": actor.source.source, "run": actor.run and str(actor.run), "step": actor.step,
        "data": {"name": data.name, "level": data.level, "split": data.split,
                 "system": data.system},
        "temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "max_new_tokens": rollout.max_new_tokens, "seed": config.seed,
        "drafter": config.spec.drafter if config.control.policy != "off" else "off",
        "rule": config.spec.rule, "lossy": not RULES.resolve(config.spec.rule).lossless,
        "dtype": config.model.dtype}


def questions_digest(prompts: Prompts) -> str:
    """Returns the digest of all questions and answers."""
    examples = (prompts.examples[i] for i in range(len(prompts.tokens)))
    return digest(f"{x['question']}\0{x['answer']}\0".encode() for x in examples)


def read_evaluation(path: Path) -> Json:
    """Reads an evaluation that was written earlier. Raises ConfigError if the file is missing or
    holds something else."""
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; give a file that eval.py --out wrote") from error
    for name in ("problems", "questions_sha256", "correct", "data"):
        if not isinstance(stored, dict) or name not in stored:
            raise ConfigError(f"{path}: no {name} in it; give a file that eval.py --out wrote")
    try:
        whole = np.asarray(stored["correct"], np.float64).ndim == 2 and (
            len(stored["problems"]) == len(stored["correct"])) and (
            {"name", "level", "split"} <= stored["data"].keys())
    except (TypeError, ValueError, AttributeError):
        whole = False
    check(whole, "--baseline", str(path), "its correct, problems or data are of another type; give "
          "a file that eval.py --out wrote")
    return stored


def check_same_problems(baseline: Json, now: Json) -> None:
    """Refuses a baseline of other data or another reward before anything is generated: `data` and
    `reward` of both are compared. See also `paired`."""
    for name in ("name", "level", "split"):
        if baseline["data"][name] != now["data"][name]:
            raise ConfigError(f"data.{name} = {now['data'][name]!r}: the baseline is about "
                              f"{baseline['data'][name]!r}; compare on the same problems")
    before = baseline.get("reward", "exact")  # files of earlier versions have none
    check(before == now["reward"], "--reward", now["reward"],
          f"the baseline was judged by {before!r}; judge both by the same reward")


def paired(baseline: Json, now: Json) -> Json:
    """Returns the difference in accuracy on the same problems, `now` minus `baseline`.

    The 95 % interval is a percentile bootstrap over problems of their paired differences.

    Raises:
      ConfigError: the problems are not the same.
    """
    check_same_problems(baseline, now)
    for name in ("problems", "questions_sha256"):
        if baseline[name] != now[name]:
            raise ConfigError(f"--baseline: its {name.partition('_')[0]} differ from this "
                              f"evaluation's (it has {len(baseline['problems'])} problems, this "
                              f"{len(now['problems'])}); evaluate both on the same ones")
    before, after = (np.mean(x["correct"], 1) for x in (baseline, now))
    difference = after - before
    return {"baseline_accuracy": float(before.mean()), "difference": float(difference.mean()),
            "interval": list(bootstrap(difference)), "interval_method": "paired bootstrap",
            "better": int((difference > 0).sum()), "worse": int((difference < 0).sum())}
