"""`random:tiny`: a random model of a few hundred kilobytes and a byte tokenizer, for tests.

`random:deep` has as many layers as a small real model and 70 MB of weights, for experiments in
which reading weights, not overhead, must dominate a round.
"""

import dataclasses
import types

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tensors import EMBED, HEAD, Tensors, slices, tensor_shapes
from specrl_jax.model.tokenizer import Tokenizer

# Every axis that a mesh may split divides by 8.
TINY = Architecture(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
                    num_heads=16, num_kv_heads=8, head_dim=8, max_position=2048)
DEEP = dataclasses.replace(TINY, hidden_size=384, intermediate_size=1024, num_layers=12,
                           num_heads=8, num_kv_heads=4, head_dim=32)
RANDOM = types.MappingProxyType({"tiny": TINY, "deep": DEEP})
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def random_tensors(arch: Architecture, seed: int) -> Tensors:
    """Returns tensors with a trained model's variance: logits spread by about 2, not by 0.1.

    NumPy guarantees that streams of RandomState never change, so golden files can rely on them.
    """
    rng, shapes = np.random.RandomState(seed), tensor_shapes(arch)

    def draw(name: str) -> np.ndarray:
        noise = rng.standard_normal(shapes[name])
        if noise.ndim == 1:
            return (0.1 * noise + ("bias" not in name)).astype(np.float32)
        scale = 2 if name in (EMBED, HEAD) else 1
        return (scale * noise / noise.shape[1] ** 0.5).astype(np.float32)

    drawn = {name: draw(name) for name in shapes}
    return Tensors(shapes, lambda name, part: drawn[name][slices(part)])


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each byte, then special tokens from id 256."""
    # A byte's letter is GPT-2's: itself if it is printable, or the next free one from U+0100.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>",
                     pad_token="<|endoftext|>")
