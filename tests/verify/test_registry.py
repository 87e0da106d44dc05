"""The names of rules."""

from specrl_jax.verify.registry import RULES


def test_lossy_rules_say_so_in_their_names() -> None:
    assert {name for name, rule in RULES.items() if not rule.lossless} == {
        name for name in RULES if name.startswith("lossy")}
    assert {name for name, rule in RULES.items() if rule.needs_proposal} == {
        "rejection_drawn", "lossy_shared_noise", "lossy_retrospective"}
