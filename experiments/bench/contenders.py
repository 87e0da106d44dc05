"""What kernels.py times at a shape: our implementations, and what JAX has for the same result."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels import gumbel_argmax as draws
from specrl_kernels import head_argmax as heads
from specrl_kernels import tree_attention as trees
from specrl_kernels.tree_attention.api import IMPLEMENTATIONS

from .kernel_shapes import FEATURES, HEADS, VOCABULARY, DrawShape, HeadShape, Shape, TreeShape

COPIES = 8  # of the large arguments, at most
MOST_BYTES = 8 << 30  # of temporaries that a contender may need

Program = Callable[..., Any]

class Impossible(Exception):
    """A contender cannot run a shape; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """`step(carry, large) -> carry`, run over copies of `large`."""

    step: Program
    carry: Any
    large: Any
    ours: bool


def contenders(shape: Shape, dtype: Any) -> dict[str, Callable[[], Contender]]:
    """Returns makers of contenders by name, in the order in which they run."""
    if isinstance(shape, DrawShape):
        ours = {name: functools.partial(draw_contender, shape, name)
                for name in draws.IMPLEMENTATIONS if name != "reference"}  # numpy's
        return ours | {"jax.random.categorical": functools.partial(_categorical, shape)}
    if isinstance(shape, HeadShape):
        ours = {name: functools.partial(head_contender, shape, dtype, name)
                for name in heads.IMPLEMENTATIONS}
        return ours | {"product, jax.random.categorical": functools.partial(
            _categorical_of_head, shape, dtype)}
    ours = {name: functools.partial(tree_contender, shape, dtype, name) for name in IMPLEMENTATIONS}
    return ours | {
        "dot_product_attention, mask": functools.partial(_dot_product, shape, dtype, None),
        "dot_product_attention, cuDNN": functools.partial(_dot_product, shape, dtype, "cudnn")}


# Tree attention.


def lengths(shape: TreeShape) -> np.ndarray:
    """Returns the committed tokens i32[rows]."""
    first = shape.context // 8 if shape.ragged else shape.context
    return np.linspace(first, shape.context, shape.rows).astype(np.int32)


