"""compile_for.py: targets, what a module shows, what a run is described as, and bad input."""

import concurrent.futures
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from helpers import micro_config, micro_trainer

from experiments import config_flags
from experiments.compile import (
    clock,
    compiling,
    findings,
    hlo,
    machine_code,
    programs,
    targets,
    worker,
)
from specrl_jax.config import Config, ConfigError, as_dict, load_config, override
from specrl_jax.model import invariant
from specrl_jax.runtime.compilation import Compiler, Program
from specrl_jax.runtime.hardware import CHIPS, GIB
from specrl_jax.sharding import make_mesh

TINY = load_config("tiny")


@pytest.mark.parametrize(("name", "installed", "names"), [
    *((name, True, "target = .*: give a TPU of v4.*such as v5e:2x2")
      for name in ("v9:2x2", "v6e:four", "h100:0", "")),
    ("v6e:4x4", False, r'pip install "jax\[tpu\]"'),
    ("h100", False, r'pip install "jax\[cuda13\]"')])
def test_bad_target_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, installed: bool,
                                names: str) -> None:
    if not installed:
        monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=names) as error:
        targets.check_packages(targets.parse(name))
    assert "\n" not in str(error.value)


MODULE = """\
HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, x={}

%fused (p: bf16[8,1024]) -> bf16[8,1024] {
  %p = bf16[8,1024]{1,0} parameter(0)
  ROOT %n = bf16[8,1024]{1,0} negate(%p)
}

%body (arg: (bf16[8,1024], s32[])) -> (bf16[8,1024], s32[]) {
  %arg = (bf16[8,1024]{1,0}, s32[]) parameter(0)
  %kv = bf16[8,1024]{1,0} get-tuple-element(%arg), index=0
  %copy.1 = bf16[8,1024]{0,1} copy(%kv)
  %fusion.1 = bf16[8,1024]{1,0} fusion(%copy.1), kind=kLoop, calls=%fused
  %loop_transpose_fusion.7 = bf16[8,1024]{1,0} fusion(%kv), kind=kLoop, calls=%fused
  %near = bf16[8,1024]{1,0:T(8,128)S(1)} copy(%kv)
  %sum = f32[64]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %t = (bf16[8,1024]{1,0}, s32[]) tuple(%fusion.1, %i)
}

%cond (arg: (bf16[8,1024], s32[])) -> pred[] {
  %arg.1 = (bf16[8,1024]{1,0}, s32[]) parameter(0)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%small (p: bf16[8,1024]) -> bf16[8,1024] {
  ROOT %q = bf16[8,1024]{1,0} negate(%p)
}

%large (p: bf16[8,1024]) -> bf16[8,1024] {
  %q1 = bf16[8,1024]{1,0} negate(%p)
  ROOT %q2 = bf16[8,1024]{1,0} negate(%q1)
}

ENTRY %main (a: bf16[8,1024]) -> bf16[8,1024] {
  %a = bf16[8,1024]{1,0} parameter(0)
  %loop = (bf16[8,1024]{1,0}, s32[]) while(%start), condition=%cond, body=%body
  %branch = bf16[8,1024]{1,0} conditional(%i, %a, %a), branch_computations={%small, %large}
  %copy_fusion = bf16[2,8,1024]{1,0} fusion(%loop), kind=kLoop, calls=%fused
  %loop_copy_fusion.1 = bf16[8,1024]{0,1} fusion(%loop), kind=kLoop, calls=%fused
  ROOT %out = f32[3]{0} copy(%z)
}
"""


def test_module_counts_a_body_once_and_the_largest_branch() -> None:
    module = hlo.parse(MODULE)
    # while + (2 copies, 2 fusions, all-reduce) + compare; conditional + 2; 2 fusions; copy
    assert hlo.operations(module) == 1 + 5 + 1 + 1 + 2 + 2 + 1
    assert module.aliased == 2 and module.entry == "main"
    assert hlo.collectives(module) == {"all-reduce": {"count": 1, "bytes": 256}}


def test_module_copies_of_carried_arrays_tell_loops_from_edges() -> None:
    """An array that a loop carries, or that was donated, counts; others, and VMEM, do not."""
    module = hlo.parse(MODULE)
    carried = hlo.large_copies(module, [], least=1)
    assert hlo.large_copies(module, [("bf16", 16 * 1024)], least=1) == [
        {"kind": "fusion", "bytes": 32768, "in_loop": False, "count": 1}, *carried]
    assert carried == [
        {"kind": "fusion", "bytes": 16384, "in_loop": False, "count": 1},
        {"kind": "copy", "bytes": 16384, "in_loop": True, "count": 1},
        {"kind": "fusion", "bytes": 16384, "in_loop": True, "count": 1}]
    assert hlo.large_copies(module, []) == []  # all are below 1 MiB


