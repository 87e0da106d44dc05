"""Texts of one's own that a drafter learns from: JSON lines with chats, answers or plain text."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.config import ConfigError, DataConfig, check
from specrl_jax.data.chats import conversation, messages, template_variables
from specrl_jax.distill.data import Corpus
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.runtime.json_lines import read_json_lines

FORMS = ("an object needs a text, a question and its answer, or messages that end with the "
         "assistant's (ShareGPT's conversations, too)")


def read_texts(path: Path, tokenizer: Tokenizer, data: DataConfig, most: int) -> Corpus:
    """Reads the sequences of a file of JSON lines, gzipped or not, with reward 1 and advantage 0.

    An object with "question" and "answer" is a chat whose response is the answer, and one with
    "messages" a chat whose response is its last message. One with "text" is a response to its own
    first token. Sequences are cut to `most` tokens.

    Raises:
      ConfigError: the file cannot be read, or a line holds something else, or nothing to learn.
    """
    tokens, first = [], []
    for number, row in read_json_lines(path):
        where = f"{path}:{number}"
        prompt, response = _prompt_and_response(row, tokenizer, data, where)
        sequence = [*prompt, *response][:most]
        check(len(sequence) > max(len(prompt), 1), "texts", where,
              f"no token to learn among the first {most}; raise rollout.max_new_tokens or "
              f"drop the line")
        tokens.append(np.asarray(sequence, np.int32))
        first.append(max(len(prompt), 1))
    check(bool(tokens), "texts", str(path), "holds nothing to learn from")
    zero = np.zeros(len(tokens), np.float32)
    return Corpus(tokens, np.asarray(first, np.int32), zero + 1, zero,
                  np.zeros((len(tokens), 2), np.uint32))


def _prompt_and_response(row: Any, tokenizer: Tokenizer, data: DataConfig, where: str
                         ) -> tuple[list[int], list[int]]:
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("text"), str):
        return [], tokenizer.encode(row["text"])
    chat = row.get("messages") or row.get("conversations")
    if isinstance(row.get("question"), str) and isinstance(row.get("answer"), str):
        asked, answer = messages(row, data.system), row["answer"]
    elif isinstance(chat, list):
        turns = conversation(chat, "texts", where, data.system)
        *asked, last = turns or [{"role": "", "content": ""}]
        check(last["role"] == "assistant" and bool(asked), "texts", where, FORMS)
        answer = last["content"]
    else:
        raise ConfigError(f"texts = {where}: {json.dumps(row)[:60]}: {FORMS}")
    prompt = tokenizer.encode(tokenizer.chat(asked, **template_variables(data)))
    return prompt, tokenizer.encode(answer) + list(tokenizer.turn_end)
