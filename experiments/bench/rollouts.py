"""Times rollouts with random weights at Qwen2.5's shapes on this device.

    python experiments/bench.py rollouts
    python experiments/bench.py rollouts --models=Qwen2.5-0.5B --rows=1,64
    python experiments/bench.py rollouts --default --models=Qwen2.5-1.5B --rows=16

Writes results/gpu_rollouts_PLATFORM.json: for each model and batch size plain decoding, then drafts
that replay its tokens, with each implementation of tree attention; speed, equal tokens and rounds
over the time to read weights and cache. With --default the default implementation alone, into
results/gpu_default_PLATFORM.json. Needs jax, flax, optax, orbax and numpy only.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.dispatch import Unsupported
from studies.recorded import replay, replay_params

from specrl_jax import prng, sharding
from specrl_jax.config import MeshConfig, RolloutConfig
from specrl_jax.control import fixed, protocol
from specrl_jax.draft.off import off
from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.rollout.layout import RolloutRequest, Shapes, make_request
from specrl_jax.rollout.plan import Decoder
from specrl_jax.runtime.compilation import CompilationCounter

from . import hardware, roofline, standalone
from .hardware import Hardware, Probes

_QWEN = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, max_position=32768, family="qwen2")
QWEN = {
    "Qwen2.5-0.5B": Architecture(151936, 896, 4864, 24, 14, 2, 64, tied=True, **_QWEN),
    "Qwen2.5-1.5B": Architecture(151936, 1536, 8960, 28, 12, 2, 128, tied=True, **_QWEN),
    "Qwen2.5-7B": Architecture(152064, 3584, 18944, 28, 28, 4, 128, tied=False, **_QWEN)}
MODELS = QWEN | {"tiny": Architecture(64, 32, 48, 2, 4, 2, 16, qkv_bias=True, max_position=256)}
DEPTH, NODES = 7, 8
KERNELS = {"gpu": ("triton", "pallas_triton"), "tpu": ("pallas",), "cpu": ("machine",)}
# Scale of the random embeddings: the last token then decides the next one by far. With bfloat16
# layers deciding, plain and drafted streams would differ within a dozen tokens, at near ties.
SCALE = 64
NO_BUFFERS = "--xla_gpu_enable_command_buffer="  # and nothing behind it, as gpu_suite.sh sets it


def main() -> int:
    """Runs the cases that the command line names; returns the exit status."""
    platform = hardware.first_device().platform
    flags = standalone.parser(__doc__, f"gpu_rollouts_{platform}.json")
    flags.add_argument("--default", action="store_true", help="only the default implementation")
    flags.add_argument("--models", default=",".join(QWEN))
    flags.add_argument("--rows", default="1,16,64")
    flags.add_argument("--new_tokens", type=int, default=128)
    args = flags.parse_args()
    models, rows = args.models.split(","), [int(n) for n in args.rows.split(",")]
    new, names = args.new_tokens, ("xla", *KERNELS[platform])
    if args.tiny:
        models, rows, new, names = ["tiny"], [2], 12, ("xla",)
    if args.default:
        names = (None,)
    stem = "gpu_default" if args.default else "gpu_rollouts"
    more = ", default" * args.default + ", no command buffers" * (
        NO_BUFFERS in os.environ.get("XLA_FLAGS", "").split())
    plan = {f"{model}, {count} rows{more}": (model, count) for model in models for count in rows}

    def measure(name: str, results: standalone.Results, probes: Probes) -> dict[str, Any]:
        return case(*plan[name], new, probes, results.in_time, names)

    return standalone.run_cases(args, f"{stem}_{platform}.json", plan, measure, line)


def case(model: str, rows: int, new: int, probes: Probes, in_time: Callable[[], bool],
         names: tuple[str | None, ...]) -> dict[str, Any]:
    """Times one model at one batch size; returns the case of the result file.

    Rollouts use each of `names` of tree attention, of which None is the default. Plain decoding
    comes first, and the drafts replay its tokens. A setting that is refused is recorded with the
    reason.
    """
    arch = MODELS[model]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params, by_name, recorded = random_params(arch, dtype), {}, None
    settings = [(drafter, name) for name in names for drafter in ("off", "replay")]
    for drafter, name in settings:
        setting = f"{drafter}, {name or 'default'}"
        if not in_time() and by_name:
            by_name[setting] = {"left_out": "out of time"}
            continue
        try:
            one, result = run(arch, params, dtype, rows, new, drafter, name, recorded)
        except (Unsupported, ExceptionGroup, jax.errors.JaxRuntimeError, ValueError) as error:
            by_name[setting] = {
                "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            continue
        if recorded is None:
            recorded = result.sequences.tokens
        one["equal_streams"] = float(np.mean(np.all(result.sequences.tokens == recorded, 1)))
        by_name[setting] = one | bound(
            arch, dtype, np.full(rows, prompt_of(arch, new)), result, probes.measure(), one)
    return {"model": model, "rows": rows, "new_tokens": new, "dtype": str(jnp.dtype(dtype)),
            "settings": by_name}


def random_params(arch: Architecture, dtype: Any) -> Any:
    """Returns parameters made on the device, leaf by leaf."""
    leaves, tree = jax.tree.flatten(describe(arch), is_leaf=is_param)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def draw(key: Any, shape: tuple[int, ...], std: float) -> Any:
        drawn = jax.random.normal(key, shape, dtype) * std
        return drawn.astype(dtype) if std else jnp.ones(shape, dtype)

    make = jax.jit(draw, static_argnums=(1, 2))
    return tree.unflatten([make(key, p.shape, p.std * (SCALE if "vocab" in p.axes else 1))
                           for key, p in zip(keys, leaves, strict=True)])


def run(arch: Architecture, params: Any, dtype: Any, rows: int, new: int, drafter: str,
        implementation: str | None, recorded: np.ndarray | None) -> tuple[dict[str, Any], Result]:
    """Compiles, warms up and times one rollout; drafts replay `recorded`."""
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
    drafter_params = parts.bind(params, () if drafter == "off" else replay_params(0.0))
    began = time.perf_counter()
    engine.compile(params, drafter_params)
    compiled = time.perf_counter() - began
    batch = requests(arch, rows, prompt, new, None if drafter == "off" else recorded)
    fresh = engine.initial_speculation()
    _, speculation = engine.run(params, drafter_params, fresh, batch)
    counter = CompilationCounter()
    result, _ = engine.run(params, drafter_params, speculation, batch)
    seconds = sum(launch.seconds for launch in result.trace)
    counters = result.counters
    return {"compile_seconds": round(compiled, 1), "compilations": counter.take(),
            "seconds": result.seconds, "prefill_seconds": result.prefill_seconds,
            "tokens_per_second": int(result.sequences.length.sum()) / result.seconds,
            "rounds": counters["rounds"], "round_seconds": seconds / counters["rounds"],
            "accept_length": counters["committed"] / counters["row_rounds"],
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}, result


def prompt_of(arch: Architecture, new: int) -> int:
    """Returns the tokens of every prompt."""
    return min(64, arch.max_position - new)


def requests(arch: Architecture, rows: int, prompt: int, new: int, recorded: np.ndarray | None
             ) -> RolloutRequest:
    """Returns one random prompt per row at temperature 1; drafts replay `recorded` i32[rows, T]."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(rows)]
    index = np.arange(rows)
    keys = prng.row_keys(0, "generate", 0, index, index * 0, index * 0)
    return make_request(prompts, keys, 1, RolloutConfig(max_new_tokens=new),
                   None if recorded is None else recorded[:, None])


def bound(arch: Architecture, dtype: Any, prompt_lengths: np.ndarray, result: Result,
          probe: Hardware, one: dict[str, Any]) -> dict[str, float]:
    """Returns the least seconds of a round, and the ratio of its time to that."""
    counters = result.counters
    recorded = result.sequences
    live, context = roofline.context_by_round(prompt_lengths, recorded.commits, recorded.rounds)
    nodes = 1 + counters["drafted"] / counters["row_rounds"]
    least = roofline.rounds_bound(arch, probe, live, context, nodes, jnp.dtype(dtype).itemsize)
    each = least.seconds / counters["rounds"]
    return {"bound_round_seconds": each, "over_bound": one["round_seconds"] / each}


def line(name: str, result: dict[str, Any]) -> str:
    """Returns one line for the terminal."""
    shown = [f"{who} {one['tokens_per_second']:.0f} tokens/s ({one['over_bound']:.2f} of the bound)"
             if "seconds" in one else f"{who} {next(iter(one))}"
             for who, one in result["settings"].items()]
    return f"{name}: {'; '.join(shown)}"
