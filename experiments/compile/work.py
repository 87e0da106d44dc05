"""Arithmetic of a run: bytes that a device holds, and the least work of each program.

A multiply-add is two FLOPs. Element-wise work, norms and softmaxes, which fuse with products, are
not counted. The work of a run's programs is a device's share. Shape letters as in structs.py.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from specrl_jax.config import Config
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.architecture import Architecture, count, describe
from specrl_jax.rl.logprobs import TOKENS_AT_ONCE
from specrl_jax.rollout.layout import Shapes

BACKWARD = 3  # forward and backward: two more products for each one of the forward pass
MATRICES = ("qkv", "o", "gate_up", "down")
FLOAT, HALF = 4, 2
ADAM = 3 * FLOAT  # master weight and two moments, bytes a parameter
LOGITS = 2  # copies of a chunk's logits: they and their gradient
# Forward passes that gradients of attention take beyond BACKWARD: the kernels for queries and for
# keys and values both compute the scores anew, and the gradients of the weights.
SCORED_AGAIN = 1.5
KEPT = {"dots_with_no_batch_dims_saveable": 0.7}  # of the activations of a layer, by learner.remat


Amount = np.ndarray | float


# Of an architecture.


def layer_matmul_params(arch: Architecture) -> int:
    """Returns the number of layer parameters that take part in matrix products."""
    return sum(math.prod(layer[name].shape) for layer in describe(arch)["layers"]
               for name in MATRICES)


def head_params(arch: Architecture) -> int:
    """Returns the number of parameters of the output head."""
    return arch.vocab_size * arch.hidden_size


def weight_bytes(arch: Architecture, itemsize: int) -> int:
    """Returns the bytes of weights that a round reads; an untied embedding is only looked up."""
    total = count(describe(arch))
    return itemsize * (total if arch.tied else total - head_params(arch))


def cache_bytes(arch: Architecture, itemsize: int) -> int:
    """Returns the bytes of the keys and values of one token."""
    return itemsize * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim


def attention_flops(arch: Architecture, pairs: Amount) -> Amount:
    """Returns the FLOPs of scores and weighted sums of (query, key) pairs, all layers and heads."""
    return 4 * arch.num_layers * arch.num_heads * arch.head_dim * pairs


def forward_flops(arch: Architecture, tokens: Amount, scored: Amount, pairs: Amount) -> Amount:
    """Returns the FLOPs of a forward pass.

    Args:
      tokens: through the layers.
      scored: positions whose logits are computed.
      pairs: (query, key) pairs of their attention.
    """
    products = layer_matmul_params(arch) * tokens + head_params(arch) * scored
    return 2 * products + attention_flops(arch, pairs)


def round_bytes(arch: Architecture, itemsize: int, cached: Amount) -> Amount:
    """Returns the bytes of a round: the weights, and `cached` tokens that it reads or writes."""
    return weight_bytes(arch, itemsize) + cache_bytes(arch, itemsize) * cached


# Of a run.


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does and sends."""

    flops: float = 0.0
    moved: float = 0.0  # bytes of its memory
    sent: float = 0.0  # bytes over its links


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a run that its work depends on."""

    config: Config
    arch: Architecture

    @property
    def drafts(self) -> bool:
        return self.config.spec.drafter != "off"

    @property
    def item(self) -> int:
        """Bytes of a weight of the rollout."""
        return np.dtype("float32").itemsize if self.config.model.dtype == "float32" else HALF

    @property
    def tensor(self) -> int:
        return self.config.mesh.tensor

    @property
    def shards(self) -> int:
        return self.config.mesh.data * self.config.mesh.fsdp

    @property
    def parameters(self) -> int:
        return count(describe(self.arch))

    @property
    def head(self) -> Any:
        """The EAGLE head that the config asks for."""
        draft = self.config.draft
        return EagleArch(self.arch, draft_vocab=draft.vocab, tap_norm=draft.tap_norm,
                         state_norm=draft.state_norm)

    @property
    def drafter_parameters(self) -> int:
        return count(eagle_model.describe(self.head)) if self.config.spec.drafter == "eagle" else 0

    @property
    def shapes(self) -> Shapes:
        config = self.config
        return Shapes(
            batch=config.rollout.batch_size // self.shards,
            sequences=config.sequences // self.shards, group=config.group_size,
            prompt=config.rollout.max_prompt_tokens, response=config.rollout.max_new_tokens,
            shards=self.shards, depth=config.spec.max_depth if self.drafts else 0,
            min_batch=config.rollout.min_batch)


def memory(model: Model) -> dict[str, float]:
    """Returns the bytes that a device needs at its fullest, by what needs them."""
    config, arch, shapes = model.config, model.arch, model.shapes
    split = config.mesh.fsdp * model.tensor  # of a weight; its moments are split over data, too
    tokens = config.learner.micro_batch // model.shards * (shapes.prompt + shapes.response)
    wide = tokens * (6 * arch.hidden_size + 3 * arch.intermediate_size / model.tensor) * HALF
    kept = wide * KEPT.get(config.learner.remat, 1)
    if config.learner.remat == "full":
        kept = tokens * arch.hidden_size * HALF
    layer = layer_matmul_params(arch) / arch.num_layers / model.tensor
    moved = {
        "learner state": model.parameters * (FLOAT + 2 * FLOAT / config.mesh.data) / split,
        "published weights": model.parameters * model.item / model.tensor,
        "caches": shapes.batch * shapes.cache * cache_bytes(arch, model.item)
        / model.tensor,
        # Two sums of gradients, the table whole with its gradient, activations, a chunk's logits.
        "update": 2 * model.parameters * FLOAT / split + (
            (1 if arch.tied else 2) * head_params(arch) * (HALF + FLOAT)
            + LOGITS * min(tokens, TOKENS_AT_ONCE["tpu"]) * arch.vocab_size * FLOAT) / model.tensor
        + arch.num_layers * kept + 2 * wide + 2 * layer * (HALF + FLOAT)}
    if config.rl.kl:
        moved["reference"] = model.parameters * FLOAT / split
    if model.drafts:
        own = model.drafter_parameters
        cached = shapes.batch * shapes.cache * model.item
        moved["drafter"] = (own * (ADAM + FLOAT + model.item) + cached * (
            arch.hidden_size + 2 * arch.num_kv_heads * arch.head_dim)) / model.tensor
    return moved


def round_work(model: Model, rows: int, context: float, nodes: int = 1) -> Work:
    """Returns the work of a verification round.

    Args:
      rows: of the batch, live or not.
      context: cached tokens of all rows of a data shard.
      nodes: tree nodes a row, root included; 1 is plain decoding.
    """
    arch, split, tokens = model.arch, model.tensor, rows * nodes
    moved = float(round_bytes(arch, model.item, context + tokens))
    flops = float(forward_flops(arch, tokens, tokens, nodes * context + tokens))
    return _over_tensor(model, Work(flops / split, moved / split), tokens, 2)


def draft_work(model: Model, rows: int) -> Work:
    """Returns the work of drafting a tree: the head reads its weights at each step of its depth."""
    depth, own = model.config.spec.depth, model.drafter_parameters
    return Work(2 * rows * depth * own / model.tensor, depth * own * model.item / model.tensor)


def prefill_work(model: Model, prompts: float, length: float) -> Work:
    """Returns the work of prefilling a data shard's `prompts` of `length` tokens."""
    tokens = prompts * length
    flops = float(forward_flops(model.arch, tokens, 0, tokens * length / 2))
    moved = float(round_bytes(model.arch, model.item, tokens))
    return _over_tensor(model, Work(flops / model.tensor, moved / model.tensor), tokens, 2)


