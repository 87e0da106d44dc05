"""Models in one GGUF file: metadata to architecture, tensors to Hugging Face's names and layout."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture, RopeScaling
from specrl_jax.model.families import FAMILIES
from specrl_jax.model.fields import REPAIR, Fields
from specrl_jax.model.tensors import EMBED, FINAL_NORM, HEAD, Part, Tensors, layer_name, slices
from specrl_jax.model.transformer import frequencies

ROPE_FREQS, EMBEDDING = "rope_freqs.weight", "token_embd.weight"
TOP_NAMES = {EMBEDDING: EMBED, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open file: its path, metadata values by key, and tensor records by name."""

    path: Path
    metadata: Mapping[str, Any]
    records: Mapping[str, gguf.ReaderTensor]

    @property
    def fields(self) -> Fields:
        """Typed reads of the metadata."""
        return Fields(self.metadata, str(self.path))

    def get(self, key: str) -> Any:
        """Returns the metadata value of `key`; raises ConfigError if there is none."""
        if key not in self.metadata:
            raise ConfigError(f"{self.path}: metadata key {key} is missing; convert the model anew "
                              "with a current llama.cpp")
        return self.metadata[key]


def open_gguf(path: Path) -> GgufFile:
    """Maps the file and reads its metadata; the data of tensors stays on disk. Raises ConfigError
    if it is no GGUF file, damaged, or a part of a split model."""
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: {reason}; the file is no GGUF file or is damaged, "
                          "fetch it again") from error
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{path}: one of {metadata['split.count']} parts; merge them with "
                          "llama-gguf-split --merge")
    return GgufFile(path, metadata, {t.name: t for t in reader.tensors})


