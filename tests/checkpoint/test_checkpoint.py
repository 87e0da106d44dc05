"""Checkpoints: what is saved comes back, and damage or a kill costs at most one of them."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import HANGS

from specrl_jax.checkpoint import checkpoints as checkpoint
from specrl_jax.checkpoint.checkpoints import (
    CheckpointError,
    Checkpoints,
    list_steps,
    read_meta,
    restore_part,
)
from specrl_jax.checkpoint.steps import PARTIAL, finish_saves
from specrl_jax.runtime.checksum import checksum
from specrl_jax.runtime.files import CHECKSUMS

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def tree(step):
    """Two entries with different values at every step: incompressible, so files hold them."""
    rng = np.random.default_rng(step)
    actor = {"layers": [{"w": jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)}],
             "head": jnp.asarray(rng.normal(size=(8,)), jnp.bfloat16)}
    return {"actor": actor, "optimizer": optax.adamw(1e-3).init(actor["layers"]),
            "history": {"next": np.int64(2**40 + step), "rows": np.arange(step, step + 5)},
            "nothing": None}


def abstract(arrays):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=DEVICE)
                        if isinstance(x, jax.Array) else x, arrays)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step), {"position": step})
    return directory


@pytest.fixture
def saved(original, tmp_path):
    """Checkpoints 1 and 2 of `tree`."""
    return shutil.copytree(original, tmp_path / "ck")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def resume(directory):
    """(what restore_latest gives, the loud lines)."""
    lines = []
    with Checkpoints(directory, keep=2, warn=lines.append) as checkpoints:
        return checkpoints.restore_latest(abstract(tree(0))), lines


def test_latest_comes_back_bit_for_bit(saved):
    (step, arrays, meta), lines = resume(saved)
    assert (step, meta, lines) == (2, {"position": 2}, [])
    assert_same(arrays, tree(2))
    assert isinstance(arrays["actor"]["head"], jax.Array)
    assert isinstance(arrays["history"]["rows"], np.ndarray)


@pytest.mark.parametrize("keep", [1, 3])
def test_old_ones_are_deleted(tmp_path, keep):
    with Checkpoints(tmp_path / "lr[1e-5] größe", keep=keep) as checkpoints:
        assert list_steps(checkpoints.directory) == []
        assert checkpoints.restore_latest(abstract(tree(0))) is None
        for step in (1, 2, 30, 40):
            checkpoints.save(step, {"a": np.arange(step)}, {})
    assert list_steps(checkpoints.directory) == [1, 2, 30, 40][-keep:]


def test_a_step_is_not_saved_twice_or_out_of_order(saved):
    with Checkpoints(saved, keep=2) as checkpoints:
        for step in (1, 2):
            with pytest.raises(CheckpointError, match=f"checkpoint {step} would not be the newest"):
                checkpoints.save(step, tree(step), {})


def truncate(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 1
    path.write_bytes(bytes(data))


KINDS = {"delete": lambda path: path.unlink(), "truncate": truncate, "flip": flip}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_to_any_file_falls_back_or_is_harmless(saved, tmp_path, kind):
    fell_back = set()
    for path in sorted(p for p in (saved / "2").rglob("*") if p.is_file()):
        copy = tmp_path / "copy"
        shutil.copytree(saved, copy)
        KINDS[kind](copy / path.relative_to(saved))
        (step, arrays, meta), lines = resume(copy)
        assert_same(arrays, tree(step))
        assert meta == {"position": step}
        if step == 1:
            fell_back.add(path.name)
            assert len(lines) == 1 and str(copy / "2") in lines[0]
            assert path.name == CHECKSUMS or path.name in lines[0]
        shutil.rmtree(copy)
    assert {"metadata", "_METADATA", "manifest.ocdbt", CHECKSUMS} <= fell_back


def test_a_damaged_step_is_kept_aside_and_can_be_saved_again(saved):
    for _ in range(2):
        flip(saved / "2" / "meta" / "metadata")
        with Checkpoints(saved, keep=2, warn=lambda text: None) as checkpoints:
            checkpoints.restore_latest(abstract(tree(0)))
            assert list_steps(checkpoints.directory) == [1]
            checkpoints.save(2, tree(2), {"position": 2})
        assert list_steps(saved) == [1, 2]
    assert sorted(p.name for p in saved.iterdir()) == ["1", "2", "2.damaged", "2.damaged-2"]
    assert resume(saved)[0][0] == 2


def test_with_all_damaged_a_run_starts_again_loudly(saved):
    for step in ("1", "2"):
        flip(saved / step / "meta" / "metadata")
    lines = []
    with Checkpoints(saved, keep=2, warn=lines.append) as checkpoints:
        assert checkpoints.restore_latest(abstract(tree(0))) is None
        assert list_steps(checkpoints.directory) == []
        checkpoints.save(1, tree(3), {"position": 3})
    assert len(lines) == 2
    assert lines[0].endswith("kept as 2.damaged; falling back to checkpoint 1")
    assert f"{saved / '1'} is damaged: meta/metadata has changed" in lines[1]
    assert "kept as 1.damaged; no checkpoint is left: restarting at step 0" in lines[1]
    assert sorted(p.name for p in saved.iterdir()) == ["1", "1.damaged", "2.damaged"]
    (step, arrays, meta), lines = resume(saved)
    assert (step, meta, lines) == (1, {"position": 3}, [])
    assert_same(arrays, tree(3))


@pytest.mark.parametrize("change, words", [
    (lambda t: t["actor"]["layers"].append({"w": t["actor"]["head"]}),
     r"actor/layers/1/w is absent in the checkpoint and bfloat16\[8\] in this run"),
    (lambda t: t["actor"].pop("head"), r"actor/head is bfloat16\[8\] .* absent in this run"),
    (lambda t: t["actor"].update(head=jax.ShapeDtypeStruct((8,), jnp.float32, sharding=DEVICE)),
     r"actor/head is bfloat16\[8\] in the checkpoint and float32\[8\] in this run"),
])
def test_other_leaves_are_refused_by_name_not_taken_for_damage(saved, change, words):
    wanted = abstract(tree(0))
    change(wanted)
    with Checkpoints(saved, keep=2) as checkpoints:
        with pytest.raises(CheckpointError, match=words):
            checkpoints.restore_latest(wanted)
    assert list_steps(saved) == [1, 2]


def test_a_part_needs_no_knowledge_of_the_rest(saved):
    plain = restore_part(saved, 1, "actor")
    assert isinstance(plain["head"], np.ndarray)
    assert_same(plain, jax.tree.map(np.asarray, tree(1)["actor"]))
    part = restore_part(saved, 2, "optimizer", abstract(tree(0)["optimizer"]))
    assert_same(part, tree(2)["optimizer"])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(part))
    assert read_meta(saved, 2) == {"position": 2}


def test_a_part_that_is_absent_differs_or_is_damaged_is_refused(saved):
    with pytest.raises(CheckpointError, match="7: no such checkpoint; complete ones: 1, 2$"):
        read_meta(saved, 7)
    with pytest.raises(CheckpointError, match="no arrays named 'critic'"):
        restore_part(saved, 2, "critic")
    with pytest.raises(CheckpointError, match="actor/head is bfloat16"):
        restore_part(saved, 2, "actor", {"head": jax.ShapeDtypeStruct((9,), jnp.bfloat16)})
    truncate(saved / "1" / "meta" / "metadata")
    with pytest.raises(CheckpointError, match="meta/metadata has .* bytes instead of"):
        read_meta(saved, 1)
    flip(max((saved / "2" / "state").rglob("*"), key=lambda p: p.stat().st_size * p.is_file()))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        restore_part(saved, 2, "actor")


def run_python(code, *args, wait=True):
    """A process running `code`, with this one's import path."""
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
                               env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    return (process, *process.communicate()) if wait else process


