"""Options of the RL algorithm, and the algorithms that a preset's colon may name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specrl_jax.config.fields import Section, option

OF_GROUPS = ("group", "group_mean", "leave_one_out")  # advantages that compare samples
WITH_RATIO = ("ppo_clip", "gspo", "cispo")  # losses that read the ratio to the policy that sampled


@dataclasses.dataclass(frozen=True)
class RLConfig(Section, prefix="rl"):
    """The RL algorithm: what rewards become, and which loss the policy update minimises."""

    advantage: str = option(
        "group", "advantage from rewards: group (mean and standard deviation of a group, GRPO), "
        "group_mean (only the mean, Dr. GRPO), leave_one_out (RLOO), batch (mean and standard "
        "deviation of the step, REINFORCE++), greedy_baseline (the reward of one more, "
        "greedy response per prompt, ReMax), none (the reward itself), or package.module:function")
    loss: str = option(
        "ppo_clip", "policy loss: ppo_clip (PPO, GRPO; with clip_high > clip_low, DAPO), gspo "
        "(ratio of the sequence), cispo (clipped ratio as a weight), reinforce (no ratio), or "
        "package.module:function")
    correction: str = option(
        "none", "weights of tokens whose log-probabilities differ between rollout and learner: "
        "none, truncated (truncated importance sampling), truncated_sequence (one weight a "
        "response), masked (0 outside 0.5 to 5, IcePop), or package.module:function")
    normalize: str = option(
        "token", "loss mean over all tokens of the batch (token), over each sequence and then "
        "sequences (sequence), or sums over max_new_tokens (constant, Dr. GRPO)",
        choose=("token", "sequence", "constant"))
    kl: float = option(0.0, "coefficient of the KL to the initial policy; 0 keeps no reference",
                       low=0)
    kl_in: str = option("loss", "where the KL is added: to each token's loss, or taken from the "
                        "reward, summed over the response", choose=("loss", "reward"),
                        read_with=("kl",))
    kl_estimator: str = option(
        "k3", "estimate of the KL from a token: k1 (log ratio) in the reward; k2 (half its square) "
        "or k3 (never negative) in the loss", choose=("k1", "k2", "k3"), read_with=("kl",))
    entropy: float = option(0.0, "coefficient of a bonus for the entropy of tokens", low=0)
    teacher: str = option("", "model with the policy's tokenizer whose log-probabilities of the "
                          "policy's tokens are part of the advantages (on-policy distillation); "
                          "empty is none")
    teacher_weight: float = option(
        1.0, "advantage of a token per nat by which the teacher's log-probability exceeds the "
        "policy's; with reward.weights of 0 it is the whole advantage", within="(0, inf)",
        read_with=("teacher",))
    clip_low: float = option(0.2, "ratio is clipped below at 1 - clip_low", low=0,
                             read_with=("loss", *WITH_RATIO))
    clip_high: float = option(0.2, "ratio is clipped above at 1 + clip_high", low=0,
                              read_with=("loss", *WITH_RATIO))
    filter: str = option(
        "none", "dynamic: groups without an advantage are replaced by those of further prompts "
        "until the step is full (DAPO's dynamic sampling); none keeps them",
        choose=("none", "dynamic"))
    filter_extra: int = option(3, "dynamic: most further rollouts in a step; then groups without "
                                  "an advantage fill it up", low=1, read_with=("filter", "dynamic"))
    overlong: str = option(
        "keep", "responses cut at rollout.max_new_tokens: keep; mask, so that they count in "
        "no update; or soft, a penalty on the reward that grows to 1 over the last fifth (DAPO)",
        choose=("keep", "mask", "soft"))
    curriculum: str = option(
        "uniform", "prompts of a step: uniform, in epochs; or pass_rate, drawn, most often those "
        "whose pass rate so far (mean reward, cut to 0 to 1) is near one half",
        choose=("uniform", "pass_rate"))
    updates: int = option(1, "epochs, updates on each rollout; 0 only rolls out", low=0)
    minibatches: int = option(
        1, "optimiser steps of an epoch, over equal parts of the rollout in canonical order; each "
        "divides by its own tokens or sequences. The ratio to the policy that sampled is 1 in the "
        "first step on a rollout and differs in later ones", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_estimator != "k1" or self.kl_in == "reward", "kl_estimator",
                   "its gradient in the loss has mean 0; use k2 or k3, or rl.kl_in = reward")
        self.check(self.kl_estimator == "k1" or self.kl_in == "loss", "kl_estimator",
                   "taken from the reward, its gradient is near 0 where the policy is near the "
                   "reference; use k1, or rl.kl_in = loss")
        self.check(self.filter == "none" or self.advantage not in ("batch", "none"), "filter",
                   f"rl.advantage = {self.advantage} is not 0 where a group agrees; use another")
        self.check(self.filter == "none" or not self.teacher, "filter", "with a teacher, "
                   "groups whose rewards agree still teach; drop rl.teacher or the filter")

    @property
    def most_rollouts(self) -> int:
        """Rollouts that a step may take."""
        return 1 + (self.filter_extra if self.filter != "none" else 0)

    @property
    def greedy(self) -> bool:
        """Whether a greedy response is generated for each prompt."""
        return self.advantage == "greedy_baseline"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL to the reference is taken from rewards."""
        return self.kl > 0 and self.kl_in == "reward" and self.updates > 0

    @property
    def kl_in_loss(self) -> bool:
        """Whether the update reads the reference."""
        return self.kl > 0 and self.kl_in == "loss"


# Fields that every algorithm sets, to their defaults if it names no others.
OF_ALGORITHM = ("advantage", "loss", "normalize", "correction", "clip_low", "clip_high",
                "filter", "overlong", "minibatches")
# Name -> values at dotted paths. Ratios are 1 in the first update on a rollout, so losses with a
# ratio take two. No entry sets rl.kl, which costs a copy of the weights.
ALGORITHMS: dict[str, Mapping[str, Any]] = {
    name: {f"rl.{field}": of.get(field, getattr(RLConfig(), field)) for field in OF_ALGORITHM}
    for name, of in {
    # arXiv:2402.03300
    "grpo": {"advantage": "group", "loss": "ppo_clip", "normalize": "sequence", "minibatches": 2},
    # arXiv:2503.20783
    "dr_grpo": {"advantage": "group_mean", "loss": "ppo_clip", "normalize": "constant",
                "minibatches": 2},
    # arXiv:2503.14476
    "dapo": {"advantage": "group", "loss": "ppo_clip", "normalize": "token", "minibatches": 2,
             "clip_low": 0.2, "clip_high": 0.28, "filter": "dynamic", "overlong": "soft"},
    # arXiv:2507.18071, section 5.1
    "gspo": {"advantage": "group", "loss": "gspo", "normalize": "sequence", "minibatches": 2,
             "clip_low": 3e-4, "clip_high": 4e-4},
    # arXiv:2506.13585; the bound of 5 is that of ScaleRL, arXiv:2510.13786
    "cispo": {"advantage": "group", "loss": "cispo", "normalize": "token", "minibatches": 2,
              "clip_low": 1.0, "clip_high": 4.0},
    # arXiv:2402.14740
    "rloo": {"advantage": "leave_one_out", "loss": "reinforce", "normalize": "constant"},
    # arXiv:2501.03262
    "reinforce_pp": {"advantage": "batch", "loss": "ppo_clip", "normalize": "token",
                     "minibatches": 2},
    # arXiv:2310.10505
    "remax": {"advantage": "greedy_baseline", "loss": "reinforce", "normalize": "constant"},
}.items()}
