"""Acceptance of a root's children by kind and number, on an actor's and its drafter's own logits.

    python experiments/bench_children.py --config.draft.path=runs/drafter/drafter \\
        --config.rollout.temperature=0.6 --config.data.name=gsm8k --config.data.split=test \\
        --config.data.system= --config.rollout.max_prompt_tokens=224

The actor answers the first prompts of config.data's split; at each token that it said, children of
the drafter's first depth are tried: the best `perturbed` by the noise of the actor's draw, at some
draft.temperature, the `top` ones and ones that were `sampled`, all three by the match rule, and
sampled ones by `rejection` without replacement. With config.rollout.top_k or top_p, `perturbed`
ones also of what that truncation keeps of the drafter's distribution ("cut"), or of those tokens
before all others ("cut last"). Intervals are bootstrapped over prompts.
"""

import sys
from pathlib import Path

import config_flags
import numpy as np
import run_flags
from absl import flags
from bench import children, results, show
from bench.speculation import Arm, Cell
from rich.table import Table

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, DistillOptions
from specrl_jax.distill.data import Corpus
from specrl_jax.distill.programs import Programs
from specrl_jax.draft import eagle_weights
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.rollout.prompts import make_prompts

PROMPTS = flags.DEFINE_integer("prompts", 32, "the first N prompts", lower_bound=2)
TEMPERATURE = flags.DEFINE_list("temperature", ["1", "0.5", "0.35"],
                                "draft.temperature of perturbed children, each a line")
COUNTS = (1, 2, 4, 8)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_children.json in "
                          "experiments)")


def main(config: Config, workdir: Path) -> int:
    results.refuse_workdir()
    out = results.destination(OUT.value, "bench_children.json")
    temperatures = _temperatures()
    if not config.draft.path:
        raise ConfigError("draft.path = '': there is no drafter to measure; give the directory of "
                          "an EAGLE head, such as train_drafter.py writes")
    rollout = config.rollout
    if config.spec.rule != "match":
        raise ConfigError(f"spec.rule = {config.spec.rule!r}: measured are draws of match; use it")
    if rollout.temperature == 0:
        raise ConfigError("rollout.temperature = 0: nothing is drawn from a distribution; give a "
                          "temperature above 0")
    config, actor = run_flags.resolve(config)
    use_persistent_cache()
    source, mesh = actor.source, sharding.make_mesh(config.mesh)
    arch, own, warnings, _ = eagle_weights.load(config.draft.path, source.arch,
                                                source.tokenizer.stop_ids)
    for warning in warnings:
        _say(warning)
    prompts = make_prompts(config, source.tokenizer, _say).tokens[:PROMPTS.value]
    params = actor.params(mesh)
    arm = Arm(config, source, params, prompts, len(prompts), "off", [Cell(1, 1, 2)],
              CompilationCounter())
    arm.sampler.compile(_say)
    said = arm.run(None).result.sequences
    tokens = [np.concatenate([prompt, answer[:length]]).astype(np.int32) for prompt, answer, length
              in zip(prompts, said.tokens, said.length, strict=True)]
    none = np.zeros(len(tokens), np.float32)
    corpus = Corpus(tokens, np.asarray([len(p) for p in prompts], np.int32), none, none,
                    np.zeros((len(tokens), 2), np.uint32))
    programs = Programs(arch, DistillOptions(), mesh)
    found = children.measure(programs, COUNTS, temperatures, rollout, params, programs.whole(own),
                             corpus, config.seed)
    results.write(out, results.blank(config) | {"cases": found})
    show.console().print(table(found["accepted"]))
    print(f"wrote {out}")
    return 0


def _temperatures() -> list[float]:
    """
    Raises:
      ConfigError: the flag holds something else than different positive numbers.
    """
    try:
        found = [float(text) for text in TEMPERATURE.value]
    except ValueError:
        found = []
    if not found or not all(0 < t < float("inf") for t in found) or len(set(found)) < len(found):
        raise ConfigError(f"--temperature={','.join(TEMPERATURE.value)}: give different positive "
                          f"numbers, such as 1,0.5")
    return found


def table(accepted: dict[str, dict[str, dict[str, float]]]) -> Table:
    """A line for each kind."""
    shown = Table(title="chance that one of the children is accepted, with its 95 % interval")
    for column in ("children", *map(str, COUNTS)):
        shown.add_column(column, justify="right")
    for kind, by_count in accepted.items():
        shown.add_row(kind, *(f"{x['mean']:.3f} ({x['low']:.3f} .. {x['high']:.3f})"
                              for x in by_count.values()))
    return shown


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