PLACES = {  # in the save of checkpoint 3: the file operation, and what is there before it
    "while it is written": ("meta/metadata", ["1", "2", "3" + PARTIAL]),
    "before its checksums": ("checksums.json.tmp", ["1", "2", "3" + PARTIAL]),
    "between them and the commit file": (
        f"3{PARTIAL}/commit_success.txt", ["1", "2", "3" + PARTIAL]),
    "between that and its name": (f"os.rename .*/3{PARTIAL} ", ["1", "2", "3" + PARTIAL]),
    "before an old one is removed": (f"os.rename .*/1 .*/1{PARTIAL}", ["1", "2", "3"]),
    "while an old one is removed": ("os.rmdir ", ["1" + PARTIAL, "2", "3"])}


def kill_in_save(folder, place, count=1):
    """Saves checkpoint 3 in a process that dies there; its status."""
    process, _, err = run_python("""
        import sys
        import numpy as np
        from kills import die_at
        from specrl_jax.checkpoint.checkpoints import Checkpoints

        with Checkpoints(sys.argv[1], keep=2) as checkpoints:
            die_at(sys.argv[2], int(sys.argv[3]))
            checkpoints.save(3, {"a": np.arange(1000)}, {})
    """, folder, place, count)
    assert err == ""
    return process.returncode


