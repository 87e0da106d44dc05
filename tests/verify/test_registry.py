"""Rules by name, rules of one's own, and what is refused."""

import jax.numpy as jnp
import pytest

from specrl_jax.config import ConfigError
from specrl_jax.structs import Array, Verdict
from specrl_jax.verify import match
from specrl_jax.verify.protocol import Nodes, Rule, Target
from specrl_jax.verify.registry import RULES, register_rule


def root_only(nodes: Nodes, target: Target, depth: int) -> tuple[Verdict, Array]:
    """Accepts no draft: plain decoding at the price of speculation."""
    dead = jnp.zeros_like(nodes.live).at[:, 0].set(nodes.live[:, 0])
    return match.verify(nodes.replace(live=dead), target, depth)


def test_rules_of_the_package_are_lossless() -> None:
    assert all(rule.lossless for rule in RULES.values())
    assert {name for name, rule in RULES.items() if rule.needs_proposal} == {"rejection_drawn"}


def test_registered_rule_is_found_by_name_and_taken_once() -> None:
    try:
        mine = register_rule("root_only")(Rule(root_only, lossless=True))
        assert RULES.resolve("root_only") is mine
        with pytest.raises(ConfigError, match="spec.rule = 'root_only': is registered already"):
            register_rule("root_only")(Rule(match.verify, lossless=False))
    finally:
        RULES.pop("root_only")


def test_rule_of_a_module_needs_no_registration() -> None:
    assert RULES.resolve("specrl_jax.verify.match:RULE") is RULES["match"]


@pytest.mark.parametrize("name", ["matches", "specrl_jax.verify.match:verify", "no.module:RULE"])
def test_unknown_rule_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"spec.rule = {name!r}") as caught:
        RULES.resolve(name)
    assert "\n" not in str(caught.value)
