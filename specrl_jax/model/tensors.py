"""Checkpoint tensors by the names of Hugging Face's Llama, and the parameter tree made of them.

Shape letters as in structs.py; R = H / G query heads a key-value head, I = MLP width.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.model.layers import is_stacked, layer_of
from specrl_jax.runtime.digest import digest
from specrl_jax.structs import Params, PyTree

Shape = tuple[int, ...]
Part = tuple[tuple[int, int], ...]  # first index and end, of each axis

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TOP = {"embed": EMBED, "final_norm": FINAL_NORM, "head": HEAD}


SAMPLE = 2**24  # elements that `digest` reads


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint: their shapes, and a function that reads a part of one."""

    shapes: Mapping[str, Shape]
    read_part: Callable[[str, Part], np.ndarray]  # float32 array in Hugging Face's layout

    def read(self, name: str) -> np.ndarray:
        """Returns a whole tensor in float32."""
        return self.read_part(name, whole(self.shapes[name]))

    def digest(self) -> str:
        """Returns a hash of all names and shapes, and of the values of the smallest tensors: up to
        SAMPLE elements, so the vectors and a few matrices, not the whole content."""
        shapes = {name: [int(size) for size in shape] for name, shape in self.shapes.items()}
        names = sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))
        read = itertools.accumulate(math.prod(shapes[name]) for name in names)
        small = [name for name, elements in zip(names, read, strict=True) if elements <= SAMPLE]
        return digest(itertools.chain([shapes], (
            np.ascontiguousarray(self.read(name)).tobytes() for name in small)))


def whole(shape: Shape) -> Part:
    """Returns the part that is all of an array."""
    return tuple((0, size) for size in shape)


def slices(part: Part) -> tuple[slice, ...]:
    """Returns the index of a part."""
    return tuple(slice(*span) for span in part)


@dataclasses.dataclass(frozen=True)
class Joined:
    """How a parameter of a layer is made of tensors: seen with more axes, and joined along one."""

    tensors: tuple[str, ...]
    splits: Shape  # for each axis of a tensor, how many of the parameter's it becomes
    axis: int = 0


def layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def layer_shapes(arch: Architecture) -> dict[str, Shape]:
    """Returns shapes by the name within a layer, [out, in] for matrices."""
    f, e, i = arch.hidden_size, arch.head_dim, arch.intermediate_size
    q, kv = arch.num_heads * e, arch.num_kv_heads * e
    shapes: dict[str, Shape] = {  # in the order in which random models draw them
        "input_layernorm.weight": (f,), "self_attn.q_proj.weight": (q, f),
        "self_attn.k_proj.weight": (kv, f), "self_attn.v_proj.weight": (kv, f),
        "self_attn.o_proj.weight": (f, q), "post_attention_layernorm.weight": (f,),
        "mlp.gate_proj.weight": (i, f), "mlp.up_proj.weight": (i, f),
        "mlp.down_proj.weight": (f, i)}
    if arch.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,),
                   "self_attn.v_proj.bias": (kv,)}
    if arch.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
    return shapes


def tensor_shapes(arch: Architecture) -> dict[str, Shape]:
    """Returns the shape of every tensor of a checkpoint of `arch`, by name."""
    shapes: dict[str, Shape] = {EMBED: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        shapes |= {layer_name(layer, part): s for part, s in layer_shapes(arch).items()}
    shapes[FINAL_NORM] = (arch.hidden_size,)
    if not arch.tied:
        shapes[HEAD] = (arch.vocab_size, arch.hidden_size)
    return shapes


def check_tensors(arch: Architecture, shapes: Mapping[str, Shape], source: str) -> None:
    """Raises ConfigError unless a checkpoint's tensors are exactly those of `arch`.

    A tied head and RoPE's inverse frequencies are redundant and may be there.
    """
    if arch.num_layers > len(shapes):  # before anything is made for each layer
        raise ConfigError(f"{source}: {arch.num_layers} layers are asked for, but there are only "
                          f"{len(shapes)} tensors; the download is incomplete or the configuration "
                          "is of another model")
    wanted = tensor_shapes(arch)
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ConfigError(f"{source}: tensor {missing[0]} is missing ({len(missing)} of "
                          f"{len(wanted)} are); the download is incomplete or config.json is of "
                          "another model")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise ConfigError(f"{source}: tensor {name} has shape {tuple(shapes[name])}, but the "
                              f"configuration wants {shape}; take both from one model")
    unknown = [name for name in shapes if name not in wanted and name != HEAD
               and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ConfigError(f"{source}: unknown tensor {unknown[0]}; a {arch.family} model of this "
                          "configuration has no such tensor, so it would be computed wrongly; take "
                          "both from one model, of a supported kind")


LAYER = {  # parameters of a layer
    "attn_norm": Joined(("input_layernorm.weight",), (1,)),
    "qkv": Joined(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), (3, 1), axis=1),
    "qkv_bias": Joined(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), (3,), axis=1),
    "q_norm": Joined(("self_attn.q_norm.weight",), (1,)),
    "k_norm": Joined(("self_attn.k_norm.weight",), (1,)),
    "o": Joined(("self_attn.o_proj.weight",), (1, 3)),
    "mlp_norm": Joined(("post_attention_layernorm.weight",), (1,)),
    "gate_up": Joined(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (2, 1)),
    "down": Joined(("mlp.down_proj.weight",), (1, 1)),
}


