"""Export to a Hugging Face model directory that transformers 4 and 5 load."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specrl_jax.config import LearnerConfig, check
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.families import FAMILIES
from specrl_jax.model.hf_config import write_config
from specrl_jax.model.hf_directory import INDEX, SINGLE
from specrl_jax.model.layers import layer_of
from specrl_jax.model.tensors import layer_name, unpack
from specrl_jax.model.tokenizer import SPECIAL, Tokenizer
from specrl_jax.runtime.paths import new_directory
from specrl_jax.structs import Json, Params

SHARD_BYTES = 4 * 2**30
DTYPES = ("float32", "bfloat16", "float16")


def export(directory: str | os.PathLike[str], arch: Architecture, params: Params,
           tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES, dtype: str = "float32") -> None:
    """Writes a model directory; after an error nothing of it is left.

    Args:
      directory: must not exist yet, or be empty.
      params: the tree of architecture.describe; numpy or JAX arrays.
      dtype: of the weights that are written, one of DTYPES.
      shard_bytes: weights beyond this size are split over several files with an index.

    Raises:
      ConfigError: the directory is not empty, or cannot be written; or a weight is beyond `dtype`.
    """
    check(dtype in DTYPES, "dtype", dtype, f"choose one of {', '.join(DTYPES)}")
    with new_directory("out", directory) as partial:
        _write_json(partial / "config.json", write_config(arch, dtype) | _special_ids(tokenizer))
        _write_json(partial / "generation_config.json", _special_ids(tokenizer))
        _write_tokenizer(partial, tokenizer, arch)
        rename = FAMILIES.resolve(arch.family).to_checkpoint
        tensors = ((rename(name), _cast(name, array, dtype)) for name, array in unpack(
            arch, params))
        _write_weights(partial, tensors, shard_bytes)


def export_adapter(directory: str | os.PathLike[str], arch: Architecture, adapters: Params,
                   options: LearnerConfig, base: str) -> None:
    """Writes adapters as a directory that `peft` loads; after an error nothing of it is left.

    Args:
      directory: must not exist yet, or be empty.
      adapters: see model/lora.py; numpy or JAX arrays.
      base: path or hub id of the model that they belong to.

    Raises:
      ConfigError: the directory is not empty, or cannot be written; or there are no adapters.
    """
    check(options.lora_rank > 0, "learner.lora_rank", options.lora_rank,
          "the run trains all weights and has no adapters; export without --adapter")
    with new_directory("out", directory) as partial:
        _write_json(partial / "adapter_config.json", {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": options.lora_rank, "lora_alpha": options.lora_scale * options.lora_rank,
            "target_modules": list(options.lora_targets), "lora_dropout": 0.0, "bias": "none",
            "inference_mode": True})
        save_tensors(_adapter_tensors(arch, adapters), partial / "adapter_model.safetensors")


def _adapter_tensors(arch: Architecture, adapters: Params) -> dict[str, np.ndarray]:
    """Returns adapters by peft's names: lora_A [rank, in] and lora_B [out, rank]."""
    rename, tensors = FAMILIES.resolve(arch.family).to_checkpoint, {}
    for number in range(arch.num_layers):
        for name, pair in layer_of(adapters["layers"], number).items():
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            module = rename(layer_name(number, f"{part}.{name}.weight")).removesuffix(".weight")
            a, b = (np.asarray(pair[x]) for x in "ab")
            for letter, matrix in (("A", a.reshape(len(a), -1)), ("B", b.reshape(-1, b.shape[-1]))):
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = np.ascontiguousarray(
                    matrix)
    return tensors


def _write_weights(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
                   ) -> None:
    """Writes one file, or shards numbered from 1 and the index that maps names to them."""
    shard_of: dict[str, int] = {}
    total = count = 0
    for count, shard in enumerate(_shards(tensors, shard_bytes), 1):
        save_tensors(shard, directory / f"{count}.safetensors")
        shard_of |= dict.fromkeys(shard, count)
        total += sum(x.nbytes for x in shard.values())
    names = {n: f"model-{n:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
             for n in range(1, count + 1)}
    for number, name in names.items():
        (directory / f"{number}.safetensors").rename(directory / name)
    if count > 1:
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": {
            tensor: names[number] for tensor, number in shard_of.items()}})


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file; raises OSError as other writers do."""
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{error}") from error


def _shards(tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
            ) -> Iterator[dict[str, np.ndarray]]:
    """Yields tensors in groups of at most `shard_bytes`, at least one in each."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard


def _cast(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array, jnp.dtype(dtype))
    check(bool(np.isfinite(cast).all()), "dtype", dtype, f"cannot hold the weights of {name}, up "
          f"to {np.abs(array).max():g}; use bfloat16 or float32")
    return cast


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, arch: Architecture) -> None:
    text = tokenizer.backend.to_str(pretty=True)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    given = {name: getattr(tokenizer, name) for name in SPECIAL}
    given["chat_template"] = tokenizer.template
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": arch.max_position,
        "clean_up_tokenization_spaces": False,
        **{name: value for name, value in given.items() if value is not None}})


def _special_ids(tokenizer: Tokenizer) -> Json:
    """Returns the ids that transformers' generate reads."""
    stop, bos = list(tokenizer.stop_ids), tokenizer.bos_token
    return {"bos_token_id": None if bos is None else tokenizer.backend.token_to_id(bos),
            "eos_token_id": (stop if len(stop) > 1 else stop[0]) if stop else None,
            "pad_token_id": tokenizer.pad_id}


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
