"""Real shapes of the kernels, by name: what benchmarks and lowering tests use."""

import dataclasses

# (query heads, key-value heads, head size)
HEADS = {
    "Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128), "Qwen2.5-7B": (28, 4, 128),
    "SmolLM2-135M": (9, 3, 64), "SmolLM2-1.7B": (32, 32, 64), "Gemma-2-2B": (8, 4, 256),
    "tiny": (4, 2, 16)}
FEATURES = {"Qwen2.5-0.5B": 896, "Qwen2.5-7B": 3584, "SmolLM2-135M": 576, "tiny": 64}
VOCABULARY = {"Qwen2.5": 151936, "SmolLM2": 49152, "tiny": 300}


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Tree attention of one layer with every node of every row packed.

    With `prompt` > 0, the rows of each `group` share a prompt of that many tokens.
    """

    model: str
    rows: int
    nodes: int
    context: int  # slots of the cache
    ragged: bool = False  # lengths from 1/8 of the context to all of it; else all of it
    prompt: int = 0
    group: int = 1

    @property
    def name(self) -> str:
        return (f"{self.model}, {self.rows} x {self.nodes} at {self.context}"
                f"{', ragged' if self.ragged else ''}"
                f"{f', {self.group} share {self.prompt}' if self.prompt else ''}")


@dataclasses.dataclass(frozen=True)
class DrawShape:
    """The perturbed argmax."""

    model: str
    positions: int
    count: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} vocabulary, {self.positions} positions, {self.count} candidates"


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The perturbed argmax of the logits of an output head."""

    model: str
    positions: int

    @property
    def vocabulary(self) -> int:
        return VOCABULARY[self.model.partition("-")[0]]

    @property
    def name(self) -> str:
        return f"{self.model} head, {self.positions} positions"


Shape = TreeShape | DrawShape | HeadShape
_BIG, _SMALL = "Qwen2.5-7B", "SmolLM2-135M"
ACCELERATOR_TREES = (
    *(TreeShape(_BIG, *at) for at in (
        (1, 1, 32768), (1, 8, 32768), (1, 64, 32768), (8, 1, 4096), (8, 8, 4096), (8, 64, 4096),
        (64, 1, 4096), (64, 8, 4096), (64, 8, 512), (256, 1, 512), (256, 8, 512), (256, 1, 4096),
        (256, 8, 4096))),
    TreeShape(_BIG, 64, 8, 4096, ragged=True), TreeShape(_BIG, 64, 8, 512, prompt=2048, group=8),
    *(TreeShape(_SMALL, *at) for at in (
        (1, 8, 4096), (64, 1, 512), (64, 8, 512), (64, 8, 4096), (256, 8, 2048))))
CPU_TREES = (*(TreeShape(_SMALL, *at) for at in (
    (1, 1, 512), (1, 8, 512), (16, 1, 512), (16, 4, 512), (64, 1, 512), (64, 4, 512))),
    TreeShape(_SMALL, 64, 1, 512, ragged=True), TreeShape(_BIG, 4, 8, 2048),
    TreeShape(_SMALL, 1, 64, 512), TreeShape(_SMALL, 256, 1, 512), TreeShape(_BIG, 1, 1, 32768),
    TreeShape(_SMALL, 64, 4, 128, prompt=512, group=8))
TINY_TREES = (TreeShape("tiny", 2, 3, 64), TreeShape("tiny", 2, 1, 64, ragged=True),
              TreeShape("tiny", 4, 2, 64, prompt=32, group=2))
ACCELERATOR_DRAWS = tuple(DrawShape("Qwen2.5", *at) for at in (
    (1, 1), (64, 1), (64, 4), (256, 1), (1024, 1), (1024, 4)))
CPU_DRAWS = tuple(DrawShape("SmolLM2", *at) for at in ((1, 1), (16, 1), (64, 1), (64, 4)))
TINY_DRAWS = (DrawShape("tiny", 4, 2),)
ACCELERATOR_HEADS = tuple(HeadShape(model, positions) for model in ("Qwen2.5-0.5B", _BIG)
                          for positions in (1, 16, 64, 128))
CPU_HEADS = (HeadShape(_SMALL, 16),)
TINY_HEADS = (HeadShape("tiny", 4),)
SETS = {"accelerator": (*ACCELERATOR_TREES, *ACCELERATOR_DRAWS, *ACCELERATOR_HEADS),
        "cpu": (*CPU_TREES, *CPU_DRAWS, *CPU_HEADS),
        "tiny": (*TINY_TREES, *TINY_DRAWS, *TINY_HEADS)}