def pack(arch: Architecture, tensors: Tensors, shardings: PyTree = None) -> Params:
    """Returns the parameter tree of architecture.describe in float32.

    Args:
      shardings: of the tree, with a list of layers or with stacked layers: each process reads the
        parts of its own devices and holds one parameter on the host at a time. None returns numpy
        arrays of the whole tree, with a list of layers.
    """
    stacked = shardings is not None and is_stacked(shardings)
    leaves, tree = jax.tree_util.tree_flatten_with_path(describe(arch, stacked), is_leaf=is_param)
    wanted = [None] * len(leaves) if shardings is None else tree.flatten_up_to(shardings)
    return tree.unflatten([
        _array(param.shape, sharding, functools.partial(_read_param, tensors, path, param.shape))
        for (path, param), sharding in zip(leaves, wanted, strict=True)])


def _array(shape: Shape, sharding: jax.sharding.Sharding | None,
           read: Callable[[Part], np.ndarray]) -> np.ndarray | jax.Array:
    if sharding is None:
        return read(whole(shape))
    once = functools.cache(read)  # devices may hold the same part

    def part(index: Any) -> np.ndarray:
        return once(tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, sharding, part)


def _read_param(tensors: Tensors, path: tuple[Any, ...], shape: Shape, part: Part) -> np.ndarray:
    """Reads a part of the parameter at `path`, whose whole shape is `shape`."""
    if len(path) == 1:
        return tensors.read_part(TOP[path[0].key], part)
    if len(path) == 3:
        return _read_layer(tensors, path[1].idx, path[2].key, shape, part)
    out = np.empty([end - first for first, end in part], np.float32)
    for row, layer in zip(out, range(*part[0]), strict=True):
        row[...] = _read_layer(tensors, layer, path[1].key, shape[1:], part[1:])
    return out


def _read_layer(tensors: Tensors, layer: int, name: str, shape: Shape, part: Part) -> np.ndarray:
    joined = LAYER[name]
    names = [layer_name(layer, tensor) for tensor in joined.tensors]
    if len(names) == 1:
        return _read_split(tensors, names[0], joined.splits, shape, part)
    pieces, axis = [], joined.axis  # which no mesh splits
    others = math.prod(shape) // shape[axis]
    for tensor in names:
        size = math.prod(tensors.shapes[tensor]) // others
        pieces.append(_read_split(tensors, tensor, joined.splits,
                                  (*shape[:axis], size, *shape[axis + 1:]),
                                  (*part[:axis], (0, size), *part[axis + 1:])))
    return np.concatenate(pieces, axis)


def _read_split(tensors: Tensors, name: str, splits: Shape, shape: Shape, part: Part
                ) -> np.ndarray:
    """Reads a part of a tensor that is seen with shape `shape`; see `Joined.splits`.

    Of the axes that one is split into, the first of more than 1 bounds what is read; the part is
    cut out along the others afterwards.
    """
    axes, read, view, rest = iter(zip(shape, part, strict=True)), [], [], []
    for count in splits:
        sizes, spans = zip(*itertools.islice(axes, count), strict=True)
        outer = next((i for i, size in enumerate(sizes) if size > 1), count - 1)
        low, high = spans[outer]
        stride = math.prod(sizes[outer + 1:])
        read.append((low * stride, high * stride))
        view += [*sizes[:outer], high - low, *sizes[outer + 1:]]
        rest += [*whole((*sizes[:outer], high - low)), *spans[outer + 1:]]
    return tensors.read_part(name, tuple(read)).reshape(view)[slices(tuple(rest))]


def unpack(arch: Architecture, params: Params) -> Iterable[tuple[str, np.ndarray]]:
    """Yields (name, array) pairs, with one layer on the host at a time.

    It is the inverse of `pack`; layers may be stacked.
    """
    yield EMBED, np.asarray(params["embed"])
    for layer in range(arch.num_layers):
        for part, array in _unpack_layer(arch, layer_of(params["layers"], layer)).items():
            yield layer_name(layer, part), np.ascontiguousarray(array)
    yield FINAL_NORM, np.asarray(params["final_norm"])
    if not arch.tied:
        yield HEAD, np.asarray(params["head"])


def _unpack_layer(arch: Architecture, packed: Params) -> dict[str, np.ndarray]:
    packed = {name: np.asarray(x) for name, x in packed.items()}
    r, shapes = arch.group, layer_shapes(arch)
    parts = {
        "input_layernorm.weight": packed["attn_norm"],
        "self_attn.o_proj.weight": packed["o"],
        "post_attention_layernorm.weight": packed["mlp_norm"],
        "mlp.gate_proj.weight": packed["gate_up"][0],
        "mlp.up_proj.weight": packed["gate_up"][1],
        "mlp.down_proj.weight": packed["down"],
    }
    heads = {"q": slice(0, r), "k": slice(r, r + 1), "v": slice(r + 1, r + 2)}
    for x, which in heads.items():
        parts[f"self_attn.{x}_proj.weight"] = packed["qkv"][:, which]
        if arch.qkv_bias:
            parts[f"self_attn.{x}_proj.bias"] = packed["qkv_bias"][:, which]
    if arch.qk_norm:
        parts |= {f"self_attn.{x}.weight": packed[x] for x in ("q_norm", "k_norm")}
    return {name: array.reshape(shapes[name]) for name, array in parts.items()}
