"""The names of rules."""

from specrl_jax.verify.registry import RULES


def test_rules_of_the_package_are_lossless() -> None:
    assert all(rule.lossless for rule in RULES.values())
    assert {name for name, rule in RULES.items() if rule.needs_proposal} == {"rejection_drawn"}
