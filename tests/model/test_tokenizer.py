import json
from pathlib import Path

import pytest
from tokenizers import processors

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


def test_byte_tokens_are_bytes_and_special_tokens_one_id() -> None:
    text = "é\x00\x7f\xad"
    assert byte_tokenizer().encode(text) == list(text.encode())
    assert byte_tokenizer().encode("<|endoftext|><|im_start|><|im_end|>") == [256, 257, 258]


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
    ("{{ enable_thinking }}", "False"),
])
def test_templates_see_what_transformers_gives_them(template: str, expected: str) -> None:
    assert with_template(template).chat(HELLO, enable_thinking=False) == expected


@pytest.mark.parametrize(("template", "message"), [
    (r"{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    ("{% if %}", "chat_template"),
    ("{{ messages.append(1) }}", "chat_template"),
    (None, "instruction-tuned"),
])
def test_bad_templates_are_refused_in_one_line(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_template(template).chat(HELLO)
    assert "\n" not in str(error.value)


def test_strftime_now_is_available() -> None:
    assert with_template("{{ strftime_now('%Y') }}").chat(HELLO).isdigit()


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


def test_stop_ids_gather_eos_generation_settings_and_turn_ends(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write(
        tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"}, config={"eos_token_id": 5},
        generation_config={"eos_token_id": [9, 256]}))
    assert tokenizer.stop_ids == (256, 9, 258)
    (tmp_path / "generation_config.json").unlink()
    assert read_tokenizer(tmp_path).stop_ids == (256, 5, 258)


def test_vocab_size_counts_added_tokens() -> None:
    assert byte_tokenizer().vocab_size == 259


@pytest.mark.parametrize(("content", "message"), [
    (None, "no such file"), ("{", "damaged"), ("[]", "JSON object"), ("{}", "key model")])
def test_bad_tokenizer_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=f"tokenizer.json.*{message}"):
        read_tokenizer(tmp_path)