def assert_newest_is_good(folder):
    """What a kill left is removed, and the newest checkpoint comes back; another can be saved."""
    newest = list_steps(folder)[-1]
    wanted = tree(newest) if newest < 3 else {"a": np.arange(1000)}
    with Checkpoints(folder, keep=2, warn=pytest.fail) as checkpoints:
        assert all(name.isdecimal() for name in names(folder))
        step, arrays, _ = checkpoints.restore_latest(abstract(wanted))
        assert step == newest
        assert_same(arrays, wanted)
        checkpoints.save(4, tree(4), {})
    assert names(folder) == [str(newest), "4"]


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_save_leaves_the_last_complete_one(saved, place):
    operation, left = PLACES[place]
    assert kill_in_save(saved, operation) == 9
    assert names(saved) == left and list_steps(saved)[-1] == 3 - ("3" not in left)
    assert (saved / left[-1] / CHECKSUMS).exists() == (
        place not in ("while it is written", "before its checksums"))
    assert_newest_is_good(saved)


@pytest.mark.full
def test_a_save_killed_at_any_file_operation_leaves_a_good_one(original, tmp_path):
    for count in itertools.count(1):
        folder = shutil.copytree(original, tmp_path / str(count))
        status = kill_in_save(folder, str(folder), count)
        assert_newest_is_good(folder)
        if status == 0:
            break
    assert count > 20


class Gate:
    """Holds what is written of checkpoints until `opened`, at the latest at the end of its block;
    `reached` once it is held."""

    def __init__(self, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        write = checkpoint.write_checksums

        def gated(*args):
            self.reached.set()
            assert self.opened.wait(HANGS)
            write(*args)

        monkeypatch.setattr(checkpoint, "write_checksums", gated)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.opened.set()


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_step_donates_while_the_save_before_is_written(tmp_path, monkeypatch, memory):
    """The checkpoint holds the arrays as they were before the step, which reuses their memory."""
    place = DEVICE.with_memory_kind(memory)
    step = jax.jit(lambda a: a + 1, donate_argnums=0, out_shardings=place)
    step(jax.device_put(jnp.zeros(1 << 16), place))  # compiles
    array = jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), place)
    before = checksum(jax.device_put(array, DEVICE))
    with Checkpoints(tmp_path, keep=2) as checkpoints, Gate(monkeypatch) as gate:
        assert checkpoints.save(1, {"a": array, "b": np.arange(3)}, {}) == array.nbytes + 24
        address = array.unsafe_buffer_pointer()
        after = step(array)
        assert gate.reached.wait(HANGS) and list_steps(tmp_path) == []
        assert array.is_deleted() and after.unsafe_buffer_pointer() == address
        checkpoints.check()
    assert checksum(restore_part(tmp_path, 1, "a")) == before != checksum(
        jax.device_put(after, DEVICE))


def test_arrays_of_the_host_may_change_while_they_are_written(tmp_path, monkeypatch):
    rows, meta = np.arange(5), {"list": [1]}
    with Checkpoints(tmp_path, keep=2) as checkpoints, Gate(monkeypatch):
        checkpoints.save(1, {"rows": rows}, meta)
        rows[:] = 0
        meta["list"].append(2)
    np.testing.assert_array_equal(restore_part(tmp_path, 1, "rows"), np.arange(5))
    assert read_meta(tmp_path, 1) == {"list": [1]}


