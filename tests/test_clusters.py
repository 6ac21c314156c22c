"""The engines of clusters/, each of which starts a lesson's own program: on machines of
the laboratory, where the engine can be had. SLURM has a file of its own.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import COURSE, THOROUGH, wait_until
from test_machines import needs_namespaces

from ddp_course import UsageError, lesson04, lesson14
from ddp_course.ranks.launch import launch
from ddp_course.ranks.machines.machines import PRETENDED, Machines
from ddp_course.ranks.machines.ssh import INSTALL, Ssh

CLUSTERS = COURSE / "clusters"
FLAGS = "--data digits --train-samples 256 --epochs 1"
slow = pytest.mark.skipif(not THOROUGH, reason="takes a minute: make thorough")


DEBIAN = "RUNLEVEL=1 apt-get install --no-install-recommends"


def needs(command, install):
    """Skip a test where a command is not there, and say how to install it."""
    missing = shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is None
    return pytest.mark.skipif(missing, reason=f"no {command} here: {install}")


def needs_module(module, package):
    """Skip a test where a Python package is not there."""
    missing = find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"no {module}: pip install {package}")


@pytest.fixture(scope="module")
def in_one_machine(tmp_path_factory):
    """The fingerprints of lesson 4 and lesson 14 on two ranks of one machine."""
    out = tmp_path_factory.mktemp("one")

    def run(lesson):
        with redirect_stdout(StringIO()):
            return lesson.main([*FLAGS.split(), "--out", str(out)])["params_sha256"]

    return {lesson: launch(run, lesson, nproc=2)[0] for lesson in (lesson04, lesson14)}


def sha_of(folder):
    return json.loads((folder / "result.json").read_text())["params_sha256"]


# ---- ssh and a hostfile ----

CONF = CLUSTERS / "ssh" / "sshd_config"
needs_sshd = needs("sshd", f"{DEBIAN} openssh-server")


@pytest.fixture
def ssh(monkeypatch):
    """Two machines that let a learner in, who stands in the course's folder."""
    monkeypatch.chdir(COURSE)
    with Machines(2, quiet=True) as machines, Ssh(machines, CONF) as ssh:
        yield ssh


@needs_namespaces
@needs_sshd
def test_the_learner_may_log_in_to_each_machine_by_key_and_nobody_else_may(ssh):
    for place in ("node0", "node1"):
        code, text = ssh.run(f"ssh {place} 'hostname; whoami; echo $HOME'")
        assert (code, text.split()) == (0, [place, "learner", str(ssh.folder)])
    (ssh.folder / ".ssh" / "id_ed25519").unlink()
    code, text = ssh.run("ssh node1 hostname")
    assert code == 255 and "Permission denied (publickey)" in text


@needs_namespaces
@needs_sshd
def test_a_machine_with_another_key_than_it_had_is_refused(ssh):
    known = ssh.folder / ".ssh" / "known_hosts"
    known.write_text(f"node* {(ssh.folder / '.ssh/authorized_keys').read_text()}")
    code, text = ssh.run("ssh node1 hostname")
    assert code == 255 and "Host key verification failed" in text


def sshd_runs(machines, machine):
    """Whether sshd is in a machine; a Z is a process that has ended."""
    listed = machines.run(machine, "ps ax -o stat,comm").text
    return re.search("^[^Z].* sshd", listed, re.MULTILINE)


@needs_namespaces
@needs_sshd
def test_of_ssh_nothing_is_left(ssh):
    own, mounts = Path.home() / ".ssh", Path("/proc/mounts").read_text()
    before = sorted(own.iterdir()) if own.exists() else None
    assert ssh.run("ssh node1 hostname").code == 0
    ssh.__exit__()
    assert not ssh.folder.exists()
    assert (sorted(own.iterdir()) if own.exists() else None) == before
    assert Path("/proc/mounts").read_text() == mounts
    for machine in range(2):
        assert wait_until(lambda: not sshd_runs(ssh.machines, machine))  # noqa: B023
        assert "learner" not in ssh.machines.run(machine, "cat /etc/passwd").text
    mark = str(ssh.folder)
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in str(p.info)]


