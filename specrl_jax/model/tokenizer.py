"""Tokenizers and chat templates of Hugging Face directories."""

import dataclasses
import datetime
import functools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from specrl_jax.config import ConfigError, check
from specrl_jax.model.fields import LARGEST, REPAIR, Fields
from specrl_jax.runtime.digest import digest
from specrl_jax.structs import Json

SPECIAL = ("bos_token", "eos_token", "pad_token")
ANSWER = "specrl"  # text that no template writes by itself
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # end an assistant's turn in any model


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` backend with the special tokens and the chat template of its files."""

    backend: tokenizers.Tokenizer
    template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    eos_ids: tuple[int, ...] = ()  # of the model's generation settings

    @property
    def identity(self) -> str:
        """16 hexadecimal digits, equal for tokenizers with the same id for every token."""
        vocab = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return digest([vocab])[:16]

    def digest(self) -> str:
        """Returns a hash of `identity`, the chat template and the special and stop tokens."""
        parts = [self.identity, self.template, self.stop_ids,
                 *(getattr(self, name) for name in SPECIAL)]
        return digest([parts])

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, including special tokens in it; adds none. Raises
        ConfigError if the text has surrogates, which stand for bytes that are not UTF-8."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ConfigError(f"text {reprlib.repr(text)}: is not valid Unicode; write it as "
                              "UTF-8") from error

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns the text of `ids`; ids without a token (padding rows) have no text."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = False) -> "TextStream":
        """Returns the stream of a text whose tokens come one by one."""
        return TextStream(self, skip_special)

    def is_byte(self, token: int) -> bool:
        """Returns whether a token is one byte of a text, as `<0x0A>` is in Llama 2's tokenizer."""
        return re.fullmatch("<0x[0-9A-F]{2}>", self.backend.id_to_token(token) or "") is not None

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True,
             **variables: Any) -> str:
        """Returns the prompt text of a conversation of dicts with "role" and "content".

        Args:
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: other variables of the template, such as enable_thinking or date_string.

        Raises:
          ConfigError: there is no chat template, or it rejects the messages.
        """
        if self.template is None:
            raise ConfigError("chat_template: this tokenizer has none; add chat_template.jinja to "
                              "the model directory, or use an instruction-tuned model")
        special = {name: getattr(self, name) or "" for name in SPECIAL}
        try:
            return _compiled(self.template).render(**{
                "messages": list(messages), "tools": None, "documents": None,
                "add_generation_prompt": add_generation_prompt, **special, **variables})
        except Exception as error:  # expressions in templates raise any of Python's errors
            raise ConfigError(f"chat_template: {_one_line(error)}; change the messages or the "
                              "template") from error

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1; the embedding may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response, the tokenizer's own eos first; empty if none is known."""
        ids = [self._id(self.eos_token), *self.eos_ids, *map(self._id, TURN_ENDS)]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @functools.cached_property
    def turn_end(self) -> tuple[int, ...]:
        """The stop token that the chat template writes after an answer, as a base model's eos need
        not be; else the first stop token. Empty if none is known."""
        if self.template is None:
            return self.stop_ids[:1]
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        after = self.encode(self.chat(chat, add_generation_prompt=False).rpartition(ANSWER)[2])
        return (*[i for i in after if i in self.stop_ids], *self.stop_ids)[:1]

    @property
    def pad_id(self) -> int:
        """Id for positions that are never read: pad, else a stop token, else 0."""
        pad = self._id(self.pad_token)
        return pad if pad is not None else (*self.stop_ids, 0)[0]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


class TextStream:
    """The text of a growing response: the pieces that it gives are together `decode` of all tokens.

    A piece is given when no further token can change it. Tokens of one byte are held back until
    another kind of token follows: a tokenizer decodes a run of them to replacement characters as
    soon as one of them does not fit.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._tokens: list[int] = []
        self._start = self._given = 0  # the last piece that was given

    def __call__(self, token: int) -> str:
        """Returns the text that the next token completes, perhaps ''."""
        self._tokens.append(int(token))
        return "" if self._tokenizer.is_byte(int(token)) else self._piece(last=False)

    def end(self) -> str:
        """Returns the text that was held back."""
        return self._piece(last=True)

    def _piece(self, last: bool) -> str:
        before, now = (self._tokenizer.decode(part, self._skip_special) for part in (
            self._tokens[self._start : self._given], self._tokens[self._start :]))
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return now[len(before) :]


def read_tokenizer(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face directory. Raises ConfigError if tokenizer.json is
    missing, or a file cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; save the tokenizer with transformers' "
                          "AutoTokenizer.from_pretrained(...).save_pretrained(directory)")
    if "model" not in read_json(path):
        raise ConfigError(f"{path}: key model is missing; the file is damaged, fetch it again")
    settings = _settings(directory / "special_tokens_map.json")
    settings |= _settings(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    if template.is_file():
        try:
            settings["chat_template"] = template.read_text(encoding="utf-8")
        except ValueError as error:
            raise ConfigError(f"{template}: {error}; the file is damaged, fetch it again"
                              ) from error
    bos, eos, pad = (settings.get(name) for name in SPECIAL)
    return Tokenizer(_backend(path), settings.get("chat_template"), bos, eos, pad,
                     _eos_ids(directory))


def read_json(path: Path, optional: bool = False) -> Json:
    """Returns the object in a JSON file; {} if an optional file is missing. Raises ConfigError if
    the file is missing or is not a JSON object."""
    if not path.is_file():
        if optional:
            return {}
        raise ConfigError(f"{path}: no such file; give a complete Hugging Face model directory")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; the file is damaged, fetch it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, must be a JSON object")
    return value


def _backend(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer in tokenizer.json without the truncation and padding that it was saved
    with, as transformers uses it. Raises ConfigError if it has no tokens or encodes at random."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception, whatever is wrong
        raise ConfigError(f"{path}: {_one_line(error)}; the file is damaged, or newer than the "
                          "tokenizers package: fetch it again, or update the package") from error
    if not backend.get_vocab_size(with_added_tokens=True):
        raise ConfigError(f"{path}: the vocabulary is empty; the file is damaged, fetch it again")
    if dropout := getattr(backend.model, "dropout", None):
        raise ConfigError(f"{path}: model.dropout = {dropout:g}: encodes the same text in another "
                          "way each time; set it to null")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _settings(path: Path) -> dict[str, str | None]:
    """Returns the special tokens and the chat template in a file of settings."""
    fields = Fields(read_json(path, optional=True), str(path))
    settings: dict[str, str | None] = {}
    for key in SPECIAL:
        token = fields.values.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        fields.check(token is None or isinstance(text, str), key, token,
                    f'must be a string, an object with a string "content", or null; {REPAIR}')
        if key in fields.values:
            settings[key] = text
    if "chat_template" in fields.values:
        value = fields.values["chat_template"]  # or a list of templates by name
        named = {"default": value}
        if isinstance(value, list) and all(
                isinstance(t, dict) and isinstance(t.get("name"), str)
                and isinstance(t.get("template"), str) for t in value):
            named = {t["name"]: t["template"] for t in value}
        template = settings["chat_template"] = named.get("default")
        fields.check(template is None or isinstance(template, str), "chat_template", value,
                    "must be a string, or a list of objects with the strings name and template; "
                    f"{REPAIR}")
    return settings


def _eos_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        fields = Fields(read_json(directory / name, optional=True), str(directory / name))
        eos = fields.values.get("eos_token_id")
        if eos is not None:
            ids = tuple(eos) if isinstance(eos, list) else (eos,)
            fields.check(all(type(i) is int and 0 <= i < LARGEST for i in ids), "eos_token_id", eos,
                        f"must be a token id or a list of them; {REPAIR}")
            return ids
    return ()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text in some templates and prints nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Returns a chat template ready to render; compiling takes as long as hundreds of prompts."""
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    """Returns a sandbox with the settings and functions that Hugging Face templates need."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    # Unlike jinja2's own filter, this one does not escape HTML characters.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise,
                            "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def check_same_tokens(field: str, path: str, tokenizer: Tokenizer, actor: Tokenizer) -> None:
    """Raises ConfigError if the tokens of the model at `path`, which `field` names, are not the
    actor's."""
    mine, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (tokenizer, actor))
    differ = sorted(token for token in mine.keys() | theirs.keys()
                    if mine.get(token) != theirs.get(token))
    check(not differ, field, path,
          f"{len(differ)} tokens differ from the actor's, such as {differ[:1]}; name a model with "
          "the actor's tokenizer")
