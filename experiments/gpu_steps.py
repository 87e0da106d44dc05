"""Times GRPO steps of a model with random weights: without drafts, with replayed ones, with a head.

    python experiments/gpu_steps.py
    python experiments/gpu_steps.py --model=qwen2_5_0_5b

Writes results/gpu_steps_PLATFORM.json: the seconds of each step by part, tokens/s of the policy
update and its share of the device's peak. Then the same steps again with drafts that replay the
first run's tokens, of which 0.7 are right, and with an EAGLE-3 head that starts from random weights
and learns in each step: this shows what its training costs, not what it gains. Needs the project's
dependencies (pip install -e .); without one of them it says so and does nothing.
"""

import dataclasses
import gc
import itertools
import sys
from collections.abc import Mapping
from typing import Any

from bench import standalone  # isort: skip (it sets the path)

import jax
import numpy as np
from bench import hardware
from studies.replay import replaying

from specrl_jax.config import Config, load_config, override
from specrl_jax.draft.registry import DrafterContext, DrafterPart
from specrl_jax.draft.response_cache import EMPTY

try:
    from specrl_jax.data.prompts import Prompts
    from specrl_jax.model import weights
    from specrl_jax.model.tensors import EMBED, HEAD, Part, Tensors
    from specrl_jax.training.trainer import Trainer
except ModuleNotFoundError as missing:
    print(f"skipped: gpu_steps.py needs the package {missing.name}: pip install -e .")
    sys.exit()

STEPS, ACCEPTANCE = 3, 0.7
HEAD_LEARNS = {"spec.drafter": "eagle", "distill.when": "interval", "distill.batch": 4,
               "distill.micro_batch": 4, "distill.updates": 1, "distill.megabytes": 8192}
ARMS = {"off": {"control.policy": "off"}, f"replay, acceptance {ACCEPTANCE}": {},
        "eagle, learns": HEAD_LEARNS}
# Of random embeddings: the last token then decides the next one by far. At near ties, bfloat16
# would let the drafted run leave the recorded one, and drafts be wrong from there on.
SCALE = 25
SHAPES = {"prompts_per_step": 8, "group_size": 8, "rollout.batch_size": 16,
          "rollout.max_prompt_tokens": 256, "rollout.max_new_tokens": 512,
          "learner.micro_batch": 8, "learner.remat": "full", "model.dtype": "bfloat16"}
TINY = {"prompts_per_step": 2, "group_size": 2, "rollout.batch_size": 4,
        "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 24, "learner.micro_batch": 4}
TOLD = ("time/", "learn/tokens_per_second", "learn/mfu", "rollout/accept_length")
_calls = itertools.count()


def main() -> int:
    """Runs the arms that are left; returns the exit status."""
    default = f"gpu_steps_{hardware.first_device().platform}.json"
    flags = standalone.parser(__doc__, default)
    flags.add_argument("--model", default="qwen2_5_1_5b", help="one of random:NAME")
    args = flags.parse_args()
    model = "tiny" if args.tiny else args.model
    results = standalone.Results(args.out, default, {
        "command": standalone.command(), "machine": hardware.machine()}, args.seconds)
    plan = {f"{model}, {arm}": values for arm, values in ARMS.items()}
    recording = Recording()
    for name, values in plan.items() if results.left(plan) else ():  # the first one records
        if not results.in_time():
            break
        case = steps(override(config_of(model, args.tiny), values), recording)
        results.add(name, case)
        print(f"{name}: {case['steps'][-1]}", flush=True)
        jax.clear_caches()
        gc.collect()  # a trainer's cycles hold its arrays
    return results.finish(plan)


def config_of(model: str, tiny: bool) -> Config:
    """Returns what the arms share, with drafts of 7 tokens."""
    shapes = TINY if tiny else SHAPES
    return override(load_config("tiny"), shapes | {
        "model.path": f"random:{model}", "rollout.min_batch": shapes["rollout.batch_size"],
        "learner.packing": "sequence",
        "reward.terms": (f"{__name__}:alternate",), "spec.drafter": f"{__name__}:replayed",
        "spec.history_past": shapes["group_size"], "spec.depth": 7,
        "spec.branch": 1, "spec.nodes": 8, "spec.max_depth": 7, "spec.max_branch": 1,
        "spec.max_nodes": 8, "spec.max_packed": 8 * shapes["rollout.batch_size"],
        "control.policy": "fixed", "control.min_survival": 0.0, "distill.when": "off"})


def replayed(context: DrafterContext) -> DrafterPart:
    """Returns the drafter that replays recorded tokens, of which ACCEPTANCE are right."""
    return replaying(context, 1 - ACCEPTANCE)


def steps(config: Config, recording: "Recording") -> dict[str, Any]:
    """Runs the steps of one arm; returns its case of the result file."""
    source = weights.describe_source(config.model.path)
    source = dataclasses.replace(source, tensors=_scaled(source.tensors))
    trainer: Any = Trainer(config, source, prompts(config), lambda text: None)
    trainer.responses = recording
    trainer.compile(lambda text: None)
    found = [trainer.step()[0] for _ in range(STEPS)]
    return {"model": config.model.path, "sequences": config.prompts_per_step * config.group_size,
            "rows": config.rollout.batch_size, "prompt_tokens": config.rollout.max_prompt_tokens,
            "new_tokens": config.rollout.max_new_tokens, "dtype": config.model.dtype,
            "steps": [_told(metrics) for metrics in found]}


class Recording:
    """Stands for a trainer's `ResponseCache`: a step reads what was first generated in it, in the
    order of its samples."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], np.ndarray] = {}  # of a step's prompt i32[M, T]

    def add(self, prompt_id: np.ndarray, tokens: np.ndarray, length: np.ndarray, step: int) -> None:
        """Keeps a step's responses i32[Q, T], unless there are some."""
        shown = np.arange(tokens.shape[1]) < length[:, None]
        for one in np.unique(prompt_id):
            self.tokens.setdefault((step, int(one)),
                                   np.where(shown, tokens, EMPTY)[prompt_id == one])

    def past(self, prompt_id: np.ndarray, count: int, step: int) -> np.ndarray:
        """Returns the step's responses i32[prompts, count, T]."""
        if not count:
            return np.zeros((len(prompt_id), 0, 1), np.int32)
        return np.stack([self.tokens[step, int(one)] for one in prompt_id])


def prompts(config: Config) -> Prompts:
    """Returns random prompts of the longest length, enough for all steps."""
    count = STEPS * config.prompts_per_step
    tokens = np.random.default_rng(0).integers(
        0, 256, (count, config.rollout.max_prompt_tokens)).tolist()
    return Prompts([{"id": i, "question": "", "answer": ""} for i in range(count)], [""] * count,
                   tokens)


def alternate(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """A reward that gives each group an advantage: 0 and 1 in turn."""
    return float(next(_calls) % 2)


def _scaled(tensors: Tensors) -> Tensors:
    def read(name: str, part: Part) -> np.ndarray:
        return tensors.read_part(name, part) * (SCALE if name in (EMBED, HEAD) else 1)

    return dataclasses.replace(tensors, read_part=read)


def _told(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in metrics.items()
            if name.startswith(TOLD) and isinstance(value, float)}


if __name__ == "__main__":
    sys.exit(main())
