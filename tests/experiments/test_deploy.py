"""Manifests, images and scripts of deploy/, and their commands in two processes of this machine."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, SMALL, ends, script_environment
from pairs import free_port

from experiments import manifests
from experiments.compile import targets
from specrl_jax.config import load_config, override
from specrl_jax.config.load import preset_names, preset_targets
from specrl_jax.metrics.run_files import read_metrics

DEPLOY = ROOT / "deploy"
PLAIN = (*SMALL, "--config.spec.drafter=off")  # of which other tests have compiled the programs
PAIRS = [(preset, name.replace("_", ":", 1)) for preset in preset_names()
         for name in preset_targets(preset)]
# Fields of JobSet v1alpha2, Job and Pod that the manifest has; "!" marks those that the API
# requires. kubernetes-sigs/jobset 0.9: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
CONTAINER = {"name!": str, "image": str, "command": [str], "resources": {"limits": dict},
             "volumeMounts": [{"name!": str, "mountPath!": str}]}
POD = {"restartPolicy": str, "terminationGracePeriodSeconds": int, "hostNetwork": bool,
       "dnsPolicy": str, "nodeSelector": dict, "containers!": [CONTAINER],
       "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}}]}
POD_FAILURE = {"action!": str, "onPodConditions": [{"type!": str, "status": str}],
               "onExitCodes": {"operator!": str, "values!": [int]}}
JOB = {"completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
       "podFailurePolicy": {"rules!": [POD_FAILURE]}, "template!": {"spec": POD}}
JOBSET = {"apiVersion": str, "kind": str, "metadata": {"name": str, "annotations": dict}, "spec": {
    "failurePolicy": {"restartStrategy": str, "maxRestarts": int, "rules": [
        {"name!": str, "action!": str, "onJobFailureReasons": [str]}]},
    "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec": JOB}}]}}


def problems(value: Any, schema: Any, at: str = "") -> Iterator[str]:
    """Yields what a parsed manifest has against a schema."""
    if isinstance(schema, type):
        if type(value) is not schema:
            yield f"{at}: {value!r} is no {schema.__name__}"
    elif not isinstance(value, type(schema)):
        yield f"{at}: {value!r} has another type"
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            yield from problems(item, schema[0], f"{at}[{i}]")
    else:
        known = {name.removesuffix("!"): each for name, each in schema.items()}
        missing = {name[:-1] for name in schema if name.endswith("!")} - value.keys()
        yield from (f"{at}.{name}: missing" for name in missing)
        yield from (f"{at}.{name}: unknown" for name in value.keys() - known.keys())
        for name in value.keys() & known.keys():
            yield from problems(value[name], known[name], f"{at}.{name}")


def jobset(preset: str, target: str, *arguments: str, **values: Any) -> dict[str, Any]:
    """The parsed manifest of a preset with other values."""
    config = override(load_config(preset), values)
    return yaml.safe_load(manifests.jobset(
        config, targets.parse(target), arguments, "image:1", "disk"))


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("preset", "target"), PAIRS)
def test_manifest_of_a_preset_asks_for_the_devices_of_its_mesh(preset: str, target: str) -> None:
    chosen = f"{preset}:{target}"
    size, kind = load_config(chosen).mesh.size, targets.parse(target)
    if kind.platform == "gpu":
        command = shlex.split(manifests.sbatch(load_config(chosen), kind, ("--config=x",)))
        assert {"--nodes=1", f"--ntasks-per-node={size}", f"--gpus-per-node={size}"} < {*command}
        return
    manifest = jobset(chosen, target)
    assert list(problems(manifest, JOBSET)) == []
    job = manifest["spec"]["replicatedJobs"][0]
    chips = pod(manifest)["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["replicas"] * job["template"]["spec"]["completions"] * chips == size
    assert chips == min(size, 4)
    assert pod(manifest)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == kind.topology


def test_checks_notice_a_wrong_manifest() -> None:
    manifest = jobset("qwen2_5_7b:v6e_4x4", "v6e:4x4")
    pod(manifest)["containers"][0] |= {"comand": ["x"], "image": 3}
    del pod(manifest)["containers"][0]["name"]
    pod(manifest)["volumes"] = {}
    at = ".spec.replicatedJobs[0].template.spec.template.spec"
    assert sorted(problems(manifest, JOBSET)) == [
        f"{at}.containers[0].comand: unknown", f"{at}.containers[0].image: 3 is no str",
        f"{at}.containers[0].name: missing", f"{at}.volumes: {{}} has another type"]


def test_mesh_of_several_slices_or_nodes_asks_for_them() -> None:
    wide = {"mesh.data": 4, "rollout.batch_size": 64, "learner.micro_batch": 32}
    manifest = jobset("qwen2_5_7b:v6e_4x4", "v6e:4x4", **wide | {"mesh.fsdp": 4})
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 4
    config = override(load_config("qwen2_5_7b:h100_8"), {
        **wide, "mesh.fallback": ("1x4x2", "2x4x2")})
    assert " --nodes=1,2,4 " in manifests.sbatch(config, targets.parse("h100:8"), ())


def test_slice_of_one_host_runs_one_process_that_finds_itself() -> None:
    command = pod(jobset("tiny", "v5e:1x1"))["containers"][0]["command"]
    assert command[:3] == ["python", "experiments/train.py", "--distributed"]
    assert command[3:] == ["--coordinator=localhost:8482", "--processes=1", "--process=0"]


FITS = "--config=qwen2_5_7b --target=v6e:4x4 --image=i --workdir=/mnt/shared/r"
TINY = "--config=tiny --image=i --workdir=/mnt/shared/r --target="


@pytest.mark.parametrize(("arguments", "line"), [
    ("--config=qwen2_5_7b", "target = '': give a TPU of v4, "),
    (f"{TINY}v6e:3x4", "target = 'v6e:3x4': GKE has no such topology; give one of 1x1, 2x2, "),
    (f"{TINY}v5p:4x2x2", "target = 'v5p:4x2x2': GKE has no such topology; give one of 2x2x1, "),
    (f"{TINY}v6e:4x4", "mesh = '1x1x1': has 1 devices, and v6e:4x4 has 16: give a mesh of 16"),
    (f"{TINY}v6e:2x2 --config.mesh.data=8", "target = 'v6e:2x2': GKE joins no slices of one host"),
    (f"{TINY}v6e:2x4 --config.mesh.fsdp=8 --config.mesh.tensor=2",
     "mesh = '1x8x2': has 2 slices of v6e:2x4, which only `data` may span"),
    (f"{FITS} --config.mesh.fallback='1x2x4'", "mesh.fallback = '1x2x4': has 8 devices, and v6e"),
    (f"{FITS} --config.name=7b", "name = '7b': a JobSet's begins with a letter"),
    (FITS.replace("--image=i", ""), "--image = None: name the image of deploy/tpu.Dockerfile"),
    (FITS.replace("/mnt/shared/", ""), "--workdir = 'r': a pod's own files are lost with it"),
    (FITS.replace("v6e:4x4", "h100:8"), "--image = 'i': Slurm runs the checkout; drop it"),
    ("--config=qwen2_5_7b --target=h100:3", "mesh = '1x1x1': has 1 devices, and h100:3 has 3"),
])
def test_command_ends_bad_input_with_one_line(command: Callable[..., Any], arguments: str,
                                              line: str) -> None:
    done = command("deploy.py", *(part.replace("='1x2x4'", "=('1x2x4',)")
                                  for part in arguments.split()))
    assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
    assert (done.stdout, done.returncode) == ("", 2)


@pytest.mark.parametrize("script", [*DEPLOY.glob("*.sh"), *(ROOT / "experiments").glob("*.sh")],
                         ids=lambda path: path.name)
def test_shell_scripts_have_no_findings(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, script], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_made_of_files_and_extras_that_exist(path: Path) -> None:
    lines = [line.split(maxsplit=1) for line in path.read_text().splitlines()
             if line and not line.startswith("#")]
    assert [word for word, _ in lines if word not in (
        "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD")] == [] and lines[0][0] == "FROM"
    copied = {name for word, rest in lines if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied) and {"specrl_jax", "kernels",
                                                               "experiments"} < copied
    (constraints, extra), = re.findall(
        r'^RUN pip install --no-cache-dir -c (\S+) -e "\.\[(\w+)\]"$', path.read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert constraints in copied and extra in project["optional-dependencies"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= copied
    assert json.loads(lines[-1][1])[1] == "experiments/train.py"


def has_docker() -> bool:
    return shutil.which("docker") is not None and subprocess.run(
        ["docker", "info"], capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_builds_and_shows_the_help(path: Path) -> None:
    if not has_docker():
        pytest.skip("no docker that runs")
    image = f"specrl-test-{path.stem}"
    subprocess.run(["docker", "build", "-f", path, "-t", image, ROOT], check=True)
    done = subprocess.run(["docker", "run", "--rm", image], text=True, capture_output=True)
    assert "--config.mesh.fallback" in done.stdout, done.stderr


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment with these commands, in bash, before all others; $LOG is a file of theirs."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return script_environment() | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                                   "LOG": str(folder / "log")}


GCLOUD = """
printf '%q ' "$@" >>"$LOG"; echo >>"$LOG"
if [ "$4" = describe ]; then sed -n "$(grep -c describe "$LOG")p" "$0.states"; fi
"""


@pytest.mark.parametrize(("slices", "states", "status", "nodes"), [
    ("1", "WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE", 0, "--node-id=pod"),
    ("2", "PROVISIONING\nSUSPENDED", 2, "--node-count=2 --node-prefix=pod")])
def test_requested_slices_are_awaited(tmp_path: Path, slices: str, states: str, status: int,
                                      nodes: str) -> None:
    environment = stand_ins(tmp_path, gcloud=GCLOUD, sleep="") | {
        "TPU": "pod", "ZONE": "here", "SLICES": slices}
    (tmp_path / "gcloud.states").write_text(states)
    done = subprocess.run([DEPLOY / "tpu_pod.sh", "request", "--spot"], env=environment, text=True,
                          capture_output=True)
    first, *others = (tmp_path / "log").read_text().splitlines()
    assert first.strip() == f"compute tpus queued-resources create pod --zone=here {nodes} --spot"
    assert done.returncode == status and len(others) == states.count("\n") + 1
    assert ("error: pod is SUSPENDED: delete it" in done.stderr) == bool(status)


def test_run_on_a_pod_quotes_the_command_for_every_host(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, gcloud='printf "%s\\n" "$@" >"$LOG"') | {
        "TPU": "pod", "ZONE": "here"}
    subprocess.run([DEPLOY / "tpu_pod.sh", "run", "--config.reward.terms=('exact',)"], check=True,
                   env=environment)
    *_, node, worker, command = (tmp_path / "log").read_text().splitlines()
    assert (node, worker) == ("--node=all", "--worker=all")
    assert shlex.split(command.removeprefix("--command=")) == [
        "cd", "specrl_jax", "&&", ".venv/bin/python", "experiments/train.py", "--distributed",
        "--config.reward.terms=('exact',)"]


# Two tasks of one node, with what Slurm sets for each; their ids are in $LOG.
SRUN = """
while [[ $1 == --* ]]; do shift; done
for i in 0 1; do
  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & echo "$!" >>"$LOG"
