"""ByteDance's Seed-OSS: Llama with a bias in the projections to queries, keys and values."""

from specrl_jax.model.families import Family

SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM",
    architecture={"qkv_bias": True},
    supported={"attention_bias": (True, None), "attention_out_bias": (False, None)},
    written={"attention_bias": True},
    max_position=524288, head_dim=128)  # what transformers assumes if config.json has neither
