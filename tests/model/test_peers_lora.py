"""An exported adapter acts in peft as our merged weights do (`peers` extra)."""

from pathlib import Path

import jax
import numpy as np
import pytest

from specrl_jax.config import LearnerConfig
from specrl_jax.model import layers, lora
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.export import export, export_adapter
from specrl_jax.model.hf_directory import open_tensors
from specrl_jax.model.tensors import pack
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.transformer import forward
from specrl_jax.structs import Params

ARCH = Architecture(vocab_size=288, hidden_size=64, intermediate_size=96, num_layers=2,
                    num_heads=4, num_kv_heads=2, head_dim=16, family="qwen2", qkv_bias=True,
                    tied=False, max_position=64)
OPTIONS = LearnerConfig(lora_rank=3, lora_alpha=12.0)


def adapters(options: LearnerConfig, stacked: bool = False) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (a + 0.1 * rng.standard_normal(a.shape)).astype(np.float32),
                        lora.initialize(ARCH, options, 0, stacked))


def test_adapter_directory_has_pefts_names_and_shapes(tmp_path: Path) -> None:
    given = adapters(OPTIONS)
    for name, tree in (("list", given), ("stacked", layers.arrange(given, True))):
        export_adapter(tmp_path / name, ARCH, tree, OPTIONS, "my/model")
    files = [open_tensors(tmp_path / name / "adapter_model.safetensors")
             for name in ("list", "stacked")]
    names = set(files[0].keys())
    assert len(names) == 2 * 7 * ARCH.num_layers
    where = "base_model.model.model.layers.1."
    assert files[0].get_tensor(f"{where}self_attn.k_proj.lora_B.weight").shape == (32, 3)
    assert files[0].get_tensor(f"{where}mlp.down_proj.lora_A.weight").shape == (3, 96)
    for name in names:
        np.testing.assert_array_equal(files[0].get_tensor(name), files[1].get_tensor(name))


@pytest.mark.full
@pytest.mark.parametrize("targets", [OPTIONS.lora_targets, ("q_proj", "down_proj")])
def test_logits_in_peft_are_those_of_merged_weights(
        tmp_path: Path, targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    options = LearnerConfig(lora_rank=3, lora_alpha=12.0, lora_targets=targets)
    base = pack(ARCH, random_tensors(ARCH, 0))
    export(tmp_path / "base", ARCH, base, byte_tokenizer())
    export_adapter(tmp_path / "adapter", ARCH, adapters(options), options, str(tmp_path / "base"))
    merged = lora.overlay(base, lora.merge(options, np.float32, base, adapters(options)))
    tokens = np.random.RandomState(0).randint(0, 256, (1, 32)).astype(np.int32)
    ours, before = (np.asarray(forward(ARCH, params, tokens, np.array([32])))
                    for params in (merged, base))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert np.abs(ours - before).max() > 0.1
