"""Options of drafters and of their training."""

import dataclasses
from typing import ClassVar

from specrl_jax.config.fields import at_least, check, option

DRAFTERS = ("off", "history", "eagle", "small_lm", "replay", "merge")
CHILDREN = ("perturbed", "top", "sampled")
LOSSES = ("forward_kl", "reward_weighted_kl", "advantage_weighted_kl", "jsd", "tv", "e2e_tv", "lk")
WHEN = ("off", "once", "interval", "trigger")
MOST_MIX = 1000.0  # beyond what a preference needs; an endless factor would hide roots, too


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The drafters."""

    path: str = option("", "eagle: directory of a trained head, as train_drafter.py writes it; "
                           "empty starts from random weights")
    children: str = option("perturbed", "eagle, small_lm: a node's alternatives are the best "
                                        "tokens after the noise of the draw (perturbed), before it "
                                        "(top), or drawn from the drafter (sampled)")
    temperature: float = option(1.0, "eagle, small_lm: temperature of the drafter's distribution "
                                     "over rollout.temperature; below 1 where it is less sure than "
                                     "the actor, or where top-k or top-p truncate its tail")
    model: str = option("", "small_lm: a smaller model with the actor's tokenizer, named as "
                            "model.path is")
    corruption: float = option(0.0, "replay: probability that a recorded token is replaced; 0 is a "
                                    "perfect drafter, 1 a useless one")
    cost: int = option(0, "replay: products of 128 x 128 matrices in each draft step")
    vocab: int = option(0, "eagle from random weights: its draft vocabulary; 0 is all tokens")
    parts: tuple[str, ...] = option(("eagle", "history"), "merge: the drafters to merge")
    mix: tuple[float, ...] = option((), "merge: factor of each part's survival; 0 switches a part "
                                        "off, empty is 1 for all")

    def __post_init__(self) -> None:
        check(self.children in CHILDREN, "draft.children", self.children,
              f"choose one of {', '.join(CHILDREN)}")
        check(0.001 <= self.temperature <= 1000, "draft.temperature", self.temperature,
              "must lie in [0.001, 1000]")
        at_least(0, draft__vocab=self.vocab, draft__cost=self.cost)
        check(0 <= self.corruption <= 1, "draft.corruption", self.corruption, "must lie in [0, 1]")
        check(len(set(self.parts)) == len(self.parts) >= 2, "draft.parts", self.parts,
              "name two or more drafters, each once")
        inside = all(0 <= factor <= MOST_MIX for factor in self.mix)  # not a number is not
        check(inside and len(self.mix) in (0, len(self.parts)), "draft.mix", self.mix,
              f"give one number in [0, {MOST_MIX:g}] for each of {', '.join(self.parts)}")

    @property
    def drafters(self) -> int:
        """The number of drafters that `merge` joins."""
        return len(self.parts)


@dataclasses.dataclass(frozen=True)
class DistillOptions:
    """The drafter's update."""

    section: ClassVar[str] = ""  # prefix of field names in errors

    loss: str = option("lk", f"one of {', '.join(LOSSES)}")
    unroll: int = option(4, "J, draft depths trained: steps of the training-time test")
    depth_decay: float = option(0.8, "weight of each depth relative to the one before it")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(0, "linear warm-up, in updates")
    decay_steps: int = option(0, "update at which a linear decay reaches 0; 0 stays constant")
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay")
    b1: float = option(0.9, "AdamW's first decay")
    b2: float = option(0.95, "AdamW's second decay")
    max_grad_norm: float = option(0.5, "global norm that gradients are clipped to")

    def __post_init__(self) -> None:
        self._choose("loss", LOSSES)
        self._at_least(1, "unroll")
        self._at_least(0, "learning_rate", "warmup_steps", "weight_decay")
        self._check(0 < self.depth_decay <= 1, "depth_decay", "must lie in (0, 1]")
        self._check(self.max_grad_norm > 0, "max_grad_norm", "must be positive")
        self._check(self.decay_steps == 0 or self.decay_steps > self.warmup_steps, "decay_steps",
                    f"must be 0 or more than warmup_steps = {self.warmup_steps}")
        for name in ("b1", "b2"):
            self._check(0 <= getattr(self, name) < 1, name, "must lie in [0, 1)")

    def _check(self, ok: bool, name: str, way_out: str) -> None:
        check(ok, self.section + name, getattr(self, name), way_out)

    def _choose(self, name: str, names: tuple[str, ...]) -> None:
        self._check(getattr(self, name) in names, name, f"choose one of {', '.join(names)}")

    def _at_least(self, low: int, *names: str) -> None:
        at_least(low, **{self.section + name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class DistillConfig(DistillOptions):
    """The drafter's training while RL runs."""

    section: ClassVar[str] = "distill."

    when: str = option("off", "when the drafter trains: off; once, before RL, on the actor's own "
                              "responses; interval, after every distill.interval steps; trigger, "
                              "when acceptance falls by more than the actor's entropy explains")
    interval: int = option(1, "interval: RL steps from one training to the next")
    overlap: bool = option(False, "interval: train in parallel with the policy update and publish "
                                  "one step later")
    updates: int = option(4, "updates of one training")
    batch: int = option(16, "sequences of one update")
    micro_batch: int = option(8, "sequences of one forward and backward pass, over all shards")
    rollouts: int = option(1, "newest rollouts whose features are kept; once: rollouts before RL")
    sequences: int = option(0, "sequences of a rollout whose features are kept, drawn at random; "
                               "0 is all of them")
    megabytes: int = option(512, "bound on kept features and on the heads of the actors that made "
                                 "them; the oldest sequences make room")
    threshold: float = option(0.05, "trigger: unexplained fall, relative to the acceptance after "
                                    "the last training, that starts one")
    ema_decay: float = option(0.5, "trigger: decay of the running mean of falls")
    probe_tokens: int = option(8, "tokens of each answer of the health probe that follows a "
                                  "publish; 0 is no probe")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose("when", WHEN)
        self._at_least(1, "interval", "updates", "batch", "micro_batch", "rollouts", "megabytes")
        self._at_least(0, "sequences", "threshold", "probe_tokens")
        self._check(0 <= self.ema_decay < 1, "ema_decay", "must lie in [0, 1)")
        self._check(not self.overlap or self.when == "interval", "overlap",
                    f"needs {self.section}when = 'interval', got {self.when!r}")
        self._check(self.batch % self.micro_batch == 0, "batch",
                    f"must be a multiple of {self.section}micro_batch = {self.micro_batch}")
