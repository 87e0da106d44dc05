"""The same logits and tokens as transformers and llama.cpp, side by side (`peers` extra)."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from gguf_writer import write_gguf
from models import load

from specrl_jax.model import tiny
from specrl_jax.model.architecture import Architecture, RopeScaling
from specrl_jax.model.export import export
from specrl_jax.model.tensors import pack
from specrl_jax.model.transformer import forward

BASE = Architecture(vocab_size=288, hidden_size=64, intermediate_size=96, num_layers=2,
                    num_heads=4, num_kv_heads=2, head_dim=32, rope_theta=500000.0,
                    max_position=64)
FAMILIES = {
    "llama": BASE,
    "llama3": dataclasses.replace(BASE, tied=False, rope_scaling=RopeScaling(8., 1., 4., 8192)),
    "qwen2": dataclasses.replace(BASE, family="qwen2", head_dim=16, qkv_bias=True,
                                 tied=False),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qk_norm=True),
}
CHAT = [{"role": "user", "content": "Is 3 < 5? é日🙂\r\n"}]
TOKENS = np.random.RandomState(0).randint(0, 256, 48)
families = pytest.mark.parametrize("arch", FAMILIES.values(), ids=FAMILIES.keys())


def our_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    logits = jax.jit(forward, static_argnums=0)(
        model.arch, model.params, tokens[None].astype(np.int32), np.array([len(tokens)]))
    return np.asarray(logits)[0]


def their_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens[None])).logits[0].numpy()


def exported(directory: Path, model: Any, **options: int) -> Path:
    export(directory, model.arch, model.params, model.tokenizer, **options)
    return directory


def check_tokenizer(directory: Path, model: Any) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(directory)
    text = model.tokenizer.chat(CHAT)
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == text
    ids = model.tokenizer.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == model.tokenizer.stop_ids[0]
    assert theirs.pad_token_id == model.tokenizer.pad_id


@families
@pytest.mark.parametrize("shard_bytes", [2**30, 40000])
def test_transformers_loads_our_export(tmp_path: Path, arch: Architecture, shard_bytes: int
                                       ) -> None:
    params = pack(arch, tiny.random_tensors(arch, seed=4))
    model = SimpleNamespace(arch=arch, params=params, tokenizer=tiny.byte_tokenizer())
    directory = exported(tmp_path / "model", model, shard_bytes=shard_bytes)
    np.testing.assert_allclose(our_logits(model, TOKENS), their_logits(directory, TOKENS),
                               rtol=0, atol=1e-4)
    check_tokenizer(directory, model)


@families
def test_we_load_what_transformers_saves(tmp_path: Path, arch: Architecture) -> None:
    transformers = pytest.importorskip("transformers")
    params = pack(arch, tiny.random_tensors(arch, seed=4))
    first = exported(tmp_path / "a", SimpleNamespace(
        arch=arch, params=params, tokenizer=tiny.byte_tokenizer()))
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto.from_pretrained(first).save_pretrained(tmp_path / "b")
    model = load(str(tmp_path / "b"))
    assert model.arch == arch
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, params))
    assert model.tokenizer.chat(CHAT) == tiny.byte_tokenizer().chat(CHAT)
    assert model.tokenizer.stop_ids == tiny.byte_tokenizer().stop_ids


@families
def test_llama_cpp_computes_the_same_on_the_same_file(tmp_path: Path, arch: Architecture) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_gguf(tmp_path / "model.gguf", arch, tiny.random_tensors(arch, seed=4))
    model = load(str(path))
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_batch=64, logits_all=True, type_k=0, type_v=0,
                             flash_attn=False, n_gpu_layers=0, verbose=False)
    theirs.eval(TOKENS.tolist())
    np.testing.assert_allclose(our_logits(model, TOKENS), theirs.scores[:len(TOKENS)],
                               rtol=0, atol=1e-4)
    text = model.tokenizer.chat(CHAT) + "the he"
    assert model.tokenizer.encode(text) == theirs.tokenize(text.encode(), False, True)
