"""EAGLE-3 heads on disk, as SpecForge trains them and SGLang and vLLM serve them.

A directory with config.json and model.safetensors. `d2t` holds offsets, draft token i is token
i + d2t[i] of the actor, and `t2d` marks the actor's tokens that have a draft token; the embedding
is the actor's. Names were checked against SpecForge's list for SGLang's loader.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specrl_jax.config import ConfigError, check
from specrl_jax.draft.eagle_model import EagleArch, default_taps
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import save_tensors
from specrl_jax.model.hf_config import parse_config, write_config
from specrl_jax.model.hf_directory import DTYPES, SINGLE, open_tensors
from specrl_jax.model.tokenizer import read_json
from specrl_jax.runtime.paths import new_directory
from specrl_jax.structs import Json, PyTree

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SpecForge's; vLLM's, AngelSlim's
OURS = "specrl_jax"  # section of config.json that other readers ignore
HEAD, OFFSETS, MASK, EMBED = "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"
TAP_NORM, STATE_NORM = "fc_norm", "norm_output"  # fields of EAGLE-3.1; the first names tensors, too
PICKLE = "pytorch_model.bin"
CONVERT = ("python -c 'import torch, safetensors.torch; safetensors.torch.save_file(torch.load("
           f'"{PICKLE}", weights_only=True), "{SINGLE}")' "'")
_MAPS = {OFFSETS: ("I64", "I32"), MASK: ("BOOL",)}
_NORMS = {"embed_norm": "midlayer.input_layernorm.weight",
          "feature_norm": "midlayer.hidden_norm.weight",
          "mlp_norm": "midlayer.post_attention_layernorm.weight", "final_norm": "norm.weight"}
_PROJECTIONS = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"]
_OUT, _DOWN = "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"
_GATE_UP = [f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up")]


class MadeFor(NamedTuple):
    """Identities of what a head was trained for; "" is unknown, as in heads of other trainers."""

    tokenizer: str = ""
    actor: str = ""  # of its weights, see runtime/checksum.py


UNKNOWN = MadeFor()


class Head(NamedTuple):
    arch: EagleArch
    own: dict[str, PyTree]  # {"weights", "vocab"} as float32 and int32 arrays
    warnings: list[str]
    made_for: MadeFor


def save(directory: str | os.PathLike[str], arch: EagleArch, own: Mapping[str, PyTree],
         made_for: MadeFor = UNKNOWN) -> None:
    """Writes a head {"weights", "vocab"} in float32; after an error nothing is written.

    Serving engines need lm_head.weight, which is missing if `arch.own_head` is False.

    Raises:
      ConfigError: the directory exists and is not empty.
    """
    with new_directory("drafter", directory) as partial:
        config = write_config(arch.layer) | {
            "architectures": [CLASSES[0]], "draft_vocab_size": arch.draft_vocab,
            "eagle_config": {"use_aux_hidden_state": True,
                             "eagle_aux_hidden_state_layer_ids": list(arch.taps)},
            TAP_NORM: arch.tap_norm, STATE_NORM: arch.state_norm,
            OURS: made_for._asdict()}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tensors(_tensors(arch, own), partial / SINGLE)


def load(directory: str | os.PathLike[str], actor: Architecture, stop: Sequence[int] = ()) -> Head:
    """Reads a head that fits an actor of this architecture; `stop` tokens end a response.

    Raises:
      ConfigError: a file is missing or damaged, or the head is of another kind or another actor.
    """
    folder = Path(directory)
    config, tensors = read_json(folder / "config.json"), _read(folder / SINGLE)
    arch = _architecture(config, tensors, actor, str(folder))
    shapes = _shapes(arch)
    extra = [name for name in tensors if name not in {*shapes, OFFSETS, MASK, EMBED}]
    _expect(not extra, folder, f"tensor {extra[:1]} is not known; give a head with one Llama layer")
    for name, shape in shapes.items():
        _expect(name in tensors, folder, f"tensor {name} is missing; give a whole checkpoint")
        _expect(tensors[name].shape == shape, folder,
                f"tensor {name} has shape {tensors[name].shape}, expected {shape}; it does not fit "
                "its config.json")
    vocab = _vocab(arch, tensors, folder)
    warnings = [f"{folder}: stop token {token} is not in the draft vocabulary: the ends of "
                "responses are never drafted" for token in stop if token not in vocab]
    made_for = config.get(OURS) or {}
    _expect(isinstance(made_for, dict) and set(made_for) <= set(MadeFor._fields)
            and all(isinstance(x, str) for x in made_for.values()), folder / "config.json",
            f"{OURS} = {made_for!r} must have strings {', '.join(MadeFor._fields)}; remove it")
    if not made_for.get("tokenizer"):
        warnings.append(f"{folder}: does not name the tokenizer that it was trained with, so only "
                        "the number of its tokens was compared")
    return Head(arch, {"weights": _pack(arch, tensors), "vocab": vocab}, warnings,
                MadeFor(**made_for))


def _architecture(config: Json, tensors: Mapping[str, np.ndarray], actor: Architecture,
                  folder: str) -> EagleArch:
    """Returns the head's architecture, checked against the actor's."""
    kind = config.get("architectures")
    check(isinstance(kind, list) and len(kind) == 1 and kind[0] in CLASSES,
          f"{folder}: architectures", kind, f"must be [{CLASSES[0]!r}] or [{CLASSES[1]!r}]")
    plain = config.get("norm_before_residual", False)
    check(plain is False, f"{folder}: norm_before_residual", plain,
          "is not supported; give a head whose residual is taken before the norm")
    head = parse_config(config, f"{folder}/config.json")
    check(head.num_layers == 1, f"{folder}: num_hidden_layers", head.num_layers,
          "give a head of one layer")
    for name, value in (("hidden_size", head.hidden_size), ("vocab_size", head.vocab_size),
                        ("target_hidden_size", config.get("target_hidden_size"))):
        wanted = actor.vocab_size if name == "vocab_size" else actor.hidden_size
        check(value in (wanted, None), f"{folder}: {name}", value,
              f"the actor has {wanted}; give a head that was trained for it")
    draft = config.get("draft_vocab_size") or head.vocab_size
    check(type(draft) is int and 1 <= draft <= head.vocab_size, f"{folder}: draft_vocab_size",
          draft, f"must lie in 1..vocab_size = {head.vocab_size}")
    like = dataclasses.replace(actor, **{name: getattr(head, name) for name in (
        "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "norm_eps", "rope_theta",
        "rope_scaling")})
    normed, post = (config.get(name, False) for name in (TAP_NORM, STATE_NORM))
    check(normed is any(name.startswith(f"{TAP_NORM}.") for name in tensors),
          f"{folder}: {TAP_NORM}", normed, f"must be true if there are tensors {TAP_NORM}.*, and "
          "false if there are none; give a whole checkpoint")
    check(isinstance(post, bool), f"{folder}: {STATE_NORM}", post, "must be true or false")
    return EagleArch(actor, _taps(config, tensors, actor, folder), draft, HEAD in tensors, normed,
                     post, like)


def _taps(config: Json, tensors: Mapping[str, np.ndarray], actor: Architecture,
          folder: str) -> tuple[int, ...]:
    """Returns the tapped layers: those of SGLang's option, counted from 0, or the default."""
    section = config.get("eagle_config") or {}
    check(isinstance(section, dict), f"{folder}: eagle_config", section, "must be an object")
    used, named = map(section.get, ("use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"))
    check(used in (None, True), f"{folder}: use_aux_hidden_state", used,
          "give a head that reads several layers of the actor, as EAGLE-3 does")
    check(named is None or isinstance(named, list) and all(type(x) is int for x in named),
          f"{folder}: eagle_aux_hidden_state_layer_ids", named, "must be a list of layers")
    taps = default_taps(actor.num_layers) if named is None else tuple(named)
    first = tensors.get("fc.weight", np.zeros(0))
    width = first.shape[1] if first.ndim == 2 else 0
    check(width == len(taps) * actor.hidden_size, f"{folder}: inputs of fc.weight", width,
          f"the actor's {len(taps)} tapped layers {taps} have {len(taps) * actor.hidden_size}; "
          "give a head that was trained for it")
    return taps