def gguf_architecture(file: GgufFile, family: str = "") -> Architecture:
    """Returns the architecture that metadata and tensor shapes describe. An empty `family` is the
    file's general.architecture.

    Raises:
      ConfigError: another architecture, a missing key, or a RoPE scaling not known here.
    """
    kind = file.get("general.architecture")
    if not family and (not isinstance(kind, str) or kind not in FAMILIES):
        raise ConfigError(f"{file.path}: general.architecture = {kind!r} is not supported; choose "
                          f"a model of {', '.join(FAMILIES)}, or name a family in model.family")
    fields, known = file.fields, FAMILIES.resolve(family or kind)

    def count(key: str) -> int:
        if isinstance(file.get(f"{kind}.{key}"), list):
            raise ConfigError(f"{file.path}: {kind}.{key} differs between layers, which is not "
                              "supported; choose a model whose layers are alike")
        return fields.count(f"{kind}.{key}")

    heads, hidden = count("attention.head_count"), count("embedding_length")
    kv_heads = count("attention.head_count_kv")
    fields.check(heads % kv_heads == 0, f"{kind}.attention.head_count", heads,
                 f"must be a multiple of attention.head_count_kv = {kv_heads}; {REPAIR}")
    head_dim = fields.count(f"{kind}.attention.key_length", hidden // heads)
    fields.check(head_dim % 2 == 0, f"{kind}.attention.key_length", head_dim,
                 f"RoPE needs an even one; {REPAIR}")
    _check_options(file, kind, head_dim)
    epsilon = f"{kind}.attention.layer_norm_rms_epsilon"
    file.get(epsilon)
    if EMBEDDING not in file.records:
        raise ConfigError(f"{file.path}: tensor {EMBEDDING} is missing; fetch the file again")
    arch = Architecture(
        vocab_size=_shape(file.records[EMBEDDING])[0], hidden_size=hidden,
        intermediate_size=count("feed_forward_length"), num_layers=count("block_count"),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        rope_theta=_exact(fields.number(f"{kind}.rope.freq_base", 10000.0)),
        norm_eps=_exact(fields.number(epsilon)), qkv_bias="blk.0.attn_q.bias" in file.records,
        qk_norm="blk.0.attn_q_norm.weight" in file.records,
        tied="output.weight" not in file.records, max_position=count("context_length"),
        family=family or kind)
    others = {name: x for name, x in known.architecture.items()
              if name not in ("qkv_bias", "qk_norm")}  # read from the file's tensors
    return dataclasses.replace(arch, rope_scaling=_rope_scaling(file, arch), **others)


def gguf_tensors(file: GgufFile, arch: Architecture) -> Tensors:
    """Returns the file's tensors by Llama's names, dequantised to float32 when read, all of a
    tensor for each part. Raises ConfigError if the gguf package cannot dequantise one."""
    _check_quantisations(file)
    family = FAMILIES.resolve(arch.family)
    names = {_hf_name(name, family.gguf_names): name for name in file.records
             if name != ROPE_FREQS}

    def read(name: str, part: Part) -> np.ndarray:
        record = file.records[names[name]]
        array = gguf.quants.dequantize(record.data, record.tensor_type)
        array = np.array(array, np.float32).reshape(_shape(record))  # not a view of the file
        heads = {"q_proj": arch.num_heads, "k_proj": arch.num_kv_heads}.get(name.split(".")[-2], 0)
        array = unpermute(array, heads) if heads and family.gguf_interleaved else array
        return array[slices(part)]

    return Tensors({hf: _shape(file.records[own]) for hf, own in names.items()}, read)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [heads * E, F] in rotate-half order from llama.cpp's order of interleaved RoPE.
    """
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Returns Llama's name of a tensor; an unknown name as it is, which `check_tensors` refuses."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)\.(\w+)", name)
    if match is None or match[2] not in layer_names:
        return TOP_NAMES.get(name, name)
    return layer_name(int(match[1]), f"{layer_names[match[2]]}.{match[3]}")


def _shape(record: gguf.ReaderTensor) -> tuple[int, ...]:
    """Returns a tensor's shape; GGUF lists the fastest axis first."""
    return tuple(int(n) for n in reversed(record.shape))


def _check_quantisations(file: GgufFile) -> None:
    """Dequantises an empty block of each kind, so that a long load does not end in an error."""
    for kind in {record.tensor_type for record in file.records.values()}:
        block = np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError as error:
            raise ConfigError(f"{file.path}: quantisation {kind.name} cannot be dequantised by the "
                              "gguf package; choose another file of this model") from error


def _check_options(file: GgufFile, kind: str, head_dim: int) -> None:
    """Raises ConfigError for an option whose value would be computed wrongly here."""
    for name in ("logit_scale", "embedding_scale", "residual_scale", "attention.scale",
                 "attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping"):
        value = file.metadata.get(f"{kind}.{name}", 0)  # llama.cpp: 0 is none
        neutral = (0, 1) if name in ("logit_scale", "embedding_scale", "residual_scale") else (0,)
        file.fields.check(value in neutral, f"{kind}.{name}", value,
                          "is not supported; choose a model without it")
    for name, wanted, reason in (
            ("dimension_count", head_dim, "rotating only a part of a head is not supported"),
            ("scaling.type", "none", "is not supported; choose a model without RoPE scaling, or "
             "with Llama 3's")):
        value = file.metadata.get(f"{kind}.rope.{name}", wanted)
        file.fields.check(value == wanted, f"{kind}.rope.{name}", value, reason)


def _rope_scaling(file: GgufFile, arch: Architecture) -> RopeScaling | None:
    """Returns Llama 3's scaling from the factors that the converter stores instead.

    The factors determine only ratios of the settings. The settings of all published Llama 3 models
    (1, 4, 8192) are tried; anything else is refused.
    """
    if ROPE_FREQS not in file.records:
        return None
    record = file.records[ROPE_FREQS]
    factors = gguf.quants.dequantize(record.data, record.tensor_type).reshape(-1)
    scaling = RopeScaling(_exact(factors.max()), 1.0, 4.0, 8192)
    scaled = dataclasses.replace(arch, rope_scaling=scaling)
    expected = frequencies(arch) / frequencies(scaled)
    if factors.shape != expected.shape or not np.allclose(expected, factors, rtol=1e-4):
        raise ConfigError(f"{file.path}: {ROPE_FREQS} does not hold Llama 3's RoPE scaling; use "
                          "the model's safetensors, whose config.json has the settings")
    return scaling


def _exact(value: Any) -> float:
    """Returns the shortest decimal of a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
