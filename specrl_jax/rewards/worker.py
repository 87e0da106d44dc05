"""A process that judges answers:  python -m specrl_jax.rewards.worker COUNT SECONDS NAME...

It imports the rewards, but no JAX, and forks workers. Each answer has a time limit, and each worker
one of memory; a worker that exceeds a limit or dies is replaced.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO

import pebble

from specrl_jax.config.tasks import RewardError
from specrl_jax.rewards.judge import evaluate
from specrl_jax.rewards.reward import REWARDS
from specrl_jax.rewards.workers import READY

MEMORY = 4 * 2**30  # bytes
WAITING = 20  # seconds that an answer may take for each CPU second: it may sleep, or share its core


def main(arguments: Sequence[str]) -> int:
    """Replies to each request [name, answers] on standard input with the answers' outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this ends with its input
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward prints is no reply
    count, seconds, names = int(arguments[0]), float(arguments[1]), arguments[2:]
    for name in names:
        REWARDS.resolve(name)
    with pebble.ProcessPool(count, initializer=_limit_memory,
                            context=multiprocessing.get_context("fork")) as pool:
        _send(replies, READY)
        for line in requests:
            try:
                _send(replies, _judge_all(pool, seconds, *json.loads(line)))
            except (BrokenProcessPool, BrokenPipeError):  # the parent starts another, or is gone
                return 1
    return 0


def _send(replies: TextIO, value: Any) -> None:
    print(json.dumps(value), file=replies, flush=True)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _judge_all(pool: pebble.ProcessPool, seconds: float, name: str, answers: list[Any]
               ) -> list[dict[str, Any]]:
    futures = [pool.schedule(_judge, (seconds, name, *answer), timeout=WAITING * seconds)
               for answer in answers]
    return [_outcome(future, name, seconds) for future in futures]


def _outcome(future: pebble.ProcessFuture, name: str, seconds: float) -> dict[str, Any]:
    """Returns the fields of an `Outcome`."""
    error = future.exception()
    late = {"limit": f"took over reward.seconds = {seconds:g}"}
    if error is None:
        return future.result()
    if isinstance(error, BrokenProcessPool):
        raise error
    if isinstance(error, TimeoutError):
        return late
    if not isinstance(error, pebble.ProcessExpired):
        return {"error": f"reward {name!r}: {type(error).__name__}: {error}"}
    return late if error.exitcode == -signal.SIGPROF else {
        "limit": f"ended its process with status {error.exitcode}"}


def _judge(seconds: float, name: str, *answer: Any) -> dict[str, Any]:
    """Runs in a worker. A timer of CPU time kills it, however deep in C an answer leads it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return {"value": evaluate(name, REWARDS.resolve(name), *answer)}
    except RewardError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"limit": f"needs over {MEMORY >> 30} GiB"}
        return {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
