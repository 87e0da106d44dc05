"""Models in a Hugging Face directory: config.json, safetensors (sharded or not), tokenizer."""

import reprlib
from pathlib import Path

import huggingface_hub
import numpy as np
import safetensors

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.families import FAMILIES
from specrl_jax.model.hf_config import parse_config
from specrl_jax.model.tensors import Part, Shape, Tensors, slices
from specrl_jax.model.tokenizer import Tokenizer, read_json, read_tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F64")


def open_directory(directory: Path, family: str = "") -> tuple[Architecture, Tokenizer, Tensors]:
    """Returns the contents of a model directory; the data of tensors stays on disk. Raises
    ConfigError if a file is missing, damaged or of a model that is not supported."""
    path = directory / "config.json"
    if (directory / "adapter_config.json").exists() and not path.exists():
        raise ConfigError(f"{directory}: holds adapters alone; give the model that they were "
                          "merged into (peft's merge_and_unload, or export.py without --adapter)")
    arch = parse_config(read_json(path), str(path), family)
    tensors, known = safetensors_tensors(directory), FAMILIES.resolve(arch.family)
    own = {known.from_checkpoint(name): name for name in tensors.shapes}
    renamed = Tensors({name: tensors.shapes[x] for name, x in own.items()},
                      lambda name, part: tensors.read_part(own[name], part))
    return arch, read_tokenizer(directory), renamed


def safetensors_tensors(directory: Path) -> Tensors:
    """Returns the tensors of all safetensors files of a model directory, float32 when read. Raises
    ConfigError if a file is missing or damaged, or has tensors of a dtype not known here."""
    shapes: dict[str, Shape] = {}
    files = {}
    for path in _shards(directory):
        handle = open_tensors(path)
        for name in handle.keys():
            view = handle.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise ConfigError(f"{path}: tensor {name} has dtype {view.get_dtype()}, only "
                                  f"{', '.join(DTYPES)} are supported; save it unquantised")
            shapes[name], files[name] = tuple(view.get_shape()), path

    def read(name: str, part: Part) -> np.ndarray:
        # Opened anew, since an open file keeps what was read of it in the process's memory.
        view = open_tensors(files[name]).get_slice(name)
        return view[slices(part)].astype(np.float32, copy=False)

    return Tensors(shapes, read)


def _shards(directory: Path) -> list[Path]:
    """Returns the files with weights: as in transformers, a whole file wins over an index."""
    index = directory / INDEX
    if (directory / SINGLE).is_file() or not index.is_file():
        return [directory / SINGLE]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or {*map(type, names.values())} != {str}:
        raise ConfigError(f"{index}: weight_map = {reprlib.repr(names)}: must map tensors to names "
                          "of files; fetch the file again")
    return [directory / name for name in sorted(set(names.values()))]


def open_tensors(path: Path) -> safetensors.safe_open:
    """Opens a safetensors file. Raises ConfigError if the file is missing or damaged."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the download is incomplete, or the model was not "
                          "saved as safetensors (transformers' save_pretrained does)")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path}: {error}; the file is damaged, fetch it again") from error


def fetch(name: str) -> Path:
    """Returns the local directory of a model on the Hugging Face hub; downloads it if needed.
    Raises ConfigError if there is no such model, it needs a login, or the hub cannot be reached."""
    try:
        return Path(huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, ValueError) as error:  # all of huggingface_hub's errors are one of them
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"no such directory here, and the hub does not give it ({reason}); give "
                          "a local directory, or check name, login and network") from error
