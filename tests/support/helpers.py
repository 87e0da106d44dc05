"""What several tests share: micro models, engines, requests, and a drafter of random trees."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path as File
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from specrl_jax import prng, sharding
from specrl_jax.config import (
    Config,
    ControlConfig,
    LearnerConfig,
    MeshConfig,
    RolloutConfig,
    SpecOptions,
    override,
)
from specrl_jax.control import fixed, protocol
from specrl_jax.control.protocol import Controller
from specrl_jax.data.prompts import Prompts
from specrl_jax.draft.off import off
from specrl_jax.draft.protocol import Drafter, DraftRequest, RolloutInfo
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.model.architecture import Architecture, initialize
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source
from specrl_jax.rewards.scoring import Sample
from specrl_jax.rl.experience import Experience
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.layout import RolloutRequest, Shapes, make_request
from specrl_jax.rollout.metrics import rollout_metrics
from specrl_jax.rollout.plan import Decoder
from specrl_jax.runtime.compilation import CompilationCounter
from specrl_jax.structs import Array, DraftTree, Metrics, Rollout, SpecConfig
from specrl_jax.training.saving import Saved, to_save
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer


def tiny_arch(**changes: Any) -> Architecture:
    sizes = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
                 num_kv_heads=2, head_dim=4, max_position=256)
    return Architecture(**(sizes | changes))


def tiny_params(arch: Architecture, seed: int = 0) -> dict[str, Any]:
    """Random weights, scaled so that logits differ by about 1 and near ties are rare."""
    return jax.tree.map(lambda a: jnp.asarray(a * (1 if a.ndim == 1 else 8)),
                        initialize(arch, seed))


@dataclasses.dataclass(frozen=True)
class Task:
    """The sizes and prompts that engines are compared on."""

    prompts: list[list[int]]
    group: int = 2
    prompt: int = 10  # P
    response: int = 12  # T
    stop: tuple[int, ...] = (3,)

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.group

    def keys(self, seed: int = 0, order: np.ndarray | None = None) -> np.ndarray:
        """u32[Q, 2] of the prompts in `order`."""
        ids = np.arange(len(self.prompts)) if order is None else order
        ids = np.repeat(ids, self.group)
        sample = np.tile(np.arange(self.group), len(self.prompts))
        return prng.row_keys(seed, "train", 0, ids, ids * 0, sample)


def make_task(seed: int = 0, prompts: int = 6, vocab: int = 24, **changes: Any) -> Task:
    rng = np.random.default_rng(seed)
    width = changes.get("prompt", Task.prompt)
    # Lengths 1 and P are always among them.
    lengths = [1, width, *rng.integers(1, width + 1, prompts - 2)]
    return Task([rng.integers(0, vocab, n).tolist() for n in lengths], **changes)


def ask(task: Task, seed: int = 0, order: np.ndarray | None = None, past: np.ndarray | None = None,
        **sampling: Any) -> RolloutRequest:
    """A request; `sampling` replaces its arrays by what is given, one value for all or one each."""
    order = np.arange(len(task.prompts)) if order is None else order
    wanted = make_request([task.prompts[i] for i in order], task.keys(seed, order), task.group,
                     RolloutConfig(max_new_tokens=task.response), past)
    for name, value in sampling.items():
        old = getattr(wanted, name)
        setattr(wanted, name, np.broadcast_to(np.asarray(value, old.dtype), old.shape).copy())
    return wanted


def make_engine(arch: Architecture, task: Task, *, drafter: Drafter | None = None,
                controller: Controller | None = None, batch: int = 4, min_batch: int | None = None,
                past: int = 0, mesh: Any = None, smallest: int = 0, platform: str | None = None,
                feed: int = 0, **decoder: Any) -> Engine:
    """An engine that is not compiled yet; `batch` and `task` are over all shards of `mesh`.

    `decoder` holds further fields of Decoder, `smallest` its min_batch; `platform` is Engine's.
    """
    mesh = sharding.make_mesh(MeshConfig()) if mesh is None else mesh
    drafter = off() if drafter is None else drafter
    shards = sharding.shard_count(mesh)
    shapes = Shapes(batch=batch // shards, sequences=task.sequences // shards, group=task.group,
                    prompt=task.prompt, response=task.response, shards=shards,
                    depth=drafter.depth, min_batch=min_batch or batch // shards, feed=feed)
    parts = Decoder(arch, drafter, controller or fixed.off(), min_batch=smallest, **decoder)
    return Engine(parts, mesh, shapes, task.stop, past=past, platform=platform)


def roll_out(engine: Engine, params: Any, request: RolloutRequest, drafter_params: Any = (), *,
             control: Any = None, **options: Any) -> Result:
    """A rollout with what no earlier one learned; `control` replaces the controller's state."""
    speculation = engine.initial_speculation()
    if control is not None:
        speculation = speculation.replace(control=control)
    return engine.run(params, drafter_params, speculation, request, **options)[0]