def update_work(model: Model, tokens: float, pairs: float) -> Work:
    """Returns the work of a policy update.

    Args:
      tokens: of all rows and shards, prompts and padding included.
      pairs: (query, key) pairs of their attention.
    """
    config, arch, split = model.config, model.arch, model.tensor
    passes = BACKWARD + (config.learner.remat == "full")
    micro = math.ceil(config.sequences / config.learner.micro_batch)
    forward, again = (float(flops) for flops in (
        forward_flops(arch, tokens, tokens, pairs), attention_flops(arch, pairs)))
    flops = (passes * forward + SCORED_AGAIN * again) / (model.shards * split)
    weights, fsdp, data = model.parameters / split, config.mesh.fsdp, config.mesh.data
    moved = micro * passes * weights * model.item + 7 * FLOAT * weights / fsdp
    # Weights are gathered for each pass, and gradients summed once a micro-batch.
    gathered = micro * weights * (2 * model.item + FLOAT) * (fsdp - 1) / fsdp
    summed = 2 * FLOAT * weights / fsdp * (data - 1) / data
    work = Work(flops, moved, gathered + summed)
    return _over_tensor(model, work, tokens / model.shards, 2 * passes - 2)


def distill_work(model: Model, tokens: float, pairs: float) -> Work:
    """Returns the work of the drafter's features and updates; see `update_work`."""
    options, shards = model.config.distill, model.shards
    features = float(forward_flops(model.arch, tokens, 0, pairs)) / model.tensor
    teacher = 2 * tokens * head_params(model.arch)
    learned = BACKWARD * 2 * tokens * model.drafter_parameters * options.unroll
    return Work((features + options.updates * (teacher + learned)) / shards)


