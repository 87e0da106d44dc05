"""Offline training of an EAGLE-3 head for a fixed actor, and its evaluation on held-out prompts.

The actor responds to the training prompts and the held-out ones, with the drafter off. The head
learns from separate forwards over the responses; their features stay in memory within a budget.
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import sharding
from specrl_jax.checkpoint import resume
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import Config, ConfigError, DistillOptions, as_dict, at_least, check, option
from specrl_jax.data.examples import examples_digest
from specrl_jax.data.prompt_order import step_prompts
from specrl_jax.distill import data, teacher, update
from specrl_jax.distill.data import Corpus, Plan, PublishedActor
from specrl_jax.distill.metrics import by_depth, summarize, table
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets
from specrl_jax.distill.texts import read_texts
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.metrics import run_files
from specrl_jax.metrics.progress import Progress
from specrl_jax.model import layers
from specrl_jax.model.source import Actor, open_actor
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.sampler import publisher
from specrl_jax.runtime import lock
from specrl_jax.runtime.compilation import abstract
from specrl_jax.runtime.paths import CHECKPOINTS, local_path
from specrl_jax.runtime.workdir import make_workdir, result_directory, write_config
from specrl_jax.structs import Json, Metrics, PyTree

ROLLOUTS, DRAFTER = "rollouts", "drafter"
JUDGED_ANEW = ("reward.seconds",)  # at each start, so that all answers have the new limit


def _same(name: str) -> Any:
    field = DistillOptions.__dataclass_fields__[name]
    return option(field.default, field.metadata["help"])


@dataclasses.dataclass(frozen=True)
class DrafterTraining:
    rollout_prompts: int = option(256, "use the first N prompts of config.data; 0: only --texts")
    samples: int = option(2, "responses to each prompt")
    texts: str = option("", "JSONL file, .gz or not, to learn from too: objects with question and "
                            "answer, with messages, or with text")
    eval_split: str = option("test", "split of config.data whose prompts are held out")
    eval_prompts: int = option(16, "held-out prompts; training prompts equal to one are dropped")
    eval_every: int = option(400, "updates between evaluations; the last one is always evaluated")
    draft_vocab: int = option(8192, "size of the draft vocabulary; 0: all of the actor's tokens")
    own_head: bool = option(True, "train an output head, which starts as the actor's")
    steps: int = option(1600, "updates; the learning rate falls linearly to 0 over them")
    batch_tokens: int = option(512, "tokens of an update, prompts and padding included; many small "
                                    "updates teach more than few large ones")
    micro_batch_tokens: int = option(512, "tokens of one forward and backward pass")
    feature_megabytes: int = option(2048, "features kept in memory; others are recomputed")
    checkpoint_every: int = option(200, "updates between checkpoints; the last is always saved")
    loss: str = _same("loss")
    unroll: int = _same("unroll")
    learning_rate: float = _same("learning_rate")
    warmup_steps: int = _same("warmup_steps")
    max_grad_norm: float = _same("max_grad_norm")

    def __post_init__(self) -> None:
        at_least(0, rollout_prompts=self.rollout_prompts, draft_vocab=self.draft_vocab,
                 feature_megabytes=self.feature_megabytes)
        at_least(1, **{name: getattr(self, name) for name in (
            "samples", "eval_prompts", "eval_every", "steps", "batch_tokens", "micro_batch_tokens",
            "checkpoint_every")})
        check(bool(self.rollout_prompts or self.texts), "rollout_prompts", 0,
              "there is nothing to learn from; give some, or --texts=FILE")
        self.distill  # noqa: B018  checks its fields

    @property
    def distill(self) -> DistillOptions:
        return DistillOptions(decay_steps=self.steps, **{
            f.name: getattr(self, f.name) for f in dataclasses.fields(DistillOptions)
            if hasattr(self, f.name)})


class DrafterTrainer:
    """A head, its optimiser and the features of its batches. `step()` is one update."""

    def __init__(self, config: Config, options: DrafterTraining, actor: PublishedActor,
                 corpus: Corpus, held: Corpus) -> None:
        check(len(corpus.tokens) > 0, "texts", options.texts, "holds nothing to learn from")
        source, params = actor
        self.options, self.actor = options, params
        self.made_for = eagle_weights.MadeFor(source.tokenizer.identity, layers.identity(params))
        self.arch = arch = EagleArch(
            source.arch, draft_vocab=min(options.draft_vocab, source.arch.vocab_size),
            own_head=options.own_head, tap_norm=config.draft.tap_norm,
            state_norm=config.draft.state_norm)
        self.vocab = eagle_model.choose_vocab(data.token_counts(config, source, corpus),
                                              arch.draft_vocab, source.tokenizer.stop_ids)
        self.temperature, self.seed = config.rollout.temperature, config.seed
        self.mesh, self.step_number = sharding.make_mesh(config.mesh), 0
        shards = sharding.shard_count(self.mesh)
        cut = (options.batch_tokens, options.micro_batch_tokens, shards, config.seed)
        self.corpus, self.plans = corpus, data.make_plans(corpus, *cut)
        self.held, self.held_plans = held, data.make_plans(held, *cut)
        self.programs = update.Programs(eagle_model.trainable(arch), source.arch,
                                        options.distill, self.mesh)
        self.frozen = teacher.frozen_params(source.arch, params,
                                            self.programs.replicate(self.vocab))
        self._kept: dict[int, tuple[SequenceBatch, TeacherTargets]] = {}
        self._room = options.feature_megabytes * 2**20
        head = eagle_model.warm_start(arch, eagle_model.initialize(arch, config.seed), params,
                                         self.frozen.head, tap_scale(*self.batch(0)))
        self.state = self.programs.init(sharding.put(self.programs.shardings.params, head))

    def _compute(self, corpus: Corpus, plan: Plan) -> tuple[SequenceBatch, TeacherTargets]:
        batch = self.programs.rows(data.batch_of(corpus, plan, self.temperature))
        return batch, self.programs.compute_targets(plan.window, self.actor, batch)

    def batch(self, index: int) -> tuple[SequenceBatch, TeacherTargets]:
        """Returns a plan's sequences and targets; keeps them if they fit the budget."""
        if index in self._kept:
            return self._kept[index]
        made = self._compute(self.corpus, self.plans[index])
        size = sum(a.nbytes for a in jax.tree.leaves(made))
        if size <= self._room:
            self._kept[index], self._room = made, self._room - size
        return made

    def step(self) -> tuple[Metrics, Json]:
        """Runs one update; returns its metrics and the sequences it saw."""
        index = int(step_prompts(len(self.plans), self.seed, self.step_number, 1)[0])
        began = time.perf_counter()
        batch = jax.block_until_ready(self.batch(index))
        made = time.perf_counter()
        self.state, updated = self.programs.update(self.state, self.frozen, *batch)
        values = jax.device_get(updated)
        seconds, rows = time.perf_counter() - began, self.plans[index].rows
        record = by_depth("alpha", values.pop("alpha")) | {
            name: float(value) for name, value in values.items()} | {
            "step": self.step_number, "time/features": made - began, "time/step": seconds,
            "time/learn": began + seconds - made,
            "tokens_per_second": float(values["tokens"]) / seconds}
        self.step_number += 1
        return record, {"sequences": rows[rows >= 0].tolist()}

    def evaluate(self) -> dict[str, float]:
        """Evaluates the head on the held-out sequences, see `summarize`."""
        scale, parts = np.float32(self.temperature > 0), []
        for plan in self.held_plans:
            noise = self.programs.rows((self.held.key[plan.rows], np.full(plan.rows.shape, scale)))
            evaluated = self.programs.evaluate(self.state.params, self.frozen,
                                               *self._compute(self.held, plan), *noise)
            parts += [jax.tree.map(lambda a, i=i: np.asarray(a)[i], evaluated)
                      for i in range(len(plan.rows))]
        return summarize(parts)

    def described(self) -> str:
        """Returns a line about the data and the draft vocabulary."""
        known = np.isin(self.held.responses, self.vocab).mean()
        return (f"{len(self.corpus.tokens)} sequences, {len(self.corpus.responses)} response "
                f"tokens, {len(self.plans)} updates an epoch; the draft vocabulary of "
                f"{len(self.vocab)} has {known:.1%} of {len(self.held.responses)} held-out tokens")

    def arrays(self) -> dict[str, PyTree]:
        return {DRAFTER: {"weights": self.state.params, "vocab": self.vocab},
                "optimizer": self.state.optimizer}

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continues from the newest intact checkpoint; False if there is none."""
        if (checkpoint := checkpoints.restore_latest(abstract(self.arrays()))) is None:
            return False
        _, arrays, meta = checkpoint
        if not np.array_equal(arrays[DRAFTER]["vocab"], self.vocab):
            raise ConfigError(f"{checkpoints.directory}: the draft vocabulary differs from the one "
                              f"that {ROLLOUTS}/ gives; choose another --workdir")
        self.state = LearnerState(arrays[DRAFTER]["weights"], arrays["optimizer"])
        self.step_number = meta["step"]
        return True


def train_drafter(config: Config, options: DrafterTraining, workdir: Path,
                  actor: Actor | None = None) -> bool:
    """Trains or resumes an EAGLE head in `workdir`; returns whether any update was left.

    The head is in workdir / "drafter", which draft.path may name.

    Args:
      actor: see `open_actor`; None is the model at config.model.path.

    Raises:
      ConfigError: an option cannot work.
    """
    sharding.all_devices()
    result_directory(workdir, DRAFTER)
    actor = actor or open_actor(config)
    description = as_dict(config) | {"drafter_training": as_dict(options), "actor": {
        "run": actor.run and str(actor.run), "step": actor.step}}
    changed = resume.check_config(workdir, description, JUDGED_ANEW)
    progress = Progress(options.steps, 0)
    training, held = data.load_prompts(
        config, actor.source.tokenizer, options.rollout_prompts, options.eval_split,
        options.eval_prompts, progress.say)
    most = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    texts = None if not options.texts else read_texts(
        local_path("--texts", options.texts), actor.source.tokenizer, config.data, most)
    make_workdir(workdir)
    with lock.hold(workdir):
        resume.check_config(workdir, description, JUDGED_ANEW)
        examples = {"training": examples_digest(training.examples),
                    "held-out": examples_digest(held.examples)}
        read = {} if texts is None else {"--texts": examples_digest(
            [{"tokens": tokens.tolist()} for tokens in texts.tokens])}
        resume.check_data(workdir, examples | read)
        resume.check_rendering(workdir, "training", training.texts, progress.warn)
        write_config(workdir, description)
        if changed:
            progress.say(resume.describe_changes(changed))
        progress.say(f"loading {actor.name}")
        mesh, source = sharding.make_mesh(config.mesh), actor.source
        published = PublishedActor(source, publisher(
            source.arch, mesh, jnp.dtype(config.model.dtype), layers.are_scanned(
                sharding.platform(mesh)))(actor.params(mesh)))
        *learned, evaluated = data.gather(config, published, (training, held), options.samples,
                                          workdir / ROLLOUTS, progress.say)
        learned = data.join([*learned, *([] if texts is None else [texts])])
        return _train(DrafterTrainer(config, options, published, learned, evaluated), workdir,
                      config.checkpoint_keep, progress)


def _train(trainer: DrafterTrainer, workdir: Path, keep: int, progress: Progress) -> bool:
    """Trains and writes the head; returns whether any update was left."""
    options, say, warn = trainer.options, progress.say, progress.warn
    with Checkpoints(workdir / CHECKPOINTS, keep, warn) as checkpoints:
        if trainer.restore(checkpoints):
            say(f"resuming {workdir} after update {trainer.step_number}")
        left = trainer.step_number < options.steps
        if left:
            say(trainer.described())
            with run_files.Writer(workdir, trainer.step_number, warn) as writer, Progress(
                    options.steps, trainer.step_number) as progress:
                run_updates(trainer, checkpoints, writer, progress)
    head, own = workdir / DRAFTER, trainer.arrays()[DRAFTER]
    own = jax.device_put(own, sharding.replicated(trainer.mesh))  # by all processes; one writes
    if jax.process_index() == 0 and (left or not head.exists()):
        if head.exists():  # its last checkpoint was lost
            shutil.rmtree(head)
        eagle_weights.save(head, trainer.arch, own, trainer.made_for)
    return left


def run_updates(trainer: DrafterTrainer, checkpoints: Checkpoints, writer: run_files.Writer,
                progress: Progress) -> None:
    """Runs the remaining updates, with their metrics, evaluations and checkpoints."""
    options = trainer.options
    while trainer.step_number < options.steps:
        checkpoints.check()
        record, seen = trainer.step()
        done = trainer.step_number
        last = done == options.steps
        if not record["applied"]:
            progress.warn(f"update {done}: loss or gradient is not finite; skipped")
        if last or done % options.eval_every == 0:
            progress.phase("evaluating")
            evaluation = trainer.evaluate()
            record |= {f"eval/{name}": value for name, value in evaluation.items()}
            progress.say(table(evaluation))
        writer.write_step(record, [seen])
        progress.step({"time/step": record["time/step"], "time/learn": record["time/learn"],
                       "rollout/tokens_per_second": record["tokens_per_second"],
                       "rollout/accept_length": record["accept_length"]})
        if last or done % options.checkpoint_every == 0:
            writer.sync()
            checkpoints.save(done, trainer.arrays(), {"step": done})


def tap_scale(batch: SequenceBatch, targets: TeacherTargets) -> np.ndarray:
    """Returns f32[A], each tap's root mean square at the median token.

    The median ignores first tokens, whose values may be far larger.
    """
    taps = np.moveaxis(np.asarray(targets.taps, np.float32), 1, 0)  # [A * F, n, b, S]
    taps = taps.reshape(-1, targets.hidden.shape[1], *taps.shape[1:])
    real = np.arange(taps.shape[-1]) < np.asarray(batch.length)[..., None]
    return np.median(np.sqrt(np.square(taps).mean(1))[:, real], axis=1)