class Dice:
    """What a random drafter's trees are made of; read when a rollout begins, so changed at will.

    Attributes:
      replay: i32[Q, T] tokens that the trees may guess.
      hit: probability that a node guesses its token of `replay`, if it can; 1 is a perfect drafter.
      chain: probability that a node is the child of the one before it.
      seed: of the trees.
    """

    def __init__(self, replay: np.ndarray, hit: float = 0.5, chain: float = 0.5, seed: int = 0
                 ) -> None:
        self.replay, self.hit, self.chain, self.seed = replay, hit, chain, seed


def random_drafter(dice: Dice, *, nodes: int, depth: int, vocab: int) -> Drafter:
    """Random trees, dead nodes in between, whose tokens are random or replayed."""

    def init(info: RolloutInfo) -> dict[str, np.ndarray]:
        return {"replay": np.asarray(dice.replay, np.int32),
                "hit": np.full(1, dice.hit, np.float32),
                "chain": np.full(1, dice.chain, np.float32),
                "seed": np.full(1, dice.seed, np.int32)}

    def propose(params: Any, state: Any, request: DraftRequest) -> tuple[DraftTree, Any]:
        frontier, spec = request.frontier, request.spec
        rng = jax.random.fold_in(jax.random.key(0), state["seed"][0])
        trees = jax.vmap(lambda *row: random_tree(rng, state, spec, nodes, depth, vocab, *row))
        return trees(frontier.root, frontier.seq, frontier.generated, frontier.live), state

    return Drafter(nodes=nodes, depth=depth, branch=nodes, init=init, propose=propose,
                   select_rows=lambda state, rows: state)


def random_tree(rng: Array, state: Any, spec: SpecConfig, nodes: int, depth: int, vocab: int,
                root: Array, seq: Array, generated: Array, live_row: Array) -> DraftTree:
    """The tree of one row, fields [N]: a function of the sequence and how far it is."""
    key = jax.random.fold_in(jax.random.fold_in(rng, seq), generated)
    pick, draft_prob, chain, dead, shrink, luck = jax.random.uniform(key, (6, nodes))
    replay = jnp.pad(state["replay"], ((0, 1), (0, depth)))
    wild = (draft_prob * vocab).astype(jnp.int32)
    parent, level = jnp.zeros(nodes, jnp.int32), jnp.zeros(nodes, jnp.int32)
    tokens = jnp.full(nodes, root, jnp.int32)
    live = jnp.zeros(nodes, bool).at[0].set(live_row)
    survival = jnp.zeros(nodes).at[0].set(1.0)
    hit, alive = luck < state["hit"][0], dead < 0.5 + 0.5 * state["hit"][0]
    for n in range(1, nodes):
        wanted = jnp.where(chain[n] < state["chain"][0], n - 1, (pick[n] * n).astype(jnp.int32))
        deep = level[wanted] + 1
        known = replay[jnp.minimum(seq, replay.shape[0] - 1), generated + deep - 1]
        token = jnp.where(hit[n], known, wild[n])
        twin = ((parent == wanted) & (tokens == token) & live)[1:n].any()
        ok = live[wanted] & (deep <= spec.depth) & (deep <= depth) & ~twin & alive[n]
        parent, level = parent.at[n].set(wanted), level.at[n].set(deep)
        tokens, live = tokens.at[n].set(token), live.at[n].set(ok)
        survival = survival.at[n].set(survival[wanted] * shrink[n])
    zero, none = jnp.zeros(nodes), jnp.zeros(nodes, jnp.int32)
    return DraftTree(tokens=tokens, parent=parent, depth=level, rank=none, origin=none,
                     survival=survival, logq=zero, draft_prob=survival, score_gap=zero, live=live,
                     broken=jnp.bool_(False))


