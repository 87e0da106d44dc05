"""google-tunix's Sampler in float32. It cannot drop finished rows."""

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export
from specrl_jax.model.weights import Source

from .workload import Workload


def token_ids(pad: int, unused: int) -> Any:
    """Returns a tokenizer for tunix's Sampler: text is a list of ids, and nothing ends a row."""
    return types.SimpleNamespace(
        encode=lambda text, **_: [int(word) for word in text.split()],
        decode=lambda ids, **_: " ".join(str(int(i)) for i in ids),
        bos_id=lambda: None, eos_id=lambda: unused, pad_id=lambda: pad)


class Engine:
    """See engines.OtherEngine."""

    def __init__(self, source: Source, workload: Workload, threads: int, directory: Path) -> None:
        arch = source.arch
        if arch.family != "llama" or arch.rope_scaling is not None:
            raise ConfigError("--engine=tunix: only Llama models without RoPE scaling are set up")
        exported = directory / "tunix"
        if not exported.exists():
            export(exported, arch, source.params(), source.tokenizer)
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        config = _config(arch)
        model = llama_params.create_model_from_safe_tensors(
            str(exported), config, mesh=mesh, dtype=jnp.float32)
        self.longest = workload.longest
        self.width = int(workload.prompt_lengths.max())
        cache = CacheConfig(cache_size=self.width + self.longest, num_layers=arch.num_layers,
                            num_kv_heads=arch.num_kv_heads, head_dim=arch.head_dim)
        tokenizer = token_ids(source.tokenizer.pad_id, arch.vocab_size)  # no token has that id
        self.sampler = Sampler(model, tokenizer, cache)
        self.prompts = [" ".join(map(str, prompt)) for prompt in workload.prompts]

    def generate(self, most: int) -> None:
        """Always the whole length: a shorter warm-up would compile another program."""
        del most
        out = self.sampler(self.prompts, max_generation_steps=self.longest,
                           max_prompt_length=self.width, temperature=1.0, top_p=1.0, seed=0)
        made = min(len(row) for row in out.tokens)
        if made != self.longest:
            raise RuntimeError(f"tunix made {made} tokens in a row, {self.longest} were wanted")

    def settings(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self.sampler


def _config(arch: Architecture) -> Any:
    return llama.ModelConfig(
        num_layers=arch.num_layers, vocab_size=arch.vocab_size, embed_dim=arch.hidden_size,
        hidden_dim=arch.intermediate_size, num_heads=arch.num_heads, head_dim=arch.head_dim,
        num_kv_heads=arch.num_kv_heads, rope_theta=int(arch.rope_theta), norm_eps=arch.norm_eps,
        weight_tying=arch.tied)
