import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, processors

from specrl_jax.config import ConfigError
from specrl_jax.model.tiny import CHATML, byte_tokenizer
from specrl_jax.model.tokenizer import Tokenizer, read_tokenizer

HELLO = [{"role": "user", "content": "hi <b>"}]


def write(directory: Path, **files: dict) -> Path:
    """A tokenizer directory: file stems with `_` for `.`, and their content."""
    byte_tokenizer().backend.save(str(directory / "tokenizer.json"))
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


def with_template(template: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer().backend, template, bos_token="<|im_start|>")


@pytest.mark.parametrize("text", ["", " a  b\r\n\t", "é 日本語 🙂", "".join(map(chr, range(300))),
                                  "<|im_start|>user\nx<|im_end|>"])
def test_bytes_round_trip(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_adds_nothing() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)])
    assert tokenizer.encode("a") == [97]


def test_decode_skips_special_on_request_and_padding_rows_always() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([72, 258, 400]) == "H<|im_end|>"
    assert tokenizer.decode([72, 258, 400], skip_special=True) == "H"


def test_stream_holds_back_incomplete_characters() -> None:
    tokenizer = byte_tokenizer()
    step = tokenizer.stream()
    pieces = [step(token) for token in tokenizer.encode("aé🙂<|im_end|>")]
    assert pieces == ["a", "", "é", "", "", "", "🙂", "<|im_end|>"]


def byte_fallback() -> Tokenizer:
    """A tokenizer of Llama 2's kind: letters are tokens, every other byte is one of its own."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256, "a": 257, "\u2581": 258}
    backend = tokenizers.Tokenizer(models.BPE(
        vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback])
def test_stream_gives_the_decoded_text_whatever_the_bytes(make: Callable[[], Tokenizer]) -> None:
    tokenizer, rng = make(), np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.choice([0x41, 0x0A, 0x20, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 257, 258], 12).tolist()
        stream = tokenizer.stream()
        assert "".join([*map(stream, tokens), stream.end()]) == tokenizer.decode(tokens)


def test_chat_follows_the_template() -> None:
    expected = "<|im_start|>user\nhi <b><|im_end|>\n"
    assert byte_tokenizer().chat(HELLO, add_generation_prompt=False) == expected
    assert byte_tokenizer().chat(HELLO) == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(("template", "expected"), [
    ("{{ bos_token }}|{{ eos_token }}|", "<|im_start|>||"),
    ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi <b>"}'),
    ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi <b>!"),
    ("{{ enable_thinking }}", "False"), ("{{ strftime_now('%Y').isdigit() }}", "True"),
])
def test_templates_see_what_transformers_gives_them(template: str, expected: str) -> None:
    assert with_template(template).chat(HELLO, enable_thinking=False) == expected


def assert_refused(call: Callable[[], Any], *words: str) -> None:
    """Asserts that a call ends in one line with these words."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("template", "word"), [
    (r"{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    ("{% if %}", "chat_template"), ("{{ messages.append(1) }}", "chat_template"),
    ("{{ 1 / 0 }}", "division"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"), (None, "instruction-tuned"),
])
def test_bad_template_or_text_is_refused(template: str | None, word: str) -> None:
    assert_refused(lambda: with_template(template).chat(HELLO), word)
    surrogate = b"\xff".decode(errors="surrogateescape")
    assert_refused(lambda: byte_tokenizer().encode(surrogate), "Unicode")


def test_directory_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(
        tmp_path, tokenizer_config={"eos_token": {"content": "<|im_end|>", "lstrip": False},
                                    "pad_token": "<|endoftext|>", "chat_template": CHATML}))
    assert (tokenizer.eos_token, tokenizer.stop_ids) == ("<|im_end|>", (258,))
    assert tokenizer.pad_id == 256
    assert tokenizer.chat(HELLO) == byte_tokenizer().chat(HELLO)


def test_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = write(tmp_path, tokenizer_config={"chat_template": named})
    assert read_tokenizer(directory).chat(HELLO) == "yes"
    (directory / "chat_template.jinja").write_text("file")
    assert read_tokenizer(directory).chat(HELLO) == "file"


