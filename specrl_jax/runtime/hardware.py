"""Peak speed, bandwidth and memory of accelerators, by JAX's names of them."""

import dataclasses
from typing import Any

GIB = 2**30
FILLED = 0.95  # of the available memory, by a run that is said to fit


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device can do at most."""

    name: str  # as in a compile target: "v5e", "h100"
    kind: str  # jax.Device.device_kind
    cores: int  # TensorCores that share the figures below; a GPU counts as one
    flops: float  # FLOP/s of dense bfloat16 products
    bandwidth: float  # bytes/s of its memory
    available: int  # bytes of its memory that programs and arrays may use

    @property
    def limit(self) -> int:
        """Bytes of its memory that a run is planned to fill at most."""
        return int(FILLED * self.available)

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "tpu" or "gpu"."""
        return "tpu" if self.kind.startswith("TPU") else "gpu"

    def least_seconds(self, flops: float, moved: float) -> float:
        """Returns the seconds that the work takes at least: the larger of products and bytes."""
        return max(flops / self.flops, moved / self.bandwidth)


# TPU: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e (bf16 peak and HBM bandwidth of a chip); their
# memory is what libtpu's compiler reports when a program is too large, twice a core's on v4.
# GPU: NVIDIA's data sheets of the SXM modules, dense (half of what is given with sparsity): A100
# 80GB (2021), H100 (2022), H200 (2023), HGX B200 (2024: 36 PFLOP/s with sparsity and 62 TB/s for
# eight); their memory is what CUDA reports.
CHIPS = {chip.name: chip for chip in (
    Chip("v4", "TPU v4", 2, 275e12, 1.228e12, int(30.5 * GIB)),
    Chip("v5e", "TPU v5 lite", 1, 197e12, 0.819e12, int(15.75 * GIB)),
    Chip("v5p", "TPU v5", 2, 459e12, 2.765e12, int(95.74 * GIB)),
    Chip("v6e", "TPU v6 lite", 1, 918e12, 1.638e12, int(31.25 * GIB)),
    Chip("a100", "NVIDIA A100-SXM4-80GB", 1, 312e12, 2.039e12, int(79.1 * GIB)),
    Chip("h100", "NVIDIA H100 80GB HBM3", 1, 989.4e12, 3.35e12, int(79.1 * GIB)),
    Chip("h200", "NVIDIA H200", 1, 989.4e12, 4.8e12, int(139.0 * GIB)),
    Chip("b200", "NVIDIA B200", 1, 2250e12, 7.7e12, int(178.3 * GIB)),
)}
_NAMES = {chip.kind: name for name, chip in CHIPS.items()} | {
    "TPU v5p": "v5p", "TPU v5e": "v5e", "TPU v6e": "v6e", "NVIDIA A100 80GB": "a100"}


def chip_of(device: Any) -> Chip | None:
    """Returns the limits of a jax.Device; None if the table has none for it.

    A device that is one of a chip's cores (v4 without megacore) has its share.
    """
    name = _NAMES.get(device.device_kind)
    if name is None:
        return None
    chip = CHIPS[name]
    cores = getattr(device, "num_cores", None) or chip.cores
    if chip.platform == "gpu" or cores == chip.cores:
        return chip
    share = cores / chip.cores
    return dataclasses.replace(
        chip, cores=cores, flops=chip.flops * share, bandwidth=chip.bandwidth * share,
        available=int(chip.available * share))
