"""Answers one prompt, streamed to standard output as the tokens come.

    python experiments/generate.py --prompt="What is 12 + 34?"
    python experiments/generate.py --prompt="Tell a story." --config.rollout.max_new_tokens=200
    python experiments/generate.py --prompt="..." --run=runs/smollm2 --config.spec.drafter=off

The last line, on standard error, counts tokens, tokens per second and the accept length: tokens
committed in a round. Without speculation it is 1; the text is the same with and without.
"""

import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags

from specrl_jax.config import Config
from specrl_jax.evaluation.generate import Generation, generate
from specrl_jax.io.compilation import use_persistent_cache

flags.adopt_module_key_flags(run_flags)
PROMPT = flags.DEFINE_string("prompt", None, "what the user says", required=True)
SYSTEM = flags.DEFINE_string("system", None, "system message (default: that of the run with --run, "
                             "else none)")


def main(config: Config, workdir: Path) -> int:
    asked_of_run = flags.FLAGS.run is not None
    config, actor = run_flags.resolve(config)
    system = SYSTEM.value
    if system is None:
        system = config.data.system if asked_of_run else ""
    use_persistent_cache()
    try:
        told = generate(config, actor, PROMPT.value, system, write=_write, say=_say)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    _write("\n")
    _say(summary(told))
    return 0


def summary(told: Generation) -> str:
    """What an answer cost, in one line."""
    end = "" if told.stopped else ", cut at rollout.max_new_tokens"
    return (f"{told.tokens} tokens{end}  {told.tokens / told.seconds:.1f} tokens/s  "
            f"accept length {told.accept_length:.2f} ({told.drafter})")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