@needs_namespaces
@needs_sshd
def test_a_machine_that_was_off_lets_the_learner_in_again(ssh):
    ssh.machines.power_off(1)
    ssh.machines.power_on(1)
    ssh.start_machine(1)
    assert ssh.run("ssh node1 hostname").text == "node1\n"


def test_ssh_needs_machines_of_their_own(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    with Machines(2, quiet=True) as machines:
        with pytest.raises(UsageError, match="ssh needs machines of their own"):
            Ssh(machines, CONF)


@needs_namespaces
def test_where_sshd_is_not_installed_it_says_how_to_install_it(monkeypatch):
    with Machines(1, quiet=True) as machines:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        with pytest.raises(UsageError, match=f"sshd is not installed: {INSTALL}"):
            Ssh(machines, CONF)


@needs_namespaces
@needs_sshd
@needs("mpirun", f"{DEBIAN} openmpi-bin")
def test_mpirun_starts_lesson_4_which_ends_as_on_one_machine(
    ssh, tmp_path, in_one_machine
):
    line = f"sh clusters/ssh/lesson04_mpirun.sh {FLAGS} --out {tmp_path}"
    code, text = ssh.run(line, timeout=600)
    assert code == 0, text
    assert "world_size          2" in text
    assert sha_of(tmp_path) == in_one_machine[lesson04]


@needs_namespaces
@needs_sshd
@needs("pdsh", f"{DEBIAN} pdsh")
@needs_module("deepspeed", "deepspeed")
def test_deepspeeds_launcher_starts_lesson_4_which_ends_as_on_one_machine(
    ssh, tmp_path, in_one_machine
):
    line = f"sh clusters/ssh/lesson04_deepspeed.sh {FLAGS} --out {tmp_path}"
    code, text = ssh.run(line, timeout=600)
    assert code == 0, text
    for node in ("node0", "node1"):  # DeepSpeed prints what it starts
        assert f"{node}: " in text and text.count("'--local_rank=0'") == 2
    assert "world_size          2" in text
    assert sha_of(tmp_path) == in_one_machine[lesson04]


# ---- Kubernetes ----

TRAINJOB = yaml.safe_load((CLUSTERS / "kubernetes" / "lesson14.yaml").read_text())
needs_kubeflow = needs_module("kubeflow_trainer_api", "kubeflow-trainer-api==2.3.0")


def as_kubeflow_reads(job):
    """What Kubeflow's models make of a TrainJob: they leave out what they do not know.

    Raises pydantic's ValidationError for a wrong type and for a missing field.
    """
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    return TrainerV1alpha1TrainJob.from_dict(job).to_dict()


def changed(path, value=None):
    """The TrainJob with another value in a place, or without it."""
    job = copy.deepcopy(TRAINJOB)
    *places, last = path.split(".")
    part = job
    for place in places:
        part = part[int(place) if place.isdecimal() else place]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return job


@needs_kubeflow
def test_the_trainjob_is_one_that_kubeflow_knows():
    assert as_kubeflow_reads(TRAINJOB) == TRAINJOB


PODS = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0"
POD = f"{PODS}.template.spec.template.spec"


@needs_kubeflow
@pytest.mark.parametrize(
    "path, value, told",
    [
        ("spec.trainer.numNodes", "two", "numNodes"),
        ("spec.trainer.command", "torchrun", "command"),
        ("spec.trainer.env.0.value", 1, "value"),
        ("spec.runtimeRef", None, "runtimeRef"),
        ("spec.runtimePatches.0.manager", None, "manager"),
        (f"{PODS}.name", None, "name"),
    ],
)
def test_kubeflows_models_find_a_wrong_type_and_a_missing_field(path, value, told):
    with pytest.raises(ValueError, match=rf"(?s)validation error.*\b{told}\b"):
        as_kubeflow_reads(changed(path, value))


@needs_kubeflow
@pytest.mark.parametrize(
    "path, value",
    [
        ("spec.trainer.nodes", 2),
        ("spec.restarts", 2),
        ("spec.trainer.resourcesPerNode.cpu", 2),
        (f"{POD}.containers.0.mounts", 2),
        (f"{POD}.restartPolicy", "Never"),
        # these the models fill with an empty text
        (f"{POD}.containers.0.volumeMounts.0.mountPath", None),
        (f"{POD}.volumes.0.persistentVolumeClaim.claimName", None),
    ],
)
def test_a_field_that_kubeflow_does_not_know_or_fills_itself_is_found(path, value):
    wrong = changed(path, value)
    assert as_kubeflow_reads(wrong) != wrong


def test_the_trainjob_keeps_what_kubeflows_webhooks_ask_for():
    """Read in pkg/runtime/framework/plugins/{torch/torch,jobset/jobset}.go, 2.3.0."""
    trainer, [patch] = TRAINJOB["spec"]["trainer"], TRAINJOB["spec"]["runtimePatches"]
    assert not any(env["name"].startswith("PET_") for env in trainer["env"])
    assert re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", patch["manager"])
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    assert job["name"] == container["name"] == "node" and "env" not in container


def environment_of(job, index):
    """The variables in the trainer's container of a pod: those of the TrainJob; those of
    Kubeflow 2.3.0, pkg/runtime/framework/plugins/torch/torch.go; and Kubernetes' own for
    an indexed Job.
    """
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    return {env["name"]: env["value"] for env in trainer["env"]} | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),  # of batch.kubernetes.io/job-completion-index
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",  # by the job's headless service
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(index),
    }


