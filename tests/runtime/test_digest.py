"""The digest of host values."""

from specrl_jax.runtime.digest import digest


def test_digest_is_a_function_of_values_and_their_order() -> None:
    values = [[1, "a"], {"x": None, "b": 0.5}, b"\x00"]
    same = [(1, "a"), {"b": 0.5, "x": None}, b"\x00"]
    assert digest(values) == digest(same) == digest(iter(values))
    others = [values[::-1], values[:2], [[1, "b"], *values[1:]], ["\ud800", *values], []]
    assert len({digest(other) for other in [values, *others]}) == 1 + len(others)
