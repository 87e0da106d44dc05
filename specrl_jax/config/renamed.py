"""Config fields that were renamed or removed, and names that are reserved."""

from collections.abc import Iterable
from typing import Any

from specrl_jax.config.fields import ConfigError, check

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
RENAMED_REWARDS = {"bare": "exact_only", "format": "has_answer_marker", "digits": "digit_fraction"}

# Names that later versions will give a meaning; a dot at the end stands for a whole section.
RESERVED = ("rl.minibatches", "rl.entropy", "rl.filter", "rl.overlong", "rl.curriculum",
            "learner.optimizer", "learner.schedule", "learner.lora_rank", "learner.lora_alpha",
            "eval.", "track.")


def check_current(field: str, value: Any) -> None:
    """Raises ConfigError if `field`, a dotted name, was renamed or is reserved."""
    if field in RENAMED:
        new, _, hint = RENAMED[field].partition("; ")
        if not new:
            raise ConfigError(f"{field} = {value!r}: removed; {hint}")
        raise ConfigError(f"{field} = {value!r}: renamed; use {new}" + (hint and f" ({hint})"))
    check(not any(field == name or f"{field}.".startswith(name) and name.endswith(".")
                  for name in RESERVED), field, value, "is reserved and not available yet")


def first_renamed(fields: Iterable[str]) -> str:
    """Returns what became of the first of `fields`, dotted names, that was renamed; "" if none."""
    found = min((field for field in fields if field in RENAMED), default=None)
    if found is None:
        return ""
    new, _, hint = RENAMED[found].partition("; ")
    return f"{found} is now {new}" if new else f"{found} was removed; {hint}"