def no_device(platform: str) -> AbstractContextManager:
    """A context in which programs are traced for a device that is not there; a CPU runs them."""
    device = AbstractDevice(f"some {platform}", 1, platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


class Course:
    """A controller's settings from launch to launch: random ones, unless `hold` is set."""

    def __init__(self, nodes: int, depth: int, parts: int = 1, seed: int = 0) -> None:
        self.nodes, self.depth, self.parts = nodes, depth, parts
        self.rng = np.random.default_rng(seed)
        self.hold: SpecConfig | None = None

    def draw(self) -> SpecConfig:
        """Depth, branching, nodes a row, budget of the batch (0 is no limit), and the mixture."""
        if self.hold is not None:
            return self.hold
        highest = (self.depth, self.nodes, self.nodes, 4 * self.nodes)
        actual = self.rng.integers((0, 1, 1, 0), highest, endpoint=True)
        mix = self.rng.uniform(0.2, 1, self.parts).tolist()
        return protocol.make_spec(*map(int, actual), tuple(mix))


def wandering(course: Course) -> Controller:
    """The controller that takes its settings from `course` after every launch."""
    return fixed.fixed(0)._replace(init=lambda costs: course.draw(),
                                   end_chunk=lambda state, launch: (course.draw(), {}))


def said(result: Result) -> np.ndarray:
    """bool[Q, T]: the tokens that were said."""
    length = result.sequences.length
    return np.arange(result.sequences.tokens.shape[1])[None] < length[:, None]


def streams(result: Result) -> list[list[int]]:
    """The tokens of each sequence."""
    s = result.sequences
    return [s.tokens[q, : s.length[q]].tolist() for q in range(len(s.length))]


def assert_same(left: Result, right: Result) -> None:
    """The same tokens, and log-probabilities that differ by rounding alone."""
    assert streams(left) == streams(right)
    a, b = left.sequences, right.sequences
    where = said(left)
    for name in ("logprob", "raw_logprob", "top_p_mass"):
        np.testing.assert_allclose(getattr(a, name)[where], getattr(b, name)[where],
                                   rtol=0, atol=1e-5, err_msg=name)


def counting(function: Callable[[], Any]) -> int:
    """Backend compilations while `function` runs."""
    counter = CompilationCounter()
    function()
    return counter.take()


def with_fields(config: Config, **fields: Any) -> Config:
    """The config with other values, of a section's field as `spec__drafter`."""
    return override(config, {name.replace("__", "."): value for name, value in fields.items()})


def micro_config(**changes: Any) -> Config:
    """A run of a few milliseconds a step, for meshes up to 8.

    `changes` replace whole sections, or fields as in `with_fields`.
    """
    fields = {name: changes.pop(name) for name in list(changes) if "__" in name}
    sections: dict[str, Any] = dict(
        steps=2, prompts_per_step=8, group_size=2,
        spec=SpecOptions(depth=2, branch=1, nodes=3, max_depth=2, max_branch=1, max_nodes=3),
        control=ControlConfig(policy="fixed"),  # its choices repeat bit for bit
        rollout=RolloutConfig(batch_size=8, max_prompt_tokens=10, max_new_tokens=8, min_batch=4),
        learner=LearnerConfig(learning_rate=1e-3, micro_batch=16, max_grad_norm=1e9))
    return with_fields(Config(**(sections | changes)), **fields)


def micro_trainer(config: Config, **options: Any) -> tuple[Trainer, TrainState]:
    """A compiled trainer of a one-layer `random:tiny` on made-up prompts, and its first state.

    `options` are those of `micro_trainer_to_compile`.
    """
    trainer, state = micro_trainer_to_compile(config, **options)
    return trainer, trainer.compile(state)[0]


def micro_trainer_to_compile(config: Config, *, warn: Callable[[str], None] = print,
                             stop: Sequence[int] = (), **changes: Any
                             ) -> tuple[Trainer, TrainState]:
    """As `micro_trainer`, not compiled.

    `stop` are further stop tokens, `changes` those of the architecture.
    """
    arch = dataclasses.replace(TINY, **({"num_layers": 1} | changes))
    tokenizer = dataclasses.replace(byte_tokenizer(), eos_ids=tuple(stop))
    source = Source(arch, tokenizer, random_tensors(arch, 0), "micro")
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 11, 16)]
    examples = [{"id": i, "question": "", "answer": str(i)} for i in range(16)]
    return Trainer.create(config, source, Prompts(examples, [""] * 16, tokens), warn=warn)


