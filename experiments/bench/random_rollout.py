"""One model with random weights on one device: plain decoding against replayed drafts."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.dispatch import Unsupported

from specrl_jax import prng, sharding
from specrl_jax.config import MeshConfig, RolloutConfig
from specrl_jax.control import fixed, protocol
from specrl_jax.draft.off import off
from specrl_jax.draft.recorded import replay, replaying
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.layout import RolloutRequest, Shapes, request
from specrl_jax.rollout.plan import Decoder

from . import work
from .hardware import Hardware, Probes

_QWEN = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, max_position=32768, family="qwen2")
QWEN = {
    "Qwen2.5-0.5B": Architecture(151936, 896, 4864, 24, 14, 2, 64, tied=True, **_QWEN),
    "Qwen2.5-1.5B": Architecture(151936, 1536, 8960, 28, 12, 2, 128, tied=True, **_QWEN),
    "Qwen2.5-7B": Architecture(152064, 3584, 18944, 28, 28, 4, 128, tied=False, **_QWEN)}
MODELS = QWEN | {"tiny": Architecture(64, 32, 48, 2, 4, 2, 16, qkv_bias=True, max_position=256)}
DEPTH, NODES = 7, 8
KERNELS = {"gpu": ("triton", "pallas_triton"), "tpu": ("pallas",), "cpu": ("machine",)}
# Of random embeddings, over their initial size: the last token decides the next one by far. Where
# layers of bfloat16 decide, plain and drafted streams part within a dozen tokens, at near ties.
SCALE = 64


def case(model: str, rows: int, new: int, probes: Probes, in_time: Callable[[], bool],
         kernels: tuple[str, ...]) -> dict[str, Any]:
    """What a result file holds of one model and number of rows.

    Rollouts use XLA's tree attention, then each of `kernels`.
    A setting that is refused or does not fit is named with its reason; plain decoding comes first,
    and drafts replay what it said.
    """
    arch = MODELS[model]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params, found, said = random_params(arch, dtype), {}, None
    settings = [(drafter, name) for name in ("xla", *kernels)
                for drafter in ("off", "replay")]
    for drafter, name in settings:
        if not in_time() and found:
            found[f"{drafter}, {name}"] = {"left_out": "out of time"}
            continue
        try:
            one, result = run(arch, params, dtype, rows, new, drafter, name, said)
        except (Unsupported, ExceptionGroup, jax.errors.JaxRuntimeError, ValueError) as error:
            found[f"{drafter}, {name}"] = {
                "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            continue
        if said is None:
            said = result.sequences.tokens
        one["equal_streams"] = float(np.mean(np.all(result.sequences.tokens == said, 1)))
        found[f"{drafter}, {name}"] = one | bound(
            arch, dtype, np.full(rows, prompt_of(arch, new)), result, probes.measure(), one)
    return {"model": model, "rows": rows, "new_tokens": new, "dtype": str(jnp.dtype(dtype)),
            "settings": found}


def random_params(arch: Architecture, dtype: Any) -> Any:
    """Made on the device, leaf by leaf."""
    leaves, tree = jax.tree.flatten(describe(arch), is_leaf=is_param)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def draw(key: Any, shape: tuple[int, ...], std: float) -> Any:
        drawn = jax.random.normal(key, shape, dtype) * std
        return drawn.astype(dtype) if std else jnp.ones(shape, dtype)

    make = jax.jit(draw, static_argnums=(1, 2))
    return tree.unflatten([make(key, p.shape, p.std * (SCALE if "vocab" in p.axes else 1))
                           for key, p in zip(keys, leaves, strict=True)])


def run(arch: Architecture, params: Any, dtype: Any, rows: int, new: int, drafter: str,
        implementation: str, said: np.ndarray | None) -> tuple[dict[str, Any], Result]:
    """Compiles, warms up, and times one rollout; replayed drafts are those of `said`."""
    depth = min(DEPTH, new - 1)
    parts = off() if drafter == "off" else replay(depth=depth, nodes=depth + 1,
                                                  vocab=arch.vocab_size)
    controller = fixed.off() if drafter == "off" else fixed.fixed()._replace(
        init=lambda costs: protocol.make_spec(depth, 1, parts.nodes, 0))
    prompt = prompt_of(arch, new)
    shapes = Shapes(batch=rows, sequences=rows, group=1, prompt=prompt, response=new, shards=1,
                    depth=parts.depth, min_batch=rows)
    decoder = Decoder(arch, parts, controller, max_packed=max(64, rows * parts.nodes),
                      implementation=implementation)
    engine = Engine(decoder, sharding.make_mesh(MeshConfig()), shapes, (), dtype,
                    past=0 if drafter == "off" else 1)
    own = parts.bind(params, () if drafter == "off" else replaying(0.0))
    began = time.perf_counter()
    engine.compile(params, own)
    compiled = time.perf_counter() - began
    asked = requests(arch, rows, prompt, new, None if drafter == "off" else said)
    engine.run(params, asked, own)
    counter = CompilationCounter()
    result = engine.run(params, asked, own)
    seconds = sum(launch.seconds for launch in result.trace)
    counters = result.counters
    return {"compile_seconds": round(compiled, 1), "compilations": counter.take(),
            "seconds": result.seconds, "prefill_seconds": result.prefill_seconds,
            "tokens_per_second": int(result.sequences.length.sum()) / result.seconds,
            "rounds": counters["rounds"], "round_seconds": seconds / counters["rounds"],
            "accept_length": counters["committed"] / counters["row_rounds"],
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}, result


def prompt_of(arch: Architecture, new: int) -> int:
    """Tokens of every prompt."""
    return min(64, arch.max_position - new)


def requests(arch: Architecture, rows: int, prompt: int, new: int, said: np.ndarray | None
             ) -> RolloutRequest:
    """One random prompt a row, temperature 1; `said` i32[rows, T] is what drafts replay."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(rows)]
    index = np.arange(rows)
    keys = prng.row_keys(0, "generate", 0, index, index * 0, index * 0)
    return request(prompts, keys, 1, RolloutConfig(max_new_tokens=new),
                   None if said is None else said[:, None])


def bound(arch: Architecture, dtype: Any, prompt_lengths: np.ndarray, result: Result,
          probe: Hardware, one: dict[str, Any]) -> dict[str, float]:
    """The least seconds of a round, and how many times that it took."""
    counters = result.counters
    said = result.sequences
    live, context = work.context_by_round(prompt_lengths, said.commits, said.rounds)
    nodes = 1 + counters["drafted"] / counters["row_rounds"]
    least = work.rounds_bound(arch, probe, live, context, nodes, jnp.dtype(dtype).itemsize)
    each = least.seconds / counters["rounds"]
    return {"bound_round_seconds": each, "over_bound": one["round_seconds"] / each}


def line(name: str, found: dict[str, Any]) -> str:
    """One line for the terminal."""
    shown = [f"{who} {one['tokens_per_second']:.0f} tokens/s ({one['over_bound']:.2f} of the bound)"
             if "seconds" in one else f"{who} {next(iter(one))}"
             for who, one in found["settings"].items()]
    return f"{name}: {'; '.join(shown)}"