def _vocab(arch: EagleArch, tensors: Mapping[str, np.ndarray], folder: Path) -> np.ndarray:
    """Returns i32[Vd] from the offsets, checked against the mask."""
    total = arch.actor.vocab_size
    if arch.draft_vocab == total and OFFSETS not in tensors:
        return np.arange(total, dtype=np.int32)
    offsets = tensors.get(OFFSETS, np.zeros(0))
    _expect(offsets.shape == (arch.draft_vocab,), folder,
            f"tensor {OFFSETS} must hold draft_vocab_size = {arch.draft_vocab} offsets; give a "
            "whole checkpoint")
    vocab = np.arange(arch.draft_vocab) + offsets.astype(np.int64)
    _expect(bool(vocab[0] >= 0 and vocab[-1] < total and (np.diff(vocab) > 0).all()), folder,
            f"tensor {OFFSETS} must lead to ascending tokens in 0..{total - 1}; give a head that "
            "was trained for this actor")
    marked = np.zeros(total, bool)
    marked[vocab] = True
    _expect(MASK not in tensors or np.array_equal(tensors[MASK], marked), folder,
            f"tensors {OFFSETS} and {MASK} disagree, or are of another vocabulary; give a head "
            "that was trained for this actor")
    return vocab.astype(np.int32)


