"""A loop over some of the rows of a batch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specrl_jax.structs import Array

Carry = TypeVar("Carry")


def for_rows(source: Array, body: Callable[[Array, Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs carry = body(b, source[b], carry) for each row b with source[b] >= 0, in order.

    `source` is i32[B]. There are as many iterations as such rows: filling one slot does not rewrite
    the others.
    """
    wanted = source >= 0
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)

    def step(i: Array, carry: Carry) -> Carry:
        return body(order[i], source[order[i]], carry)

    return jax.lax.fori_loop(0, wanted.sum(), step, carry)