def test_one_save_is_in_flight_and_older_ones_stay_until_it_ends(saved, monkeypatch):
    order = []
    with Checkpoints(saved, keep=2) as checkpoints, Gate(monkeypatch) as gate:
        checkpoints.save(3, tree(3), {}, lambda: order.append(list_steps(saved)))
        assert gate.reached.wait(HANGS)
        next_one = threading.Thread(target=checkpoints.save, args=(4, tree(4), {}))
        next_one.start()
        ends = threading.Thread(target=finish_saves)  # as a signal does
        ends.start()
        next_one.join(0.2)
        assert next_one.is_alive() and ends.is_alive()
        assert names(saved) == ["1", "2", "3" + PARTIAL]
        gate.opened.set()
        next_one.join()
    ends.join()
    assert order == [[1, 2, 3]] and names(saved) == ["3", "4"]


@pytest.mark.parametrize("ends", ["check", "save", "finish", "exit"])
def test_a_save_that_fails_is_one_error_at_the_next_call(saved, monkeypatch, ends):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_checksums", fail)
    with pytest.raises(CheckpointError, match="3: the checkpoint could not be written .*No space "
                       r"left.*complete ones: 1, 2\. Free some space and resume$"):
        with Checkpoints(saved, keep=2, warn=pytest.fail) as checkpoints:
            checkpoints.save(3, tree(3), {})
            finish_saves()
            if ends == "save":
                checkpoints.save(4, tree(4), {})
            elif ends != "exit":
                getattr(checkpoints, ends)()
    assert names(saved) == ["1", "2"]


def test_another_error_waits_for_a_save_and_is_not_hidden_by_it(saved, monkeypatch):
    gate, lines = Gate(monkeypatch), []
    with pytest.raises(ZeroDivisionError):
        with Checkpoints(saved, keep=2, warn=lines.append) as checkpoints:
            checkpoints.save(3, tree(3), {})
            threading.Timer(0.1, gate.opened.set).start()
            raise ZeroDivisionError
    assert names(saved) == ["2", "3"] and lines == []
    monkeypatch.setattr(checkpoint, "write_checksums", lambda *args: open(saved / "none" / "x"))
    with pytest.raises(ZeroDivisionError):
        with Checkpoints(saved, keep=2, warn=lines.append) as checkpoints:
            checkpoints.save(4, tree(4), {})
            raise ZeroDivisionError
    assert names(saved) == ["2", "3"] and len(lines) == 1 and "could not be written" in lines[0]


def test_a_full_disk_is_one_clear_error(saved):
    process, out, err = run_python("""
        import resource, signal, sys, types
        import numpy as np
        from specrl_jax.checkpoint.checkpoints import CheckpointError, Checkpoints, list_steps

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with Checkpoints(sys.argv[1], keep=2) as checkpoints:
            try:
                many = np.random.default_rng(0).random((50, 10_000))
                checkpoints.save(3, {str(i): a for i, a in enumerate(many)}, {})
                checkpoints.finish()
            except CheckpointError as error:
                print(error, list_steps(checkpoints.directory))
        # As TensorStore may do, too, when another write of that save has failed:
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
    """, saved)
    assert process.returncode == 0, err
    assert out.count("\n") == 1 and f"{saved / '3'}: the checkpoint could not be written" in out
    assert "File too large" in out and "complete ones: 1, 2." in out and "[1, 2]" in out
    assert err == ""
    assert names(saved) == ["1", "2"]  # no half-written one takes room
    assert resume(saved)[0][0] == 2
    assert names(saved) == ["1", "2"]


def test_another_sharding_and_no_compilation(tmp_path):
    process, out, err = run_python("""
        import os, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from specrl_jax.checkpoint.checkpoints import Checkpoints, restore_part

        compiled = []
        mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        values = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
        specs = dict(a=P("data"), b=P(), c=P(None, "fsdp"), d=P("fsdp", "data"))
        arrays = {"p": {k: jax.device_put(values, NamedSharding(mesh, s))
                        for k, s in specs.items()}}
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: "backend_compile" in name and compiled.append(name))
        wanted = NamedSharding(mesh, P("data", "fsdp"))
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted),
                                arrays)
        with Checkpoints(sys.argv[1], keep=2) as checkpoints:
            checkpoints.save(1, arrays, {})
            _, restored, _ = checkpoints.restore_latest(abstract)
        restored["q"] = restore_part(sys.argv[1], 1, "p", abstract["p"])
        for leaf in jax.tree.leaves(restored):
            assert leaf.sharding == wanted
            np.testing.assert_array_equal(leaf, values)
        print(len(jax.tree.leaves(restored)), len(compiled))
    """, tmp_path)
    assert out.split() == ["8", "0"], err