done
status=0
wait -n || status=$?
wait -n || status=$?
exit "$status"
"""


@pytest.mark.ci
def test_slurm_script_saves_on_sigterm_and_requeues(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    environment = stand_ins(tmp_path, srun=SRUN, scontrol='echo "$@" >>"$LOG"') | {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": str(free_port()), "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    config = load_config("tiny", **{"mesh.data": 2})
    command = shlex.split(manifests.sbatch(config, targets.parse("h100:2"), (
        *PLAIN, "--config.mesh.data=2", "--config.steps=100000",
        "--config.checkpoint_every=100000", f"--workdir={run}")))
    started = subprocess.Popen(command[command.index("deploy/slurm.sh"):], cwd=ROOT, text=True,
                               env=environment, stderr=subprocess.PIPE)
    lines = run / "metrics.jsonl"
    while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
        assert started.poll() is None
        time.sleep(0.05)
    for process in log.read_text().split():
        os.kill(int(process), signal.SIGTERM)
    told, = ends([started])
    assert started.returncode == 130, told
    assert log.read_text().splitlines()[2:] == ["requeue 7"]
    assert f"checkpoint {len(read_metrics(run))} is good: run the same command again" in told


@pytest.mark.ci
def test_command_of_a_manifest_runs_on_two_hosts(tmp_path: Path) -> None:
    """With what GKE sets in the pods of a slice, but one device a host, to which the mesh falls
    back. JAX asks a server for MEGASCALE_* where they are not set."""
    arguments = (*PLAIN, "--config.steps=2", "--config.mesh.tensor=8",
                 "--config.mesh.fallback=('2x1x1',)", "--workdir=/mnt/shared/run")
    manifest = jobset("tiny", "v5e:2x4", *arguments, **{"mesh.tensor": 8})
    hosts = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    shared = {"TPU_WORKER_HOSTNAMES": ",".join(hosts * ["127.0.0.1"]), "JAX_FORCE_TPU_INIT": "1",
              "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "MEGASCALE_NUM_SLICES": "1",
              "MEGASCALE_SLICE_ID": "0", "JAX_COORDINATOR_PORT": str(free_port()),
              "JAX_PLATFORMS": "cpu"}
    _, *command = [part.replace("/mnt/shared", str(tmp_path))
                   for part in pod(manifest)["containers"][0]["command"]]
    started = [subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True,
                                env=script_environment() | shared | {"TPU_WORKER_ID": str(i)},
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
               for i in range(hosts)]
    told = ends(started)
    assert [process.returncode for process in started] == [0, 0], told
    assert "mesh: 2 devices are there, so 2x1x1 of mesh.fallback replaces 1x1x8" in told[0]
    assert len(read_metrics(tmp_path / "run")) == 2
