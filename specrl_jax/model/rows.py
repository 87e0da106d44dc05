"""Loops over the rows of a batch that something happens to."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array

Carry = TypeVar("Carry")


def for_rows(source: Array, body: Callable[[Array, Array, Carry], Carry], carry: Carry) -> Carry:
    """carry = body(b, source[b], carry) for each row b with source[b] >= 0, in order.

    As many turns as such rows: a batch in which one slot is filled does not rewrite the others.

    Args:
      source: i32[B].
    """
    wanted = source >= 0
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)

    def turn(i: Array, carry: Carry) -> Carry:
        return body(order[i], source[order[i]], carry)

    return jax.lax.fori_loop(0, wanted.sum(), turn, carry)
