"""Tokenizers from GGUF metadata: byte-level BPE of the known families, and SentencePiece BPE."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specrl_jax.config import ConfigError
from specrl_jax.model import tokenizer
from specrl_jax.model.fields import REPAIR
from specrl_jax.model.gguf_file import GgufFile

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType

# The split patterns of Llama 3's and Qwen2's own tokenizer.json; {1,3} is Llama 3's.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

WAY_OUT = "use the model's Hugging Face directory, which has tokenizer.json"
# What splits a text before the byte-level step, by tokenizer.ggml.pre.
SPLITS: dict[str, Any] = {
    "gpt-2": None, "smollm": pre_tokenizers.Digits(individual_digits=True),
    "llama-bpe": pre_tokenizers.Split(Regex(WORDS % "{1,3}"), behavior="isolated"),
    "qwen2": pre_tokenizers.Split(Regex(WORDS % ""), behavior="isolated")}


# Tokens that end a response in llama.cpp, whatever the metadata (llama-vocab.cpp).
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
        "<|endoftext|>", "<|end_of_text|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
        "[EOS]", "<eos>", "<end_of_utterance>")


def gguf_tokenizer(file: GgufFile) -> tokenizer.Tokenizer:
    """Returns the tokenizer and chat template that the file's metadata describes. Raises
    ConfigError if it is neither byte-level nor SentencePiece BPE, or the metadata is impossible."""
    kind = file.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ConfigError(f"{file.path}: tokenizer.ggml.model = {kind!r} is not supported, only "
                          f"{', '.join(MODELS)} are; {WAY_OUT}")
    tokens = file.fields.items("tokenizer.ggml.tokens", str)
    template = file.metadata.get("tokenizer.chat_template")
    file.fields.check(template is None or isinstance(template, str), "tokenizer.chat_template",
                      template, f"must be a string; {REPAIR}")
    bos, eos, pad = (_token(file, tokens, role) for role in ("bos", "eos", "padding"))
    return tokenizer.Tokenizer(_backend(file, tokens, MODELS[kind]), template=template,
                               bos_token=bos, eos_token=eos, pad_token=pad,
                               eos_ids=_eos_ids(file, tokens))


def _backend(file: GgufFile, tokens: list[str], make: Callable[..., Tokenizer]) -> Tokenizer:
    kinds = file.fields.items("tokenizer.ggml.token_type", int, len(tokens))
    added = [AddedToken(text, special=kinds[i] == CONTROL, normalized=False)
             for i, text in enumerate(tokens) if kinds[i] in (CONTROL, USER_DEFINED)]
    try:
        backend = make(file, {text: i for i, text in enumerate(tokens) if kinds[i] != UNUSED})
        backend.add_tokens(added)
    except ConfigError:
        raise
    except Exception as error:  # the library raises a bare Exception, whatever is wrong
        raise ConfigError(f"{file.path}: tokenizer.ggml: {' '.join(str(error).split())}; "
                          f"{WAY_OUT}") from error
    return backend


def _eos_ids(file: GgufFile, tokens: list[str]) -> tuple[int, ...]:
    """Returns the ids, other than eos_token_id, that end a response in llama.cpp."""
    named = [_token(file, tokens, role) for role in ("eot", "eom")]
    several, key = file.metadata.get("tokenizer.ggml.eos_token_ids"), "tokenizer.ggml.eos_token_ids"
    for i in [] if several is None else file.fields.items(key, int):
        file.fields.check(0 <= i < len(tokens), key, i, f"must be ids of tokens; {REPAIR}")
        named.append(tokens[i])
    return tuple(tokens.index(text) for text in [*named, *ENDS] if text in tokens)


def _token(file: GgufFile, tokens: list[str], role: str) -> str | None:
    """Returns the text of the token with a role such as "eos"; None if there is none."""
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = file.metadata.get(key)
    if token_id is None:
        return None
    file.fields.check(type(token_id) is int and 0 <= token_id < len(tokens), key, token_id,
                      f"must be the id of one of the {len(tokens)} tokens; {REPAIR}")
    return tokens[token_id]


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ConfigError(f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported, only "
                          f"{', '.join(SPLITS)} are; {WAY_OUT}")
    merges = file.fields.items("tokenizer.ggml.merges", str)
    merges = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 encodes a word that is a token as that token, even if no merges produce it.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    backend = Tokenizer(model)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([s for s in (SPLITS[pre], words) if s])
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """Returns Llama 2's tokenizer: spaces are U+2581, unknown characters become byte tokens."""
    tokens = file.fields.items("tokenizer.ggml.tokens", str)
    unknown = _token(file, tokens, "unknown") or tokens[0]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_score_merges(file), unk_token=unknown,
                                   fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = (normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
                          if prefixed else spaces)
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1 if prefixed else 0, 0)])
    return backend


def _score_merges(file: GgufFile) -> list[tuple[str, str]]:
    """Returns every split of every token into two tokens, highest score first: SentencePiece joins
    whichever neighbours give the token of highest score."""
    tokens = file.fields.items("tokenizer.ggml.tokens", str)
    kinds = file.fields.items("tokenizer.ggml.token_type", int, len(tokens))
    scores = file.fields.items("tokenizer.ggml.scores", float, len(tokens))
    pieces = {text: scores[i] for i, text in enumerate(tokens) if kinds[i] == NORMAL}
    by_score = sorted(pieces, key=lambda piece: -pieces[piece])  # stable: ties by id
    return [(piece[:cut], piece[cut:]) for piece in by_score for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces]


MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}  # by tokenizer.ggml.model
