"""Conversations of datasets, in the form that chat templates read."""

import json
from collections.abc import Sequence
from typing import Any

from specrl_jax.config import ConfigError

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
    found = []
    for one in chat:
        one = one if isinstance(one, dict) else {}
        name = one.get("role") or one.get("from")
        role = ROLES.get(name) if isinstance(name, str) else None
        content = one.get("content", one.get("value"))
        if role is None or not isinstance(content, str):
            raise ConfigError(f"{field} = {where}: message {json.dumps(one)[:60]} must have a role "
                              f"among {', '.join(ROLES)} and a text as its content")
        found.append({"role": role, "content": content})
    if system and found and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": system})
    return found
