"""The drafter's training beside RL: features in, updates when they are due, versions out.

Nothing here is seen by the actor's update: the features come from a forward of their own over the
finished rollout, under the weights that said it; parameters, optimiser and gradient norm are the
drafter's own.
"""

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, check
from specrl_jax.distill import schedule, update
from specrl_jax.distill.features import Features
from specrl_jax.distill.health import Life
from specrl_jax.distill.programs import Programs
from specrl_jax.distill.update import DistillState, Lent, Lessons, Texts
from specrl_jax.draft import eagle_model
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.structs import Rollout

Batch = tuple[Texts, Lessons]
Trained = tuple[DistillState, list[dict[str, Any]], float]  # and seconds
PICK, DRAW, WATCH = range(3)  # what random numbers are for


class Evolution:
    """A drafter that learns. `collect` follows each rollout, `train` each policy update.

    Raises:
      ConfigError: options that cannot work together.
    """

    def __init__(self, config: Config, sampler: Sampler, life: Life) -> None:
        options, mesh = config.distill, sampler.mesh
        self.options, self.seed, self.life, self.sampler = options, config.seed, life, sampler
        self.temperature, self.window = config.rollout.temperature, config.rollout.max_new_tokens
        shards = sharding.shard_count(mesh)
        check(options.micro_batch % shards == 0, "distill.micro_batch", options.micro_batch,
              f"must be a multiple of the {shards} data shards")
        check(not schedule.late(options) or mesh.size == 1, "distill.when", options.when,
              f"two programs at once over {mesh.size} devices may wait for each other; use "
              f"every_step or every_k")
        self.arch = sampler.drafting.head
        self.programs = Programs(self.arch, options, mesh, sharding.replicated(mesh))
        self.take = min(options.sequences or config.sequences, config.sequences)
        self.features = Features(
            options, self.arch, self.take, config.rollout.max_prompt_tokens + self.window,
            self.window, heads=1 if options.when == "once" else options.rollouts)
        self.take = min(self.take, self.features.rows)
        self.state = self.programs.whole(update.begin(options, life.head["weights"]))
        self.good = self.state  # as of the last publish
        self.vocab = life.head["vocab"]
        self.staleness = schedule.forget()
        self._beside = concurrent.futures.ThreadPoolExecutor(1)  # where it is late
        self._ahead: concurrent.futures.Future[Trained] | None = None

    # Programs.

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles what a step may run. Nothing is learned from it."""
        say("compiling the drafter's update")
        read = self.sampler.params, self.vocab
        heads = self.programs.whole(self.features.heads)
        self._lend = jax.jit(self._lent).lower(*read, heads).compile()
        self._head = jax.jit(self._draft_head).lower(*read).compile()
        n, b = self.options.batch // self.options.micro_batch, self.options.micro_batch
        columns = self.features.arrays()["tokens"].shape[1]
        parts = -(-self.take // b)
        blank = self.programs.rows(_blank(parts, b, columns))
        self._teach = self.programs.teach.lower(self.window, self.sampler.params, blank).compile()
        taught = jax.tree.map(np.asarray, self._teach(self.sampler.params, blank))
        lessons = jax.tree.map(lambda a: np.resize(a, (n, *a.shape[1:])), taught)
        batch, lent = self._put((_blank(n, b, columns), lessons)), self._lend(*read, heads)
        self._update = self.programs.update.lower(self.state, lent, *batch).compile()
        if schedule.watches(self.options):
            self._assess = self.programs.assess.lower(
                self.state.params, lent, *batch, *self._silence(n, b)).compile()

    def _lent(self, actor: Any, vocab: Any, heads: Any) -> Lent:
        lent = update.lend(self.arch, actor, vocab).replace(teachers=heads)
        if not schedule.late(self.options):
            return lent
        return lent.replace(embed=jnp.copy(lent.embed), head=jnp.copy(lent.head))

    def _draft_head(self, actor: Any, vocab: Any) -> Any:
        return eagle_model.draft_head(self.arch, actor, vocab)

    def _put(self, batch: Batch) -> Batch:
        return self.programs.rows(batch[0]), self.programs.lessons(batch[1])

    def _silence(self, n: int, b: int) -> tuple[Any, Any]:
        """Keys and scale of `assess`: its draws are not read."""
        return self.programs.rows((np.zeros((n, b, 2), np.uint32), np.zeros((n, b), np.float32)))

    def _rng(self, step: int, use: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, len(prng.STREAMS), step, use])

    # After a rollout.

    def collect(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int
                ) -> dict[str, Any]:
        """Keeps features of a rollout where the schedule asks for them; its metrics.

        The weights that said it are still published. With `trigger` acceptance is measured too.
        Late updates begin here, so that they run beside the policy update, after those of the step
        before were published.
        """
        told = self._publish_late()
        if schedule.collects(self.options, step):
            told |= self._repair()
            self.keep(rollout, reward, advantage, step)
        if schedule.watches(self.options):
            told |= self._watch(step)
        if schedule.late(self.options) and schedule.due(self.options, step, self.staleness):
            self._start_beside(step)
        return told

    def keep(self, rollout: Rollout, reward: np.ndarray, advantage: np.ndarray, step: int) -> None:
        """Adds the features of a rollout by the published weights."""
        chosen = np.sort(self._rng(step, PICK).permutation(len(rollout.length))[: self.take])
        part = jax.tree.map(lambda a: a[chosen], rollout)
        texts = update.make_texts(part, reward[chosen], advantage[chosen], self.temperature,
                                   self.options.micro_batch)
        params = self.sampler.params
        lessons = self._teach(params, self.programs.rows(texts))
        self.features.add(texts, jax.tree.map(np.asarray, lessons), self.sampler.version,
                          np.asarray(self._head(params, self.vocab)))

    def _watch(self, step: int) -> dict[str, float]:
        """Acceptance of first drafts on the newest rollout, and what entropy explains of it."""
        texts, lessons = self.features.draw(self._rng(step, WATCH), self.options.batch,
                                            self.options.micro_batch, newest=True)
        found = self._assess(self.state.params, self._lend_now(), *self._put((texts, lessons)),
                             *self._silence(*texts.length.shape))
        live = np.asarray(found.live)[:, 0]
        acceptance, entropy = np.asarray(found.alpha)[:, 0][live], lessons.entropy[live]
        self.staleness, left = schedule.observe(self.staleness, acceptance, entropy,
                                                self.options.memory)
        return {"distill/acceptance": float(acceptance.mean()), "distill/unexplained": left,
                "distill/entropy": float(entropy.mean()),
                "distill/fall": float(self.staleness.fall)}

    def _lend_now(self) -> Lent:
        return self._lend(self.sampler.params, self.vocab, self.programs.whole(self.features.heads))

    # After a policy update.

    def train(self, step: int) -> dict[str, Any]:
        """Updates and publishes if that is due at once; metrics."""
        told = {"distill/buffer_bytes": self.features.nbytes}
        at_once = not schedule.late(self.options)
        if at_once and schedule.due(self.options, step, self.staleness):
            told |= self.train_now(step)
        return told

    def train_now(self, step: int) -> dict[str, Any]:
        """The updates of one training, and the next version."""
        repaired = self._repair()
        told = self._adopt(self._run(self.state, self._lend_now(), list(self._draws(step))))
        if "drafter/fault" not in told:  # else the old head drafts on, as stale: again next step
            self.staleness = schedule.forget()
        return told | repaired

    def _draws(self, step: int) -> Iterator[Batch]:
        rng = self._rng(step, DRAW)
        for _ in range(self.options.updates):
            yield self.features.draw(rng, self.options.batch, self.options.micro_batch)

    def _run(self, state: DistillState, lent: Lent, batches: list[Batch]) -> Trained:
        """Updates on host batches: touches nothing but its arguments."""
        began, told = time.perf_counter(), []
        for batch in batches:
            state, metrics = self._update(state, lent, *self._put(batch))
            told.append({name: np.asarray(value).tolist() for name, value in metrics.items()})
        return state, told, time.perf_counter() - began

    def _repair(self) -> dict[str, Any]:
        """Goes back to the published head where the learner's was damaged since.

        What is trained ahead is not the learner's yet.
        """
        head = {"weights": self.state.params, "vocab": self.vocab}
        fault = self.life.damage(head)
        if not fault:
            return {}
        self.life.report(f"the learner's drafter: {fault}; learning from version "
                         f"{self.life.version} again")
        self._go_back()
        return {"drafter/fault": fault}

    def _go_back(self) -> None:
        self.vocab, self.state = self.life.head["vocab"], self.good

    def _adopt(self, trained: Trained) -> dict[str, Any]:
        """Publishes what was trained, or goes back to the version before."""
        self.state, told, seconds = trained
        fault = self.life.publish({"weights": self.state.params, "vocab": self.vocab},
                                  learned=any(one["applied"] for one in told))
        if fault:
            self._go_back()
        self.good = self.state
        record = {f"distill/{name}": float(told[-1][name])
                  for name in ("loss", "grad_norm", "accept_length")}
        record |= {f"distill/alpha/{j}": float(a) for j, a in enumerate(told[0]["alpha"])}
        return record | {"distill/updates": len(told), "time/distill_updates": seconds,
                         "distill/applied": float(min(one["applied"] for one in told)),
                         **({"drafter/fault": fault} if fault else {})}

    # One step late.

    def _start_beside(self, step: int) -> None:
        """Begins this step's updates in a thread; features and what is lent are copies."""
        self._ahead = self._beside.submit(self._run, self.state, self._lend_now(),
                                          list(self._draws(step)))

    def _publish_late(self) -> dict[str, Any]:
        """Waits for the updates that the step before began."""
        trained, self._ahead = self._join(), None
        return self._adopt(trained) if trained else {}

    def _join(self) -> Trained | None:
        return self._ahead.result() if self._ahead else None

    # Persistence.

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds besides `meta`. Waits for updates that run beside."""
        held = {"drafter": {"weights": self.state.params, "vocab": self.vocab},
                "drafter_optimizer": self.state.optimizer,
                "drafter_features": self.features.arrays(),
                "drafter_staleness": self.staleness}
        if schedule.late(self.options):
            trained = self._join()
            ahead = trained[0] if trained else self.state
            held["drafter_ahead"] = {"weights": ahead.params, "optimizer": ahead.optimizer}
        return held

    def meta(self) -> dict[str, Any]:
        trained = self._join()
        return {"ahead": trained[1] if trained else None}

    def restore(self, arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        self.state = DistillState(arrays["drafter"]["weights"], arrays["drafter_optimizer"])
        self.good, self.vocab = self.state, arrays["drafter"]["vocab"]
        self.features.restore(arrays["drafter_features"])
        self.staleness = jax.tree.map(np.asarray, arrays["drafter_staleness"])
        if meta["ahead"] is not None:
            ahead = arrays["drafter_ahead"]
            state = DistillState(ahead["weights"], ahead["optimizer"])
            self._ahead = self._beside.submit(lambda: (state, meta["ahead"], 0.0))


def begin(config: Config, sampler: Sampler, prompts: Sequence[Sequence[int]],
          warn: Callable[[str], None]) -> tuple[Life | None, Evolution | None]:
    """The life of a drafter with weights, and the training of one that can learn.

    Raises:
      ConfigError: training is asked for, and nothing can learn.
    """
    learns = config.distill.when != "off"
    if sampler.drafting.head is None:
        check(not learns, "distill.when", config.distill.when,
              f"spec.drafter = {config.spec.drafter!r} with control.policy = "
              f"{config.control.policy!r} has nothing that learns; choose eagle, or off here")
    if not sampler.drafting.weighty:
        return None, None
    life = Life(sampler, prompts, config.distill.canary if learns else 0, warn)
    return life, Evolution(config, sampler, life) if learns else None


def _blank(n: int, b: int, columns: int) -> Texts:
    """Micro-batches of padding."""
    zero, none = np.zeros((n, b), np.int32), np.zeros((n, b), np.float32)
    return Texts(tokens=np.zeros((n, b, columns), np.int32), length=zero, first=zero + 1,
                 temperature=none + 1, reward=none, advantage=none)