def _shapes(arch: EagleArch) -> dict[str, tuple[int, ...]]:
    f, e, i = arch.actor.hidden_size, arch.layer.head_dim, arch.layer.intermediate_size
    q, kv = arch.layer.num_heads * e, arch.layer.num_kv_heads * e
    shapes = {"fc.weight": (f, len(arch.taps) * f), _OUT: (f, q), _DOWN: (f, i)}
    shapes |= dict.fromkeys(_NORMS.values(), (f,)) | dict.fromkeys(_GATE_UP, (i, f))
    shapes |= dict(zip(_PROJECTIONS, ((q, 2 * f), (kv, 2 * f), (kv, 2 * f)), strict=True))
    shapes |= dict.fromkeys(_tap_norms(arch), (f,))
    return shapes | ({HEAD: (arch.draft_vocab, f)} if arch.own_head else {})


def _tap_norms(arch: EagleArch) -> list[str]:
    return [f"{TAP_NORM}.{i}.weight" for i in range(len(arch.taps) if arch.tap_norm else 0)]


def _pack(arch: EagleArch, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tree of eagle_model.describe."""
    g, e, f = arch.layer.num_kv_heads, arch.layer.head_dim, arch.actor.hidden_size
    tensors = {name: a.astype(np.float32) for name, a in tensors.items()}
    qkv = np.concatenate([tensors[x].reshape(g, -1, e, 2 * f) for x in _PROJECTIONS], axis=1)
    packed = {name: tensors[where] for name, where in _NORMS.items()} | {
        "fc": tensors["fc.weight"], "qkv": qkv, "o": tensors[_OUT].reshape(f, g, -1, e),
        "gate_up": np.stack([tensors[x] for x in _GATE_UP]), "down": tensors[_DOWN]}
    if arch.tap_norm:
        packed["tap_norm"] = np.stack([tensors[name] for name in _tap_norms(arch)])
    return packed | ({"head": tensors[HEAD]} if arch.own_head else {})


def _tensors(arch: EagleArch, own: Mapping[str, PyTree]) -> dict[str, np.ndarray]:
    """Inverts `_pack`, and adds the two maps between vocabularies."""
    weights = {name: np.asarray(a, np.float32) for name, a in own["weights"].items()}
    r, qkv = arch.layer.group, weights["qkv"]
    parts = {where: weights[name] for name, where in _NORMS.items()}
    parts |= {"fc.weight": weights["fc"], _OUT: weights["o"], _DOWN: weights["down"]}
    parts |= dict(zip(_GATE_UP, weights["gate_up"], strict=True))
    parts |= dict(zip(_PROJECTIONS, (qkv[:, :r], qkv[:, r], qkv[:, r + 1]), strict=True))
    parts |= dict(zip(_tap_norms(arch), weights.get("tap_norm", ()), strict=True))
    parts |= {HEAD: weights["head"]} if arch.own_head else {}
    shapes, vocab = _shapes(arch), np.asarray(own["vocab"], np.int64)
    marked = np.zeros(arch.actor.vocab_size, bool)
    marked[vocab] = True
    named = {name: np.ascontiguousarray(a.reshape(shapes[name])) for name, a in parts.items()}
    return named | {OFFSETS: vocab - np.arange(len(vocab)), MASK: marked}


def _read(path: Path) -> dict[str, np.ndarray]:
    pickled = path.with_name(PICKLE)
    _expect(path.is_file() or not pickled.is_file(), pickled, f"is a pickle, which is never read; "
            f"convert it: {CONVERT}")
    file = open_tensors(path)
    for name in file.keys():  # noqa: SIM118  it is no mapping
        stored, wanted = file.get_slice(name).get_dtype(), _MAPS.get(name, DTYPES)
        _expect(stored in wanted, path, f"tensor {name} has dtype {stored}, must be one of "
                                       f"{', '.join(wanted)}; save it so, unquantised")
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _expect(ok: bool, where: Path, problem: str) -> None:
    if not ok:
        raise ConfigError(f"{where}: {problem}")
