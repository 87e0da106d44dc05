"""`transformers`' generate() in float32. It cannot drop finished rows."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from specrl_jax.model.export import export
from specrl_jax.model.weights import Source

from .workload import Workload


class Engine:
    """See engines.OtherEngine. Prompts are padded on the left, as generate() wants them."""

    def __init__(self, source: Source, workload: Workload, threads: int, directory: Path) -> None:
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        exported = directory / "transformers"
        if not exported.exists():
            export(exported, source.arch, source.params(), source.tokenizer)
        self.model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.longest, self.pad = workload.longest, source.tokenizer.pad_id
        width = int(workload.prompt_lengths.max())
        rows = [(width - len(p), p) for p in workload.prompts]
        self.tokens = torch.tensor([[self.pad] * room + p for room, p in rows])
        self.mask = torch.tensor([[0] * room + [1] * len(p) for room, p in rows])

    def generate(self, most: int) -> None:
        count = min(most, self.longest)
        with torch.inference_mode():
            out = self.model.generate(
                self.tokens, attention_mask=self.mask, do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, max_new_tokens=count, min_new_tokens=count, pad_token_id=self.pad)
        made = out.shape[1] - self.tokens.shape[1]
        if made != count:
            raise RuntimeError(f"transformers made {made} tokens a row, {count} were wanted")

    def settings(self) -> dict[str, Any]:
        return {"attention": self.model.config._attn_implementation}

    def close(self) -> None:
        del self.model
