"""Models with their weights in memory."""

from types import SimpleNamespace

from specrl_jax.model.weights import describe_source


def load(path: str) -> SimpleNamespace:
    """Returns arch, params, tokenizer and source of the model called `path`."""
    found = describe_source(path)
    return SimpleNamespace(arch=found.arch, params=found.params(), tokenizer=found.tokenizer,
                           source=found.source)