TICKS = """\
HloModule jit_f

%inner_body (arg: (f32[8], s32[])) -> (f32[8], s32[]) {
  %draw = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, metadata={op_name="f/draw/add"}, @7
}

%inner_cond (arg: (f32[8], s32[])) -> pred[] {
  %three = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}

%body (arg: (f32[8], s32[])) -> (f32[8], s32[]) {
  %dot = f32[8]{0} fusion(%x), kind=kOutput, calls=%f, metadata={op_name="f/dot_general"}, @100
  %nest = (f32[8]{0}, s32[]) while(%t), condition=%inner_cond, body=%inner_body
  %cache_append.3 = bf16[4,128]{1,0} custom-call(%x), frontend_attributes={kernel_metadata={
"steps":"10",
"trips":"5"
}}, "bytes_accessed":"819000"
  %sum = f32[1000]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%cond (arg: (f32[8], s32[])) -> pred[] {
  %bound = s32[] get-tuple-element(%arg), index=1
  ROOT %lt2 = pred[] compare(%i, %bound), direction=LT
}

%a (p: f32[8]) -> f32[8] {
  %small = f32[8]{0} negate(%p), @5
}

%b (p: f32[8]) -> f32[8] {
  %other = f32[8]{0} negate(%p)
}

%endless (arg: (f32[8], s32[])) -> pred[] {
  ROOT %go = pred[] compare(%i, %j), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %layers = s32[] constant(4)
  %same = s32[] copy(%layers)
  %start = (f32[8]{0}, s32[]) tuple(%x, %same)
  %loop = (f32[8]{0}, s32[]) while(%start), condition=%cond, body=%body
  %rounds = (f32[8]{0}, s32[]) while(%start), condition=%endless, body=%a
  %branch = f32[8]{0} conditional(%i, %x, %x), branch_computations={%a, %b}
}
"""


BUNDLES = """\
     0   :  { %s1 = smov 0 }
   0x1   :  { %s2 = smov 1 } /* Start region 1 */
   0x2 LB: > { %s3 = sadd.s32 1, %s1 }
   0x3   : > { %s4 = sadd.s32 1, %s3 }
{step}
   0x5 LB: >> { %s6 = sadd.s32 1, %s5 }
   0x6   : >> { %s7 = sadd.s32 1, %s6 }
   0x7 PF:  { %s8 = smov 0 }
"""


@pytest.mark.parametrize(("bundles", "cycles"), [(0, 1500), (20, 1500), (300, 3 + 10 * 312)])
def test_clock_multiplies_loops_and_names_parts(tmp_path: Path, bundles: int, cycles: int) -> None:
    """On v5e 819 GB/s of memory and 100 of the links, at 1.5 GHz; a kernel's machine code counts
    where it takes longer than its bytes."""
    module = hlo.parse(re.sub(r"@(\d+)", r'backend_config={"estimated_cycles":"\1"}', TICKS))
    text = BUNDLES.replace("{step}", "\n".join(["   0x4   : > { %s5 = smov 0 }"] * bundles))
    if bundles:
        (tmp_path / "17-cache_append.3-01-final_bundles.txt").write_text(text)
        (tmp_path / "17-cache_append.3-00-schedule-analysis_final_bundles.txt").write_text(text)
    ticks = clock.account(module, CHIPS["v5e"], machine_code.take(tmp_path))
    assert ticks is not None and not list(tmp_path.iterdir())
    assert ticks["parts"] == {
        "append": 4 * cycles, "products": 4 * 100, "collectives": 4 * 60, "draw": 4 * 3 * 7,
        "rest": 5 + 5}
    assert ticks["where"] == {
        "/loop x4": {"append": 4 * cycles, "products": 400, "collectives": 240},
        "/loop x4/loop x3": {"draw": 84}, "/loop x?": {"rest": 5}, "/branch 0": {"rest": 5},
        "/branch 1": {"rest": 0}, clock.OUTSIDE: {"rest": 0}}
    where = ticks["where"]
    assert clock.costliest(where) == ticks["parts"]  # branch 1 costs nothing
    more = {"/branch 1": {"draw": 9}, "/loop x4/branch 7": {"rest": 2}}
    assert clock.costliest(where | more) == ticks["parts"] | {"draw": 84 + 9, "rest": 5 + 2}
    compute = 4 * (3 + 10 * (2 + bundles + 5 * 2)) if bundles else None
    assert ticks["kernels"] == {
        "cache_append": {"compute": compute, "memory": 4 * 1500, "steps": 4 * 10}}
    assert ticks["cycles"] == sum(ticks["parts"].values()) and ticks["unestimated"] == 2
    assert ticks["milliseconds"] == pytest.approx(ticks["cycles"] / 1.5e6, abs=1e-4)
    assert clock.account(module, CHIPS["h100"], {}) is None


