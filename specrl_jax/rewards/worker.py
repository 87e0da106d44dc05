"""A process that judges answers:  python -m specrl_jax.rewards.worker SECONDS NAME...

A timer of CPU time kills it, however deep in C an answer leads it. Memory beyond MEMORY is refused.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from specrl_jax.config.tasks import RewardError
from specrl_jax.rewards.judge import evaluate
from specrl_jax.rewards.reward import REWARDS
from specrl_jax.rewards.workers import READY

MEMORY = 4 * 2**30  # bytes


def main(arguments: Sequence[str]) -> None:
    """Replies to each task (name, prompt, completion, example) on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this ends with its input
    tasks, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward prints is no reply
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    functions = {name: REWARDS.resolve(name) for name in arguments[1:]}
    print(json.dumps(READY), file=replies, flush=True)
    for line in tasks:
        name, *answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, float(arguments[0]))
        reply = _reply(name, functions[name], *answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


def _reply(name: str, function: Any, *answer: Any) -> dict[str, Any]:
    try:
        return {"value": evaluate(name, function, *answer)}
    except RewardError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"limit": f"needs over {MEMORY >> 30} GiB"}
        return {"error": str(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
