import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from gguf_writer import tokenizer_keys, write_gguf
from models import load

from specrl_jax.config import ConfigError
from specrl_jax.model.architecture import Architecture, RopeScaling
from specrl_jax.model.gguf_file import open_gguf
from specrl_jax.model.gguf_tokenizer import gguf_tokenizer
from specrl_jax.model.tensors import Tensors
from specrl_jax.model.tiny import random_tensors
from specrl_jax.model.tokenizer import Tokenizer

SMALL = Architecture(vocab_size=264, hidden_size=64, intermediate_size=96, num_layers=2,
                     num_heads=4, num_kv_heads=2, head_dim=16, max_position=128)
SCALED = dataclasses.replace(SMALL, rope_theta=500000.0, head_dim=32,
                             rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
FAMILIES = {"llama": SMALL, "llama3": SCALED, "untied": dataclasses.replace(SMALL, tied=False),
            "qwen2": dataclasses.replace(SMALL, family="qwen2", qkv_bias=True),
            "qwen3": dataclasses.replace(SMALL, family="qwen3", qk_norm=True, head_dim=32)}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"]


def write(directory: Path, arch: Architecture = SMALL, kind: str = "F32", **metadata: Any) -> str:
    path = directory / "model.gguf"
    return str(write_gguf(path, arch, random_tensors(arch, seed=2),
                          gguf.GGMLQuantizationType[kind], **metadata))


def assert_holds(params: dict, arch: Architecture, kind: str) -> None:
    """The parameters are the seed's, quantised and dequantised."""
    tensors = random_tensors(arch, seed=2)
    quantisation = gguf.GGMLQuantizationType[kind]

    def expected(part: str) -> np.ndarray:
        array = tensors.read(part)
        return gguf.quants.dequantize(gguf.quants.quantize(array, quantisation), quantisation)

    np.testing.assert_array_equal(params["embed"], expected("model.embed_tokens.weight"))
    qkv = params["layers"][1]["qkv"]
    for x, heads in (("q", slice(0, 2)), ("k", slice(2, 3)), ("v", slice(3, 4))):
        np.testing.assert_array_equal(
            qkv[:, heads].reshape(-1, arch.hidden_size),
            expected(f"model.layers.1.self_attn.{x}_proj.weight"), err_msg=x)


@pytest.mark.parametrize("arch", FAMILIES.values(), ids=FAMILIES.keys())
def test_families_round_trip(tmp_path: Path, arch: Architecture) -> None:
    loaded = load(write(tmp_path, arch))
    assert loaded.arch == arch
    assert_holds(loaded.params, arch, "F32")


@pytest.mark.parametrize("kind", KINDS)
def test_quantisations_are_dequantised(tmp_path: Path, kind: str) -> None:
    loaded = load(write(tmp_path, SMALL, kind))
    assert {x.dtype for x in loaded.params["layers"][0].values()} == {np.dtype(np.float32)}
    assert_holds(loaded.params, SMALL, kind)


def test_tokenizer_and_template_come_from_metadata(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path)).tokenizer
    text = tokenizer.chat([{"role": "user", "content": "the he"}])
    ids = tokenizer.encode(text)
    assert ids[:3] == [257, ord("u"), ord("s")]
    assert ids.count(259) == 2  # "he" twice, by the one merge
    assert tokenizer.decode(ids) == text
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((258, 256), 256, 260)


@pytest.mark.parametrize(("metadata", "stops"), [
    ({}, {258, 256}),  # <|im_end|> and, by its name, <|endoftext|>
    ({"tokenizer__ggml__eos_token_id": 256}, {258, 256}),
    ({"tokenizer__ggml__eot_token_id": 257}, {258, 256, 257}),
    ({"tokenizer__ggml__eos_token_ids": [258, 7]}, {258, 256, 7})])
def test_stop_tokens_are_those_of_llama_cpp(
        tmp_path: Path, metadata: dict[str, Any], stops: set[int]) -> None:
    tokenizer = load(write(tmp_path, **metadata)).tokenizer
    assert set(tokenizer.stop_ids) == stops
    assert tokenizer.stop_ids[0] == metadata.get("tokenizer__ggml__eos_token_id", 258)


@pytest.mark.parametrize(("pre", "words"), [
    ("gpt-2", ["it", "'s", "Ġ1234", "ĊĊ", "Ġx", "'", "S"]),
    ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx", "'", "S"]),
    ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġx", "'S"]),
    ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx", "'S"]),
])
def test_pre_tokenizers_split_as_their_models_do(tmp_path: Path, pre: str, words: list[str]
                                                 ) -> None:
    backend = gguf_tokenizer(open_gguf(Path(write(tmp_path, tokenizer__ggml__pre=pre)))).backend
    split = backend.pre_tokenizer.pre_tokenize_str("it's 1234\n\n x'S")
    assert [word for word, _ in split] == words


def tokenizer_with(directory: Path, text: str, kind: int, pre: str) -> Tokenizer:
    """A byte tokenizer with `text`, to which no merges lead, as token 260 of the given kind."""
    keys = tokenizer_keys(SMALL)
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    tokens[260], kinds[260] = text, kind
    return load(write(directory, tokenizer__ggml__tokens=tokens, tokenizer__ggml__pre=pre,
                      tokenizer__ggml__token_type=kinds)).tokenizer


@pytest.mark.parametrize(("pre", "ids", "composed"), [
    ("llama-bpe", [260], False), ("gpt-2", [122, 113], False), ("qwen2", [122, 113], True)])
def test_only_llama_3_takes_whole_words_and_only_qwen_composes(
        tmp_path: Path, pre: str, ids: list[int], composed: bool) -> None:
    tokenizer = tokenizer_with(tmp_path, "zq", 1, pre)
    assert tokenizer.encode("zq") == ids
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == composed


