"""Answers a prompt, streamed to standard output token by token.

    python experiments/generate.py --prompt="What is 12 + 34?"
    python experiments/generate.py --run=runs/smollm2 --interactive

The last line, on standard error, counts tokens, tokens/s and the accept length: tokens per round,
1 without speculation. --interactive compiles once and asks for a prompt again and again; an empty
line ends it.
"""

import itertools
import sys
from pathlib import Path

import config_flags
import run_flags
from absl import flags

from specrl_jax.config import Config, ConfigError
from specrl_jax.evaluation.generate import Generation, Generator, generate
from specrl_jax.model.source import Actor
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.stderr import say

flags.adopt_module_key_flags(run_flags)
PROMPT = flags.DEFINE_string("prompt", None, "the question")
SYSTEM = flags.DEFINE_string("system", None, "system message (default: that of the run with --run, "
                             "else none)")
INTERACTIVE = flags.DEFINE_bool("interactive", False, "read prompts from standard input, one per "
                                "line, until an empty one")


def main(config: Config, workdir: Path) -> int:
    """Answers what the flags ask; returns the exit status."""
    if PROMPT.value is None and not INTERACTIVE.value:
        raise ConfigError("--prompt is missing: give a question, or --interactive")
    from_run = flags.FLAGS.run is not None
    config, actor = run_flags.resolve(config)
    system = SYSTEM.value
    if system is None:
        system = config.data.system if from_run else ""
    use_persistent_cache()
    if INTERACTIVE.value:
        interact(config, actor, system)
    else:
        finish(generate(config, PROMPT.value, system, actor=actor, write=write, say=say))
    return 0


def interact(config: Config, actor: Actor, system: str) -> None:
    """Compiles once, then answers --prompt and the lines of standard input."""
    generator = Generator(config, actor, longest=config.rollout.max_prompt_tokens, say=say)
    prompts = itertools.chain(filter(None, [PROMPT.value]), iter(ask, ""))
    for number, prompt in enumerate(prompts):
        try:
            finish(generator.answer(prompt, system, number, write=write))
        except ConfigError as error:
            say(f"error: {error}")


def ask() -> str:
    """Returns the next line of standard input, "" at its end."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def finish(answer: Generation) -> None:
    """Ends the line of an answer and prints its cost."""
    write("\n")
    say(summary(answer))


def summary(answer: Generation) -> str:
    """Returns the cost of an answer in one line."""
    end = "" if answer.stopped else ", cut at rollout.max_new_tokens"
    return (f"{answer.tokens} tokens{end}  {answer.tokens / answer.seconds:.1f} tokens/s  "
            f"accept length {answer.accept_length:.2f} ({answer.drafter})")


def write(text: str) -> None:
    """Prints a piece of an answer at once."""
    print(text, end="", flush=True)


if __name__ == "__main__":
    config_flags.run(main)
