"""Published shapes: parameter counts are those that the hub states for the checkpoints."""

import math

import numpy as np
import pytest

from specrl_jax.config import load_config
from specrl_jax.model.published import PUBLISHED, without_weights
from specrl_jax.model.tensors import tensor_shapes
from specrl_jax.model.weights import describe_source

PARAMETERS = {"qwen2_5_0_5b": 494_032_768, "qwen2_5_1_5b": 1_543_714_304,
              "qwen2_5_3b": 3_085_938_688, "qwen2_5_7b": 7_615_616_512,
              "qwen2_5_14b": 14_770_033_664, "qwen3_8b": 8_190_735_360}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_parameter_count(name: str) -> None:
    assert sum(map(math.prod, tensor_shapes(PUBLISHED[name]).values())) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_shapes_of_its_model_without_weights(name: str) -> None:
    config = without_weights(load_config(name))
    assert config.model.path == f"random:{name}"
    assert describe_source(config.model.path).arch == PUBLISHED[name]


def test_other_models_keep_their_weights() -> None:
    config = load_config("tiny")
    assert without_weights(config) == config


def test_random_weights_are_the_same_in_parts() -> None:
    tensors = describe_source("random:qwen2_5_0_5b").tensors
    name = "model.layers.3.self_attn.k_proj.weight"
    whole = tensors.read(name)
    assert whole.shape == (128, 896) and 0.9 < whole.std() * 896**0.5 < 1.1
    np.testing.assert_array_equal(tensors.read_part(name, ((5, 9), (0, 3))), whole[5:9, :3])
    norm = tensors.read("model.layers.3.input_layernorm.weight")
    assert 0.9 < norm.mean() < 1.1
