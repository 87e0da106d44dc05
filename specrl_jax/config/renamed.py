"""Config fields that were renamed or removed."""

import re
from collections.abc import Iterable
from typing import Any

from specrl_jax.config.fields import ConfigError

# Old dotted name -> new dotted name; after a semicolon, how the value changed. Of a field that was
# removed, only what to do instead: "; ...".
RENAMED = {
    "learner.scale_advantage": "rl.advantage; True is 'group', False is 'group_mean'",
    "learner.normalize": "rl.normalize",
    "learner.kl": "rl.kl",
    "learner.clip_low": "rl.clip_low",
    "learner.clip_high": "rl.clip_high",
    "learner.updates": "rl.updates",
    "spec.steps": "spec.depth",
    "spec.max_steps": "spec.max_depth",
    "control.clock": "control.cost_updates; measured is 'online', frozen is 'off'",
    "control.audit": "; leave it out",
    "control.accept": "; leave it out",
    "control.epsilon": "; leave it out",
    "control.window": "; leave it out",
    "control.hysteresis": "; it is a constant now, leave it out",
    "control.explore": "; it is a constant now, leave it out",
    "distill.every": "distill.interval",
    "distill.memory": "distill.ema_decay",
    "distill.canary": "distill.probe_tokens",
}
# Values that a field no longer has: dotted name -> old value -> what to use.
RENAMED_VALUES: dict[str, dict[str | bool, str]] = {
    "distill.when": {"every_step": "interval", "every_k": "interval, with distill.interval",
                     "overlap": "interval, with distill.overlap=True",
                     "overlap_k": "interval, with distill.interval and distill.overlap=True"},
    "learner.remat": {False: "none", True: "full"},
    "control.policy": {"bandit": "bandit:bandit of tests/extending, or budget",
                       "oracle": "budget"},
}
RENAMED_REWARDS = {"bare": "exact_only", "format": "has_answer_marker", "digits": "digit_fraction"}

# Dataclass of a section -> its name, for errors that name the class.
SECTIONS = {"SpecOptions": "spec", "ControlConfig": "control", "LearnerConfig": "learner",
            "DistillConfig": "distill"}


def check_current(field: str, value: Any) -> None:
    """Raises ConfigError if `field`, a dotted name, was renamed or removed."""
    if field in RENAMED:
        new, _, hint = RENAMED[field].partition("; ")
        if not new:
            raise ConfigError(f"{field} = {value!r}: removed; {hint}")
        raise ConfigError(f"{field} = {value!r}: renamed; use {new}" + (hint and f" ({hint})"))
    if isinstance(value, str | bool) and (use := RENAMED_VALUES.get(field, {}).get(value)):
        raise ConfigError(f"{field} = {value!r}: renamed; use {use}")


def first_renamed(fields: Iterable[str]) -> str:
    """Returns what became of the first of `fields`, dotted names, that was renamed; "" if none."""
    found = sorted(field for field in fields if field in RENAMED)
    renamed = [field for field in found if not RENAMED[field].startswith(";")]
    if renamed:
        return f"{renamed[0]} is now {RENAMED[renamed[0]].partition('; ')[0]}"
    return f"{found[0]} was removed" if found else ""


def renamed_argument(error: str) -> str:
    """Returns what became of the option that a dataclass's TypeError names; "" if nothing did."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", error)
    section = SECTIONS.get(found[1], "") if found else ""
    return first_renamed([f"{section}.{found[2]}"]) if found else ""
