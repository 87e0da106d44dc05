"""A reward that sends completions to a sandbox of yours, which runs them elsewhere.

The service gets {"programs": [{"code": ..., "tests": ...}, ...]} and returns {"passed": [...]}, a
share of passed tests for each. `tests` is a field of the dataset.
"""

import json
import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from specrl_jax.rewards.reward import batched

SECONDS = 300  # that the service may take for a batch


@batched
def passes(prompts: Sequence[str], completions: Sequence[str],
           examples: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the share of its tests that each completion's last block of code passes."""
    programs = [{"code": code(text), "tests": example["tests"]}
                for text, example in zip(completions, examples, strict=True)]
    request = urllib.request.Request(
        os.environ["SANDBOX_URL"], json.dumps({"programs": programs}).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        return json.load(reply)["passed"]


def code(completion: str) -> str:
    """Returns the last fenced block of a completion, "" if there is none."""
    return (re.findall(r"```(?:\w+)?\n(.*?)```", completion, re.DOTALL) or [""])[-1]