class Stepping:
    """A trainer with its state, for tests that run several steps.

    Attributes are those of the trainer, of `state`, and what tests read of both.
    """

    def __init__(self, trainer: Trainer, state: TrainState) -> None:
        self.trainer, self.state = trainer, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    @property
    def params(self) -> Any:
        return self.state.learner.params

    @property
    def published(self) -> Any:
        return self.state.policy.params

    def saved(self) -> Saved:
        return to_save(self.trainer, self.state)

    def step(self) -> tuple[Metrics, list[Sample]]:
        self.state, metrics, samples = self.trainer.step(self.state)
        return metrics, samples

    def rollout(self) -> tuple[Rollout, Metrics]:
        """What the next step generates first, without going on."""
        state, rollout, result = self.trainer.generate(self.state)
        return rollout, rollout_metrics(rollout, [result], state.speculation.plain_round_seconds)

    def learn(self, rollout: Rollout, advantage: np.ndarray) -> Metrics:
        """An update on a rollout, published."""
        experience = Experience(rollout, rollout, advantage, advantage, [], {})
        learner, metrics = self.trainer.policy.update(self.state.learner, experience)
        self.state = self.state.replace(learner=learner, policy=self.trainer.publish(
            learner, self.state.policy, self.state.step + 1))
        return metrics


def stepping(config: Config, **options: Any) -> Stepping:
    """A compiled `micro_trainer`, ready to step."""
    return Stepping(*micro_trainer(config, **options))


def stepping_to_compile(config: Config, **options: Any) -> Stepping:
    return Stepping(*micro_trainer_to_compile(config, **options))


def moments(optimizer: Any) -> Any:
    """Adam's first moments: after one update from zero, (1 - b1) times the gradient."""
    actual = jax.tree.leaves(optimizer, is_leaf=lambda node: hasattr(node, "mu"))
    return next(node for node in actual if hasattr(node, "mu")).mu


def repeatable_metrics(workdir: File) -> list[dict[str, Any]]:
    """A run's metrics but for those that another run of the same config has otherwise."""
    others = ("time/", "memory/", "compilations", "rollout/tokens_per_second", "learn/")
    return [{name: value for name, value in row.items() if not name.startswith(others)}
            for row in read_metrics(workdir)]


def even(prompt: str, completion: str, example: object) -> float:
    """A reward that random answers differ in: the share of characters with an even code."""
    return sum(ord(x) % 2 == 0 for x in completion) / max(len(completion), 1)


ROOT = File(__file__).resolve().parents[2]
HANGS = 600  # seconds; nothing that a test waits for takes so long on a busy machine
SMALL = ("--config=tiny", "--config.prompts_per_step=4", "--config.group_size=2",
         "--config.learner.micro_batch=8", "--config.rollout.batch_size=4",
         "--config.rollout.max_new_tokens=6", "--config.rollout.min_batch=2",
         "--config.spec.depth=2", "--config.spec.branch=1", "--config.spec.nodes=3",
         "--config.spec.max_depth=2", "--config.spec.max_branch=1", "--config.spec.max_nodes=3",
         "--config.control.policy=fixed")


def xla_flags(devices: int = 1) -> str:
    """Returns this process's XLA flags, with `devices` CPU devices, for child processes."""
    name = "--xla_force_host_platform_device_count"
    others = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(name)]
    return " ".join([f"{name}={devices}", *others])


def script_environment(devices: int = 1) -> dict[str, str]:
    """Scripts find the package whether or not it is installed, and use so many devices."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "support")))
    return os.environ | {"PYTHONPATH": path, "XLA_FLAGS": xla_flags(devices)}


def start_training(workdir: File, *flags: str, devices: int = 1, by: Sequence[str] = ()
                   ) -> subprocess.Popen:
    """experiments/train.py on the tiny preset, shrunk; the processes share compiled programs. `by`
    is a script that runs it, with flags."""
    train = str(ROOT / "experiments" / "train.py")
    return subprocess.Popen([sys.executable, *by, train, *SMALL, f"--workdir={workdir}", *flags],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=script_environment(devices) | {"JAX_PLATFORMS": "cpu"},
                            cwd=workdir.parent)


def run_training(workdir: File, *flags: str, devices: int = 1) -> str:
    """Runs to the end; what was printed."""
    process = start_training(workdir, *flags, devices=devices)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    return out


def ends(started: list[subprocess.Popen]) -> list[str]:
    """What each wrote on stderr."""
    try:
        return [process.communicate(timeout=HANGS)[1] for process in started]
    finally:
        for process in started:
            process.kill()


def kill_when(process: subprocess.Popen, due: Callable[[], Any]) -> bool:
    """Kills a process once something is due; whether it still ran."""
    try:
        while not due() and process.poll() is None:
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()
    return process.returncode == -signal.SIGKILL
