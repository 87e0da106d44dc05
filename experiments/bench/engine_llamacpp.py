"""llama.cpp through its batch interface: float32 weights and cache, its own sampler.

Each step decodes one token of every unfinished row in one batch; a finished row leaves at once. A
short trial picks the faster cache layout and attention.
"""

import ctypes
import itertools
import time
from pathlib import Path
from typing import Any

import llama_cpp

from specrl_jax.config import ConfigError
from specrl_jax.model.weights import Source

from .gguf_copy import write_float32
from .workload import Workload

FLOAT32 = 0  # GGML_TYPE_F32
MICRO_BATCH = 512  # llama.cpp's default
TRIAL_TOKENS = 12
UNIFIED, FLASH = (False, True), (0, 1)  # one cache for all rows or one each; flash attention


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: Any) -> None:
    """Swallows llama.cpp's messages; failures are raised from return values."""


class Engine:
    """See engines.OtherEngine."""

    def __init__(self, source: Source, workload: Workload, threads: int, directory: Path) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = write_float32(directory / "float32.gguf", source)
        self.workload, self.vocab_size = workload, source.arch.vocab_size
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise ConfigError(f"--engine=llamacpp: it cannot load a {source.arch.family} model")
        self.prompt_tokens = int(workload.prompt_lengths.sum())
        self.batch = llama_cpp.llama_batch_init(max(self.prompt_tokens, workload.rows), 0, 1)
        self.chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(self.chain, llama_cpp.llama_sampler_init_temp(1.0))
        llama_cpp.llama_sampler_chain_add(self.chain, llama_cpp.llama_sampler_init_dist(0))
        self.context: Any = None
        layouts = list(itertools.product(UNIFIED, FLASH))
        self.unified, self.flash = min(layouts, key=lambda layout: self._trial(threads, *layout))
        self._open(threads, self.unified, self.flash)

    def _trial(self, threads: int, unified: bool, flash: int) -> float:
        """Seconds of a short generation."""
        self._open(threads, unified, flash)
        began = time.perf_counter()
        self.generate(TRIAL_TOKENS)
        return time.perf_counter() - began

    def _open(self, threads: int, unified: bool, flash: int) -> None:
        """Replaces the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
        options = self._context_options(threads)
        options.kv_unified, options.flash_attn_type = unified, flash
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise ConfigError(f"--engine=llamacpp: no memory for {self.workload.rows} rows")

    def _context_options(self, threads: int) -> Any:
        rows = self.workload.rows
        each = int(self.workload.prompt_lengths.max()) + self.workload.longest
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = rows * each, rows
        options.n_batch = max(self.prompt_tokens, rows)
        options.n_ubatch = min(MICRO_BATCH, options.n_batch)
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = FLOAT32
        return options

    def generate(self, most: int) -> None:
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, False)
        prompts = self.workload.prompts
        wanted = [min(most, int(limit)) for limit in self.workload.limits]
        length = [len(prompt) for prompt in prompts]
        last = self._decode([(row, place, token, place == length[row] - 1)
                             for row, prompt in enumerate(prompts)
                             for place, token in enumerate(prompt)])
        made = [1] * len(prompts)
        live = self._drop(memory, list(range(len(prompts))), made, wanted)
        while live:
            last |= self._decode([(row, length[row] + made[row] - 1, last[row], True)
                                  for row in live])
            for row in live:
                made[row] += 1
            live = self._drop(memory, live, made, wanted)
        if made != wanted:
            raise RuntimeError(f"llama.cpp made {sum(made)} tokens, {sum(wanted)} were wanted")

    def _drop(self, memory: Any, live: list[int], made: list[int], wanted: list[int]) -> list[int]:
        for row in live:
            if made[row] == wanted[row]:
                llama_cpp.llama_memory_seq_rm(memory, row, -1, -1)
        return [row for row in live if made[row] < wanted[row]]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decodes (row, position, token, whether to sample) and samples: token by row."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (row, position, token, sample) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, sample
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {len(entries)} tokens")
        return {row: llama_cpp.llama_sampler_sample(self.chain, self.context, i)
                for i, (row, _, _, sample) in enumerate(entries) if sample}

    def settings(self) -> dict[str, Any]:
        return {"kv_unified": self.unified, "flash_attention": bool(self.flash)}

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self.chain)
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
