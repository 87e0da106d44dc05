"""The verification rules that spec.rule may name."""

from specrl_jax.config.registry import Registry
from specrl_jax.verify import match, rejection
from specrl_jax.verify.protocol import Rule

RULES: Registry[Rule] = Registry("spec.rule", Rule)
RULES.update({"match": match.RULE, "rejection": rejection.RULE,
              "rejection_drawn": rejection.RULE_DRAWN})
register_rule = RULES.register  # register_rule("name")(Rule(verify, lossless=...))