def publish_work(model: Model) -> Work:
    """Returns the work of casting the weights and gathering them over fsdp."""
    weights, fsdp = model.parameters / model.tensor, model.config.mesh.fsdp
    return Work(0, weights * (FLOAT / fsdp + model.item),
                weights * model.item * (fsdp - 1) / fsdp)


def least(model: Model, title: str) -> Work | None:
    """Returns the work of a run's program at full length; None where no arithmetic here gives it.

    A launch counts as one plain round of its rows. Every allocated slot of a cache is read.
    """
    name, *sizes = title.split()
    config, rows = model.config, model.shapes.batch
    if name == "launch":
        return round_work(model, int(sizes[0]), int(sizes[0]) * model.shapes.cache)
    if title == "plain round":
        return round_work(model, rows, rows * model.shapes.cache)
    if title == "drafted round":
        nodes = min(config.spec.nodes, config.spec.max_packed // rows)
        return add(round_work(model, rows, rows * model.shapes.cache, nodes),
                   draft_work(model, rows))
    if name == "prefill":
        return prefill_work(model, *map(int, sizes))
    if name == "update" and not config.learner.lora_rank:
        return update_work(model, *full_length(model))
    return publish_work(model) if name == "publish" else None


def add(one: Work, other: Work) -> Work:
    """Returns the work of both."""
    return Work(one.flops + other.flops, one.moved + other.moved, one.sent + other.sent)


def full_length(model: Model) -> tuple[float, float]:
    """Returns tokens and (query, key) pairs of a step's sequences at their longest."""
    config, prompt, response = model.config, model.shapes.prompt, model.shapes.response
    prompts = config.sequences // config.sequences_per_unit
    pairs = prompts * prompt**2 / 2 + config.sequences * response * (prompt + response / 2)
    return prompts * prompt + config.sequences * response, pairs


def _over_tensor(model: Model, work: Work, tokens: float, reductions: int) -> Work:
    """Adds a layer's `reductions` of activations of `tokens` over the tensor axis."""
    t, arch = model.tensor, model.arch
    if t == 1:
        return work
    size = reductions * arch.num_layers * tokens * arch.hidden_size * model.item
    return dataclasses.replace(work, sent=work.sent + 2 * size * (t - 1) / t)