def tree_arguments(shape: TreeShape, dtype: Any) -> dict[str, Any]:
    """Returns the arguments of `tree_attention`: binary trees, all nodes packed in order."""
    (h, g, e), b, n, s = HEADS[shape.model], shape.rows, shape.nodes, shape.context
    keys = iter(jax.random.split(jax.random.key(0), 7))
    normal = lambda *dims: jax.random.normal(next(keys), dims, dtype)  # noqa: E731
    index = np.arange(b * n, dtype=np.int32)
    parent = np.maximum(np.arange(n) - 1, 0) // 2
    groups = np.arange(b, dtype=np.int32).reshape(-1, shape.group)
    p = len(groups)
    prefix = None if not shape.prompt else trees.Prefix(
        normal(p, g, e, shape.prompt), normal(p, g, shape.prompt, e),
        jnp.full(p, shape.prompt, jnp.int32), jnp.asarray(groups))
    return {"q": normal(b * n, h, e), "row": jnp.asarray(index // n),
            "node": jnp.asarray(index % n),
            "tree_k": normal(b, n, g, e), "tree_v": normal(b, n, g, e),
            "parent": jnp.asarray(np.broadcast_to(parent, (b, n)).astype(np.int32)),
            "cache_k": normal(b, g, e, s), "cache_v": normal(b, g, s, e),
            "length": jnp.asarray(lengths(shape)), "prefix": prefix}


def tree_contender(shape: TreeShape, dtype: Any, name: str, **options: Any) -> Contender:
    """Returns one of our implementations; `options` are those of `tree_attention`."""
    (h, _, e), nodes = HEADS[shape.model], shape.rows * shape.nodes
    seen = shape.context + shape.prompt
    oracle = name == "reference"  # plain XLA, so it counts as an alternative
    needed = COPIES * 2 * 4 * nodes * seen * h * e  # XLA gathers the keys of all copies at once
    if oracle and needed > MOST_BYTES:
        raise Impossible(f"{name} would hold {needed >> 30} GiB of keys and values")
    args = tree_arguments(shape, dtype)
    q, large = args.pop("q"), {name: args.pop(name) for name in ("cache_k", "cache_v", "prefix")}

    def step(q: Any, large: Any) -> Any:
        return trees.tree_attention(q, **args, **large, scale=e**-0.5, implementation=name,
                                    **options)

    return Contender(step, q, large, ours=not oracle)


def _by_slot(shape: TreeShape, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Returns q [B, n, H, E]; k and v [B, S + n, G, E], the tree last; visible bool[B, n, S + n].

    Each row has its own copy of a shared prompt, before its context.
    """
    args = tree_arguments(shape, dtype)
    b, n = args["parent"].shape
    k = jnp.concatenate([args["cache_k"].transpose(0, 3, 1, 2), args["tree_k"]], 1)
    v = jnp.concatenate([args["cache_v"].transpose(0, 2, 1, 3), args["tree_v"]], 1)
    prompt = shape.prompt
    if prompt:
        k, v = (jnp.concatenate([jnp.repeat(jnp.moveaxis(x, axis, 1), shape.group, 0), own], 1)
                for x, axis, own in ((args["prefix"].k.swapaxes(2, 3), 2, k),
                                     (args["prefix"].v, 2, v)))
    seen = np.eye(n, dtype=bool)
    for node, parent in enumerate(np.asarray(args["parent"][0])[1:], 1):
        seen[node] |= seen[parent]
    slots = prompt + shape.context
    context = np.arange(slots)[None] < prompt + lengths(shape)[:, None]
    visible = np.concatenate([np.broadcast_to(context[:, None], (b, n, slots)),
                              np.broadcast_to(seen, (b, n, n))], 2)
    return args["q"].reshape(b, n, *args["q"].shape[1:]), k, v, jnp.asarray(visible)


def _dot_product(shape: TreeShape, dtype: Any, implementation: str | None) -> Contender:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Impossible("needs a gpu")
    q, k, v, visible = _by_slot(shape, dtype)

    def step(q: Any, kv: Any) -> Any:
        return jax.nn.dot_product_attention(q, *kv, mask=visible[:, None],
                                            implementation=implementation)

    return Contender(step, q, (k, v), ours=False)


# The perturbed argmax.


def draw_arguments(shape: DrawShape) -> dict[str, Any]:
    """Returns the arguments of `gumbel_argmax` at temperature 1; logits are a head's [V, W]."""
    logits = jax.random.normal(jax.random.key(0), (VOCABULARY[shape.model], shape.positions)) * 3
    return {"logits": logits, **_of_positions(shape.positions)}


def _of_positions(width: int) -> dict[str, Any]:
    key = np.random.default_rng(0).integers(0, 2**32, (width, 2), dtype=np.uint32)
    return {"temperature": jnp.ones(width), "key": jnp.asarray(key),
            "position": jnp.arange(width, dtype=jnp.int32)}


def draw_contender(shape: DrawShape, name: str, **options: Any) -> Contender:
    """Returns one of our implementations; `options` are those of `gumbel_argmax`."""
    args = draw_arguments(shape)
    logits, position = args.pop("logits"), args.pop("position")

    def step(position: Any, logits: Any) -> Any:
        drawn = draws.gumbel_argmax(logits.T, position=position, count=shape.count,
                                    implementation=name, **args, **options)
        return _onward(position, drawn.token[:, 0], drawn.logprob[:, 0])

    return Contender(step, position, logits, ours=True)


def _categorical(shape: DrawShape) -> Contender:
    args = draw_arguments(shape)

    return Contender(functools.partial(_sample, shape.count), args["position"], args["logits"],
                     ours=False)


def _sample(count: int, position: Any, logits: Any) -> Any:
    """Returns the next positions after a draw by `jax.random` from logits [V, W]."""
    scores = logits + jax.random.gumbel(jax.random.key(position[0]), logits.shape)
    token = scores.argmax(0).astype(jnp.int32) if count == 1 else jax.lax.top_k(
        scores.T, count)[1][:, 0]
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, 0), token[None], 0)[0]
    return _onward(position, token, logprob)


def _onward(position: Any, token: Any, logprob: Any) -> Any:
    """Returns positions that depend on the drawn tokens, so that draws run in sequence."""
    return (position + token + (logprob > 0)) & 1023


# The same from an output head.


def head_arguments(shape: HeadShape, dtype: Any) -> dict[str, Any]:
    """Returns the arguments of `head_argmax` at temperature 1."""
    keys, features = jax.random.split(jax.random.key(0)), FEATURES[shape.model]
    return {"hidden": jax.random.normal(keys[0], (features, shape.positions), dtype),
            "head": jax.random.normal(keys[1], (shape.vocabulary, features), dtype) / 10,
            **_of_positions(shape.positions)}


def head_contender(shape: HeadShape, dtype: Any, name: str, **options: Any) -> Contender:
    """Returns one of our implementations; `options` are those of `head_argmax`."""
    args = head_arguments(shape, dtype)
    head, position = args.pop("head"), args.pop("position")

    def step(position: Any, head: Any) -> Any:
        drawn = heads.head_argmax(head=head, position=position, implementation=name, **args,
                                  **options)
        return _onward(position, drawn.token[:, 0], drawn.logprob[:, 0])

    return Contender(step, position, head, ours=True)


def _categorical_of_head(shape: HeadShape, dtype: Any) -> Contender:
    args = head_arguments(shape, dtype)

    def step(position: Any, head: Any) -> Any:
        return _sample(1, position, jnp.matmul(head, args["hidden"],
                                               preferred_element_type=jnp.float32))

    return Contender(step, args["position"], args["head"], ours=False)