class Pods:
    """The pods of a TrainJob, on machines that share a folder as its volume."""

    def __init__(self, job, machines, volume):
        self.job, self.machines, self.volume = job, machines, volume
        for index in range(machines.count):
            self.schedule(index)

    def schedule(self, index):
        """Give a machine what its pod has: a host name, the others' names, the volume."""
        name, patch = (
            self.job["metadata"]["name"],
            self.job["spec"]["runtimePatches"][0],
        )
        [pods] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        [container] = pods["template"]["spec"]["template"]["spec"]["containers"]
        [mount] = container["volumeMounts"]
        pod = [f"{name}-node-0-{i}" for i in range(self.machines.count)]
        names = [f"10.77.0.{i + 1} {p}.{name} {p}" for i, p in enumerate(pod)]
        lines = [f"hostname {pod[index]}", *(f"echo {n} >> /etc/hosts" for n in names)]
        lines += [f"mount --bind {self.volume} {mount['mountPath']}"]
        code, text = self.machines.run(index, ["sh", "-ec", "\n".join(lines)])
        assert code == 0, text

    def start(self, index, *more):
        """Start the container's command, with nothing in its environment but its own."""
        trainer = self.job["spec"]["trainer"]
        image = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        image["TMPDIR"] = str(self.volume)  # a container's /tmp is gone with it
        if "PYTHONPATH" in os.environ:  # to this course, where it is not installed
            image["PYTHONPATH"] = os.environ["PYTHONPATH"]
        env = image | environment_of(self.job, index)
        command = ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
        command += [*trainer["command"], *trainer["args"], *FLAGS.split(), *more]
        return self.machines.follow(index, command)


@needs_namespaces
def test_the_trainjobs_command_ends_on_two_machines_as_on_one(tmp_path, in_one_machine):
    with Machines(2, quiet=True) as machines:
        pods = Pods(TRAINJOB, machines, tmp_path)
        containers = [pods.start(index) for index in range(2)]
        for container in containers:
            code, text = container.wait(timeout=600)
            assert code == 0, text
    assert "2 ranks, 128 samples per update" in containers[0].text
    assert sha_of(tmp_path / "lesson14") == in_one_machine[lesson14]


@slow
@needs_namespaces
def test_when_a_pod_is_lost_all_containers_start_again_and_go_on(tmp_path):
    """As Kubernetes does it: a new pod in place of the lost one, and the container of
    the other, which has failed, once more.
    """
    with Machines(2, "50mbit", quiet=True) as machines:
        pods = Pods(TRAINJOB, machines, tmp_path)
        first = [pods.start(index, "--save-every", "1") for index in range(2)]
        first[0].wait_for("update 1 of 2", timeout=600)
        machines.power_off(1)
        assert first[0].wait(timeout=600).code != 0
        machines.power_on(1)
        pods.schedule(1)
        again = [pods.start(index, "--save-every", "1") for index in range(2)]
        assert [container.wait(timeout=600).code for container in again] == [0, 0]
    assert "resuming after update 1" in again[0].text
    assert json.loads((tmp_path / "lesson14" / "result.json").read_text())


