"""The verification rules that spec.rule may name."""

from collections.abc import Callable

from specrl_jax.config.registry import Registry
from specrl_jax.verify import lossy, match, rejection
from specrl_jax.verify.protocol import Rule, Verify

RULES: Registry[Rule] = Registry("spec.rule", Rule)
RULES.update({"match": match.RULE, "rejection": rejection.RULE,
              "rejection_drawn": rejection.RULE_DRAWN, **lossy.RULES})


def register_rule(name: str, *, lossless: bool, needs_proposal: bool = False
                  ) -> Callable[[Verify], Rule]:
    """Returns a decorator that makes a `verify` function the rule of spec.rule = `name`.

    For the flags see protocol.Rule. Raises a ConfigError if another rule has that name.
    """
    return lambda verify: RULES.register(name)(Rule(verify, lossless, needs_proposal))