def test_turn_ends_as_the_template_ends_it() -> None:
    """A base model's eos ends a text, and no turn."""
    base = Tokenizer(byte_tokenizer().backend, CHATML, eos_token="<|endoftext|>")
    assert base.stop_ids == (256, 258) and base.turn_end == (258,)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in (plain, None):
        assert dataclasses.replace(base, template=template).turn_end == (256,)
    assert Tokenizer(byte_tokenizer().backend, plain).turn_end == (258,)


def test_stop_ids_gather_eos_generation_settings_and_turn_ends(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(
        tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"}, config={"eos_token_id": 5},
        generation_config={"eos_token_id": [9, 256]}))
    assert tokenizer.stop_ids == (256, 9, 258)
    (tmp_path / "generation_config.json").unlink()
    assert read_tokenizer(tmp_path).stop_ids == (256, 5, 258)


def spoil(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A tokenizer directory whose tokenizer.json is JSON still, but changed."""
    path = write(directory) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("change", [
    lambda d: d.update(model=3), lambda d: d["model"].update(merges=[["é", "€"]]),
    lambda d: (d["model"].update(vocab={}), d.update(added_tokens=[])),
    lambda d: d["model"].update(dropout=0.1),  # encodes at random
], ids=range(4))
def test_json_that_is_no_tokenizer_is_refused(
        tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    assert_refused(lambda: read_tokenizer(spoil(tmp_path, change)), "tokenizer.json")


@pytest.mark.parametrize(("name", "content"), [
    ("tokenizer.json", None), ("tokenizer.json", b"{"), ("tokenizer.json", b"[]"),
    ("tokenizer.json", b"{}"), ("chat_template.jinja", b"\xff"),
    ("tokenizer_config.json", b"[" * 100_000), ("tokenizer_config.json", b"\xff{}")])
def test_files_that_cannot_be_read_are_refused(
        tmp_path: Path, name: str, content: bytes | None) -> None:
    path = write(tmp_path) / name
    path.unlink() if content is None else path.write_bytes(content)
    assert_refused(lambda: read_tokenizer(tmp_path), name)


@pytest.mark.parametrize(("stem", "key", "value"), [
    *[("tokenizer_config", "chat_template", value) for value in (
        3, ["x"], [{"template": "x"}], [{"name": "default", "template": 3}])],
    *[("tokenizer_config", "eos_token", value) for value in (2, {}, {"content": 5})],
    ("special_tokens_map", "pad_token", {}),
    *[("config", "eos_token_id", value) for value in ("2", 2.5, [None], -1, True, 2**31)],
    ("generation_config", "eos_token_id", "2")])
def test_setting_of_the_wrong_type_is_refused(
        tmp_path: Path, stem: str, key: str, value: Any) -> None:
    directory = write(tmp_path, **{stem: {key: value}})
    assert_refused(lambda: read_tokenizer(directory), f"{stem}.json: {key} = {value!r}")


TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 256,
           "pad_type_id": 0, "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize("setting", [{"truncation": TRUNCATION}, {"padding": PADDING}], ids=str)
def test_saved_truncation_and_padding_change_no_prompt(
        tmp_path: Path, setting: dict[str, Any]) -> None:
    tokenizer = read_tokenizer(spoil(tmp_path, lambda content: content.update(setting)))
    assert tokenizer.encode("four") == list(b"four")

def test_null_settings_and_unnamed_templates_are_absent(tmp_path: Path) -> None:
    null = dict.fromkeys(("bos_token", "eos_token", "pad_token", "chat_template"))
    tokenizer = read_tokenizer(write(tmp_path, tokenizer_config=null, config={"eos_token_id": None},
                                     special_tokens_map={"eos_token": "<|endoftext|>"}))
    assert (tokenizer.eos_token, tokenizer.template, tokenizer.eos_ids) == (None, None, ())
    named = {"chat_template": [{"name": "tool_use", "template": "no"}]}
    assert read_tokenizer(write(tmp_path, tokenizer_config=named)).template is None