# ---- torchx ----

TORCHX = "pip install torchx-nightly==2026.10.26"


@needs_namespaces
@needs("torchx", TORCHX)
def test_torchx_starts_two_agents_of_torchrun_which_end_as_one(
    tmp_path, monkeypatch, in_one_machine
):
    """In a machine of the laboratory, where nobody else can connect."""
    monkeypatch.chdir(COURSE)
    line = f"sh clusters/torchx/lesson04.sh {FLAGS} --out {tmp_path}"
    with Machines(1, quiet=True) as machines:
        code, text = machines.run(0, line, {"LOG_DIR": str(tmp_path)}, timeout=600)
    assert code == 0 and "job finished: SUCCEEDED" in text, text
    assert "world_size          2" in text
    assert sha_of(tmp_path) == in_one_machine[lesson04]


@needs("torchx", TORCHX)
def test_torchx_shows_the_script_that_it_would_give_to_slurm():
    script = (CLUSTERS / "torchx" / "lesson04.sh").read_text()
    assert f"torchx-nightly=={version('torchx-nightly')}" in script
    script = re.sub("local_cwd --scheduler_args .*", "slurm --dryrun \\\\", script)
    done = subprocess.run(
        ["sh", "-c", script], cwd=COURSE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH hetjob" in done.stdout and "srun" in done.stdout


# ---- a cloud's machines, rented by SkyPilot ----

TASK = CLUSTERS / "cloud" / "lesson14.yaml"
READ_BY_SKYPILOT = """
import sys, yaml
import sky
task = yaml.safe_load(sys.stdin)
print(sky.Task.from_yaml_config(task, env_overrides=[("SHARED", "host:/path")]))
"""


def read_by_skypilot(task, home):
    """What SkyPilot makes of a task, in a process without a network."""
    with Machines(1, quiet=True) as machines:
        (home / "task").write_text(json.dumps(task))
        line = f"{sys.executable} -c '{READ_BY_SKYPILOT}' < {home}/task"
        env = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        return machines.run(0, ["sh", "-c", line], env, timeout=600)


@needs_namespaces
@needs_module("sky", "skypilot==0.14.1")
def test_skypilot_reads_the_clouds_file_and_refuses_a_wrong_one(tmp_path):
    task = yaml.safe_load(TASK.read_text())
    code, text = read_by_skypilot(task, tmp_path)
    assert code == 0 and "nodes: 2" in text and "{'L4': 1}" in text, text
    for wrong in ({"machines": 2}, {"num_nodes": "two"}):
        code, text = read_by_skypilot(task | wrong, tmp_path)
        assert code == 1 and "Invalid task YAML" in text, text


@needs_namespaces
def test_the_clouds_command_ends_on_two_machines_as_on_one(tmp_path, in_one_machine):
    task = yaml.safe_load(TASK.read_text())
    command = f"{task['run'].rstrip()} {FLAGS}"
    env = task["envs"] | {  # sky/backends/task_codegen.py, SkyPilot 0.14.1
        "SHARED": "node0:/path",
        "TMPDIR": str(tmp_path),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",  # not SkyPilot's: for the same sums as on one machine
    }
    with Machines(2, quiet=True) as machines:
        for machine in range(2):  # in place of the NFS of `setup`
            machines.run(machine, f"mount --bind {tmp_path} /mnt")
        jobs = [
            machines.follow(
                rank, ["bash", "-c", command], env | {"SKYPILOT_NODE_RANK": str(rank)}
            )
            for rank in range(2)
        ]
        for job in jobs:
            code, text = job.wait(timeout=600)
            assert code == 0, text
    assert sha_of(tmp_path / "lesson14") == in_one_machine[lesson14]