def test_module_of_a_compiled_program_has_its_loop() -> None:
    def f(x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, x: jnp.sort(x @ x), x)

    compiled = jax.jit(f, donate_argnums=0).lower(
        jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)).compile()
    module = hlo.parse(compiled.as_text())
    depths = {i.kind: depth for depth, i in hlo.running(module)}
    assert depths["while"] == 0 and depths["sort"] == 1
    assert module.aliased == 1 and hlo.operations(module) > 2


@pytest.mark.ci
@pytest.mark.parametrize("spec", [
    {}, {"spec.drafter": "eagle"},
    {"learner.lora_rank": 4, "rl.kl": 0.1, "model.dtype": "bfloat16"}])
def test_description_is_what_a_run_compiles(
        monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]) -> None:
    compiled: dict[str, str] = {}

    def add(self: Compiler, program: Program) -> concurrent.futures.Future[Any]:
        compiled[program.title] = program.lower().as_text()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(None)
        return future

    trainer, state = micro_trainer(override(micro_config(), spec))
    monkeypatch.setattr(Compiler, "add", add)
    trainer.sampler.engine.compile(state.policy.params, state.drafter.published.params,
                                   others=trainer.policy.add_programs)
    model = programs.Model(trainer.arch, tuple(trainer.tokenizer.stop_ids), trainer.tokenizer)
    run = programs.describe(trainer.config, trainer.mesh, model)
    described = {p.title: p.lower().as_text() for group in ("rollout", "policy")
                 for p in run.groups()[group]}
    assert described.keys() == compiled.keys() and len(described) > 5
    assert all(described[title] == compiled[title] for title in compiled)


def test_adapters_leave_one_copy_of_the_weights_to_the_learner() -> None:
    config = override(TINY, {"model.dtype": "bfloat16", "learner.lora_rank": 2, "rl.kl": 0.1})
    run = programs.describe(config, make_mesh(config.mesh))
    sizes = {name: programs.device_bytes(tree) for name, tree in run.resident.items()}
    assert sizes["learner"] == pytest.approx(3 * sizes["reference"], rel=1e-3)  # and two moments
    assert sizes["reference"] < 0.2 * sizes["base"]
    assert sizes["published"] == pytest.approx(sizes["base"], rel=0.5)
    by_name = {p.title: p for p in run.groups()["policy"]}
    assert {"merge", "compute_logprobs", "update"} <= by_name.keys()
    beside = programs.beside(by_name["update"], run.resident)
    assert beside == {name: sizes[name] for name in ("published", "cache", "reference")}


def asked(config: Config, **changes: Any) -> dict[str, Any]:
    return {"config": as_dict(config), "target": "v5e:2x2", "only": ["collect", "copy_prompt"],
            "skip": [], "part": [0, 1], "keep": "", "dump": "",
            **changes}


