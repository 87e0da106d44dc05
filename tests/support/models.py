"""Models with their weights in memory."""

from types import SimpleNamespace

from specrl_jax.model.weights import describe_source


def load(path: str) -> SimpleNamespace:
    """Returns arch, params, tokenizer and source of the model called `path`."""
    actual = describe_source(path)
    return SimpleNamespace(arch=actual.arch, params=actual.params(), tokenizer=actual.tokenizer,
                           source=actual.source)
