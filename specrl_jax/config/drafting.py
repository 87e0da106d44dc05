"""Options of drafters and of their training."""

import dataclasses

from specrl_jax.config.fields import Section, option

DRAFTERS = ("off", "history", "eagle", "draft_model", "merge")
LOSSES = ("forward_kl", "reward_weighted_kl", "advantage_weighted_kl", "jsd", "tv", "e2e_tv", "lk")


@dataclasses.dataclass(frozen=True)
class DraftConfig(Section, prefix="draft"):
    """The drafters."""

    path: str = option(
        "", "eagle: directory of a trained head, as train_drafter.py writes it; empty starts from "
        "random weights")
    children: str = option(
        "perturbed", "eagle, draft_model: a node's alternatives are the best tokens after the "
        "noise of the draw (perturbed), before it (top), or drawn from the drafter (sampled)",
        choose=("perturbed", "top", "sampled"))
    temperature: float = option(
        1.0, "eagle, draft_model: temperature of the drafter's distribution over "
        "rollout.temperature; below 1 where it is less sure than the actor, "
        "or where top-k or top-p truncate its tail",
        within="[0.001, 1000]")
    model: str = option("", "draft_model: a smaller model with the actor's tokenizer, named as "
                        "model.path is")
    vocab: int = option(0, "eagle from random weights: its draft vocabulary; 0 is all tokens",
                        low=0)
    tap_norm: bool = option(
        True, "new eagle heads: normalise each tapped layer of the actor before they are joined "
        "(EAGLE-3.1); a head of draft.path is as it was trained")
    state_norm: bool = option(
        True, "new eagle heads: draft on from the normalised output of the draft before "
        "(EAGLE-3.1); a head of draft.path is as it was trained")
    parts: tuple[str, ...] = option(("eagle", "history"), "merge: the drafters to merge")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(len(set(self.parts)) == len(self.parts) >= 2, "parts",
                   "name two or more drafters, each once")


@dataclasses.dataclass(frozen=True)
class DistillOptions(Section):
    """The drafter's update."""

    loss: str = option("lk", f"one of {', '.join(LOSSES)}", choose=LOSSES)
    unroll: int = option(4, "J, draft depths trained: steps of the training-time test", low=1)
    learning_rate: float = option(1e-3, "peak learning rate of AdamW", low=0)
    warmup_steps: int = option(0, "linear warm-up, in updates", low=0)
    decay_steps: int = option(0, "update at which a linear decay reaches 0; 0 stays constant")
    max_grad_norm: float = option(0.5, "global norm that gradients are clipped to",
                                  within="(0, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.decay_steps == 0 or self.decay_steps > self.warmup_steps, "decay_steps",
                   f"must be 0 or more than warmup_steps = {self.warmup_steps}")


@dataclasses.dataclass(frozen=True)
class DistillConfig(DistillOptions, prefix="distill"):
    """The drafter's training while RL runs."""

    when: str = option(
        "off", "when the drafter trains: off; once, before RL, on the actor's own responses; "
        "interval, after every distill.interval steps; verification, likewise, from what the "
        "rollouts' verification computed; trigger, when acceptance falls by more than the actor's "
        "entropy explains", choose=("off", "once", "interval", "verification", "trigger"))
    interval: int = option(1, "interval, verification: RL steps from one training to the next",
                           low=1)
    overlap: bool = option(False, "interval, verification: train in parallel with the policy "
                           "update and publish one step later")
    explore: float = option(0.02, "verification: share of rounds that draft to the full depth and "
                            "verify all drafts, whatever the controller plans", within="(0, 1]")
    updates: int = option(4, "updates of one training", low=1)
    batch: int = option(16, "sequences of one update", low=1)
    micro_batch: int = option(8, "sequences of one forward and backward pass, over all shards",
                              low=1)
    rollouts: int = option(1, "newest rollouts whose features are kept; once: rollouts before RL",
                           low=1)
    sequences: int = option(0, "sequences of a rollout whose features are kept, drawn at random; "
                            "0 is all of them", low=0)
    megabytes: int = option(512, "bound on kept features and on the heads of the actors that made "
                            "them; the oldest sequences make room", low=1)
    threshold: float = option(0.05, "trigger: unexplained fall, relative to the acceptance after "
                              "the last training, that starts one", low=0)
    probe_tokens: int = option(8, "tokens of each response of the health probe that follows a "
                               "publish; 0 is no probe", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(not self.overlap or self.periodic, "overlap",
                   f"needs {self.prefix}when = 'interval' or 'verification', got {self.when!r}")
        self.check(self.batch % self.micro_batch == 0, "batch",
                   f"must be a multiple of {self.prefix}micro_batch = {self.micro_batch}")

    @property
    def periodic(self) -> bool:
        """Whether a training follows every `interval` steps."""
        return self.when in ("interval", "verification")