@pytest.mark.parametrize(("kind", "shown"), [(3, ""), (4, "<tool>")])
def test_user_defined_tokens_are_text_and_control_tokens_are_not(
        tmp_path: Path, kind: int, shown: str) -> None:
    tokenizer = tokenizer_with(tmp_path, "<tool>", kind, "gpt-2")
    assert tokenizer.encode("a<tool>") == [97, 260]
    assert tokenizer.decode([260], skip_special=True) == shown


def sentencepiece(directory: Path, **metadata: Any) -> Tokenizer:
    """Ids: 0 <unk>, 1 <s>, 2 </s>, 3 + byte, then the pieces below from 259 on."""
    pieces = ["\u2581", "a", "b", "ab", "\u2581a", "bb", "[PAD]"]
    scores = [-9., -9., -9., -2., -1., -3., 0.]
    path = write(
        directory, dataclasses.replace(SMALL, vocab_size=266), tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default", tokenizer__ggml__merges=None,
        tokenizer__ggml__tokens=["<unk>", "<s>", "</s>", *BYTES, *pieces],
        tokenizer__ggml__scores=[0.] * 259 + scores,
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * 6 + [5],
        tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__padding_token_id=None, **metadata)
    return load(path).tokenizer


@pytest.mark.parametrize(("text", "ids"), [
    ("ab", [263, 261]),  # the prefix's join with a scores higher than that of ab
    ("bab", [259, 261, 262]), ("bbb", [259, 264, 261]), ("a a", [263, 263]),
    ("\né", [259, 3 + 10, 3 + 0xC3, 3 + 0xA9]), ("b</s>", [259, 261, 2])])
def test_sentencepiece_joins_by_score(tmp_path: Path, text: str, ids: list[int]) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert (tokenizer.stop_ids, tokenizer.vocab_size) == ((2,), 265)


def test_sentencepiece_without_the_space_prefix(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, tokenizer__ggml__add_space_prefix=False)
    assert tokenizer.encode(" ab b") == [263, 261, 259, 261]
    assert tokenizer.decode([263, 261]) == " ab"


BAD_METADATA = [  # (metadata, what the line must name)
    ("llama__block_count", None, "block_count"), ("llama__block_count", 3, "model.layers.2"),
    ("llama__block_count", 2**32 - 1, "4294967295"),
    ("llama__attention__head_count", 0, "attention.head_count"),
    ("llama__attention__head_count", 3, "multiple"),
    ("llama__attention__head_count_kv", [2, 1], "layers"),
    ("llama__attention__key_length", 15, "even"),
    ("llama__attention__scale", 0.5, "attention.scale"),
    ("llama__embedding_length", "32", "embedding_length"),
    ("llama__feed_forward_length", 64, "(96, 64)"),
    ("llama__rope__dimension_count", 8, "rope.dimension_count"),
    ("llama__rope__freq_base", [1.0], "rope.freq_base"),
    ("llama__rope__scaling__type", "yarn", "'yarn'"), ("split__count", 2, "2 parts"),
    ("tokenizer__chat_template", 5, "tokenizer.chat_template"),
    ("tokenizer__ggml__model", "bert", "'bert'"), ("tokenizer__ggml__pre", "viking", "'viking'"),
    ("tokenizer__ggml__tokens", [1], "tokenizer.ggml.tokens"),
    ("tokenizer__ggml__token_type", [1], "tokenizer.ggml.token_type"),
    ("tokenizer__ggml__merges", ["hh e"], "`hh`"), ("tokenizer__ggml__merges", 1, "list of str"),
    ("tokenizer__ggml__eos_token_ids", [70000], "70000"),
    ("tokenizer__ggml__bos_token_id", "1", "tokenizer.ggml.bos_token_id")]


@pytest.mark.parametrize(("key", "value", "word"), BAD_METADATA)
def test_unsupported_metadata_is_refused(tmp_path: Path, key: str, value: Any, word: str) -> None:
    assert_refused(write(tmp_path, **{key: value}), word)


def an_architecture(directory: Path) -> str:
    writer = gguf.GGUFWriter(directory / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(directory / "model.gguf")


def a_tensor(directory: Path) -> str:
    tensors, extra = random_tensors(SMALL, seed=2), "model.layers.0.self_attn.o_proj.bias"
    both = Tensors({**tensors.shapes, extra: (64,)}, lambda name, part: np.zeros(
        64, np.float32) if name == extra else tensors.read_part(name, part))
    return str(write_gguf(directory / "model.gguf", SMALL, both))


def damaged(directory: Path, keep: int) -> str:
    path = Path(write(directory))
    path.write_bytes(path.read_bytes()[:keep])
    return str(path)


@pytest.mark.parametrize(("make", "word"), [
    (an_architecture, "'mamba'"), (a_tensor, "model.layers.0.self_attn.o_proj.bias"),
    (lambda directory: write(directory, dataclasses.replace(
        SCALED, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 4096))), "rope_freqs.weight"),
    *[(functools.partial(damaged, keep=keep), "damaged") for keep in (0, 3, 1000, -5)]])
def test_file_that_is_no_known_model_is_refused(
        tmp_path: Path, make: Callable[[Path], str], word: str) -> None:
    assert_refused(make(tmp_path), word)


def assert_refused(path: str, word: str) -> None:
    """Asserts that reading a file ends in one line with its path and this word."""
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "\n" not in str(error.value) and path in str(error.value) and word in str(error.value)


def test_quantisations_without_a_dequantiser_are_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.quants, "dequantize", mock.Mock(side_effect=NotImplementedError))
    assert_refused(write(tmp_path, kind="Q8_0"), "cannot be dequantised")