def events_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    told = io.StringIO()
    worker.compile_all(request, told)
    return [json.loads(line) for line in told.getvalue().splitlines()]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's devices are four of this machine's."""
    monkeypatch.setattr(targets, "devices", lambda target: jax.devices()[:4])
    monkeypatch.setattr(findings.hlo, "parse", lambda text: hlo.Module({"": []}, "", 0))


def test_worker_compiles_what_is_asked_for_once(here: None, tmp_path: Path) -> None:
    config = override(TINY, {"mesh.data": 4})
    first = events_of(asked(config, keep=str(tmp_path)))
    again = events_of(asked(config, keep=str(tmp_path)))
    done = [[e["done"] for e in told if "done" in e] for told in (first, again)]
    assert [one["program"] for one in done[0]] == ["copy_prompt", "collect"] == first[0]["programs"]
    assert [[one["kept"] for one in told] for told in done] == [[False] * 2, [True] * 2]
    assert [one["peak"] for one in done[0]] == [one["peak"] for one in done[1]]
    assert not any("known" in event for event in again)  # the compiler did not run
    assert all(findings.failures(one) == [] for one in done[0])


def test_program_with_static_arguments_is_compiled(here: None) -> None:
    config = override(TINY, {"mesh.data": 4, "spec.drafter": "eagle", "distill.when": "interval"})
    (done,) = [e["done"] for e in events_of(asked(config, only=["drafter rows"])) if "done" in e]
    assert done["program"] == "drafter rows" and done["donated"] == 0


def test_program_that_cannot_be_lowered_is_a_finding(
        here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> None:
        raise ValueError("no such layout\nand more")

    monkeypatch.setattr(findings, "find", find)
    told = events_of(asked(override(TINY, {"mesh.data": 4}), only=["collect"]))
    assert told[-1]["done"] == {"program": "collect", "error": "ValueError: no such layout"}


@pytest.mark.parametrize(("changes", "names"), [
    ({"mesh.data": 2}, "mesh = '2x1x1': all 4 devices must be used; set .*v5e:2x2 of 4"),
    ({"mesh.data": 8}, "mesh = '8x1x1': needs 8 devices, 4 are there"),
    ({"mesh.data": 4, "model.numerics": "invariant"}, "numerics.*invariant")])
def test_config_that_the_target_cannot_run_is_refused(
        here: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], names: str) -> None:
    monkeypatch.setattr(invariant, "IMPLEMENTATION", "triton")
    with pytest.raises(ConfigError, match=names):
        events_of(asked(override(TINY, changes)))


CRASH = """
import json, os, sys
request, out = json.loads(sys.stdin.readline()), os.fdopen(int(os.environ["SPECRL_EVENTS"]), "w")
say = lambda event: (out.write(json.dumps(event) + chr(10)), out.flush())
say({"programs": ["launch 4", "update"], "devices": 4, "resident": {}})
for title in ("launch 4", "update"):
    if title in request["skip"]:
        continue
    say({"begin": title})
    if title == "launch 4":
        print("F0 scatter.cc: Check failed: operands == 1", file=sys.stderr, flush=True)
        os.abort()
    say({"done": {"program": title, "kept": True}})
"""


def test_compiler_that_aborts_is_a_named_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMMAND", [sys.executable, "-c", CRASH])
    monkeypatch.setattr(targets, "check_packages", lambda target: None)
    actual = compiling.compile_for(TINY, "v5e:2x2")["programs"]
    assert [one["program"] for one in actual] == ["launch 4", "update"]
    line, = findings.failures(actual[0])
    assert line.startswith("launch 4: the compiler ended (SIGABRT)") and "Check failed" in line
    assert "error" not in actual[1]


FITS = {"program": "update", "kept": False, "peak": 2 * GIB, "resident": {"cache": 3 * GIB},
        "limit": 14 * GIB, "copies": []}


@pytest.mark.parametrize(("changes", "names"), [
    ({}, None),
    ({"peak": 12 * GIB}, "update: does not fit: 15.00 GiB of 14.00, 1.00 too much: 12.00 of its "
                         "own beside cache 3.00; lower learner.micro_batch"),
    ({"copies": [{"kind": "copy", "bytes": 2**28, "in_loop": True, "count": 2}]}, None),
    ({"copies": [{"kind": "copy", "bytes": 2**28, "in_loop": True, "count": 2}],
      "program": "launch 4"},
     "launch 4: 2 x copy of a carried or donated array's 256 MiB in a loop"),
    ({"error": findings.one_line(RuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory.\nUsed 26.13G of 15.75G hbm. Exceeded hbm capacity "
        "by 10.38G.\n\nTotal hbm usage"))},
     "update: does not fit: the compiler needs 26.13G of 15.75G, 10.38G too much; lower learner"),
])
def test_failure_is_a_line_that_names_program_amount_and_way_out(
        changes: dict[str, Any], names: str | None) -> None:
    lines = findings.failures(FITS | changes)
    assert len(lines) == (names is not None) and all(line.startswith(str(names)) for line in lines)


@pytest.mark.parametrize("given,config", [
    ("--config=qwen2_5_7b --target=v6e:4x4", "qwen2_5_7b:v6e_4x4"),
    ("--target=v6e:4x4 --config=qwen2_5_7b:dapo", "qwen2_5_7b:dapo,v6e_4x4"),
    ("--config=qwen2_5_7b:v5p:4x4x4 --target=v6e:4x4", "qwen2_5_7b:v5p:4x4x4"),
    ("--config=tiny --target=v6e:4x4", "tiny")])
def test_target_picks_from_the_table_of_a_preset(given: str, config: str) -> None:
    argv = targets.with_target(["compile_for.py", *given.split(), "--config.seed=1"])
    flag_values = flags.FlagValues()
    flags.DEFINE_string("target", None, "", flag_values=flag_values)
    config_flags.define(argv, flag_values)
    assert flag_values(argv) == ["compile_for.py"]
    assert config_flags.parsed(flag_values)[0] == load_config(config, seed=1)
