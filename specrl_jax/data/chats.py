"""Conversations of datasets, in the form that chat templates read."""

import ast
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.config import ConfigError, DataConfig

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "system": "system"}  # ShareGPT's and OpenAI's names -> a chat template's


def conversation(chat: Sequence[Any], field: str, where: str, system: str = ""
                 ) -> list[dict[str, str]]:
    """Returns a conversation for the chat template, from OpenAI's form or ShareGPT's.

    Args:
      chat: dicts with "role" and "content", or "from" and "value".
      field, where: of the data, for errors.
      system: first message where the conversation has no system message; empty adds none.

    Raises:
      ConfigError: a message has no known role, or no text.
    """
    turns = []
    for one in chat:
        one = one if isinstance(one, dict) else {}
        name = one.get("role") or one.get("from")
        role = ROLES.get(name) if isinstance(name, str) else None
        content = one.get("content", one.get("value"))
        if role is None or not isinstance(content, str):
            raise ConfigError(f"{field} = {where}: message {json.dumps(one)[:60]} must have a role "
                              f"among {', '.join(ROLES)} and a text as its content")
        turns.append({"role": role, "content": content})
    if system and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def template_variables(data: DataConfig) -> dict[str, Any]:
    """Returns the variables that `data` gives to the chat template besides the conversation."""
    given = {name: _value(text) for name, _, text in (x.partition("=") for x in data.template)}
    if data.date:
        given["strftime_now"] = datetime.date.fromisoformat(data.date).strftime
    return given


def _value(text: str) -> Any:
    """Returns the Python or JSON value that a text spells, or the text."""
    words = {"true": True, "false": False, "null": None}
    try:
        return words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def messages(example: Mapping[str, Any], system: str = "") -> list[dict[str, str]]:
    """Returns the conversation for the chat template; an empty `system`, or one of its own, adds
    no message."""
    asked = example["question"]
    chat = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if system and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": system}, *chat]
    return chat
