"""A real SLURM on machines of the laboratory, and lesson 9's program as its job."""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO

import mutants
import pytest
from conftest import COURSE, THOROUGH, wait_until
from mutants import ex14
from test_machines import needs_namespaces

from ddp_course import UsageError, lesson09
from ddp_course.checks.ex14 import pretended_slurm
from ddp_course.ranks.launch import launch
from ddp_course.ranks.machines.machines import PRETENDED, Machines
from ddp_course.ranks.machines.namespaces import environment
from ddp_course.ranks.machines.slurm import INSTALL, Slurm, installed

CONF = COURSE / "clusters" / "slurm" / "slurm.conf"
SCRIPT = COURSE / "clusters" / "slurm" / "lesson09.sbatch"
FLAGS = "--data digits --train-samples 384 --batch-size 16 --epochs 2 --save-every 3"
needs_slurm = pytest.mark.skipif(
    not installed(), reason=f"SLURM is not installed: {INSTALL}"
)
slow = pytest.mark.skipif(not THOROUGH, reason="takes a minute: make thorough")


@pytest.fixture
def cluster():
    """(machines, slurm): two machines whose network makes an update take a second."""
    with Machines(2, "50mbit", quiet=True) as machines, Slurm(machines, CONF) as slurm:
        yield machines, slurm


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of the run that nothing happens to, on as many ranks."""
    out = tmp_path_factory.mktemp("undisturbed")

    def run():
        with redirect_stdout(StringIO()):
            return lesson09.main([*FLAGS.split(), "--out", str(out)])

    return launch(run, nproc=2)[0]


def submitted(slurm, folder):
    """Submit lesson 9's job; wait for its first checkpoint; return its number."""
    job = slurm.submit(f"-o {folder}/log {SCRIPT} {FLAGS} --out {folder}/run")
    manifests = "run/checkpoints/*/manifest.json"
    wait_until(lambda: list(folder.glob(manifests)), 120)
    return job


def check_that_it_went_on(slurm, job, folder, undisturbed):
    assert slurm.wait(job) == "COMPLETED"
    log = (folder / "log").read_text()
    assert "attempt 0 on node[0-1]" in log and "attempt 1 on node[0-1]" in log
    assert "resuming from step-" in log
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["params_sha256"] == undisturbed["params_sha256"]


# ---- what it is, and where it cannot be ----


@needs_namespaces
@needs_slurm
def test_slurm_starts_a_task_on_each_machine_and_tells_it_its_place(cluster):
    _, slurm = cluster
    assert sorted(slurm.run("srun -Q -N2 hostname").split()) == ["node0", "node1"]
    names = "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES".split()
    told = slurm.run(f"srun -Q -N2 sh -c 'echo {' '.join('$' + n for n in names)}'")
    assert sorted(told.splitlines()) == ["0 0 0 2 2", "1 0 1 2 2"]
    listed = slurm.run("scontrol show hostnames 'node[0-1]'")
    assert listed.split() == ["node0", "node1"]


@needs_namespaces
@needs_slurm
def test_of_slurm_nothing_is_left(cluster):
    machines, slurm = cluster
    assert "slurmctld" in machines.run(0, "ps ax").text
    slurm.__exit__()
    assert not slurm.folder.exists()
    listed = machines.run(0, "ps ax -o stat=,comm=").text.splitlines()
    assert [line for line in listed if "slurm" in line and line[0] != "Z"] == []


@needs_namespaces
@needs_slurm
def test_a_command_that_fails_says_why(cluster):
    _, slurm = cluster
    with pytest.raises(UsageError, match="scontrol show job 77 .* Invalid job id"):
        slurm.run("scontrol show job 77")


def test_slurm_needs_machines_of_their_own(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    with Machines(2, quiet=True) as machines:
        with pytest.raises(UsageError, match="SLURM needs machines of their own"):
            Slurm(machines, CONF)


@needs_namespaces
def test_where_slurm_is_not_installed_it_says_how_to_install_it(monkeypatch):
    with Machines(1, quiet=True) as machines:
        monkeypatch.setattr(shutil, "which", lambda name, path: None)
        with pytest.raises(UsageError, match="SLURM is not installed: apt-get install"):
            Slurm(machines, CONF)


# ---- jobs that are interrupted end as undisturbed ones ----


@slow
@needs_namespaces
@needs_slurm
def test_an_urgent_job_takes_the_machines_and_the_first_one_goes_on(
    cluster, tmp_path, undisturbed
):
    _, slurm = cluster
    job = submitted(slurm, tmp_path)
    urgent = slurm.submit("-p urgent -N2 -o /dev/null --wrap 'srun hostname'")
    assert slurm.wait(urgent) == "COMPLETED"
    check_that_it_went_on(slurm, job, tmp_path, undisturbed)


@slow
@needs_namespaces
@needs_slurm
def test_a_job_whose_time_is_nearly_up_goes_back_into_the_queue_and_goes_on(
    cluster, tmp_path, undisturbed
):
    _, slurm = cluster
    job = submitted(slurm, tmp_path)
    slurm.run(f"scancel --signal=USR1 --batch {job}")  # as at the end of its time
    check_that_it_went_on(slurm, job, tmp_path, undisturbed)
    log = (tmp_path / "log").read_text()
    assert "time is nearly up" in log
    assert "User defined signal" not in log  # torchrun has outlived it
    # it goes on from where it was told, and not from a checkpoint before
    written = re.findall(r"told to leave: (step-\d+) is written", log)
    assert written and re.findall(r"resuming from (step-\d+)", log) == written


@slow
@needs_namespaces
@needs_slurm
def test_a_job_that_loses_a_machine_goes_on_when_it_is_back(
    cluster, tmp_path, undisturbed
):
    machines, slurm = cluster
    job = submitted(slurm, tmp_path)
    machines.power_off(1)
    slurm.wait_for(f"scontrol show job {job}", "JobState=PENDING", 120)
    machines.power_on(1)
    slurm.start_machine(1)
    check_that_it_went_on(slurm, job, tmp_path, undisturbed)


@slow
@needs_namespaces
@needs_slurm
def test_slurm_itself_signals_before_the_time_is_up(cluster, tmp_path):
    """A job of one minute, of which the signal comes up to a minute early."""
    _, slurm = cluster
    script = tmp_path / "job"
    script.write_text("#!/bin/sh\ntrap 'echo told; exit 0' USR1\nsleep 100 &\nwait\n")
    log = tmp_path / "log"
    job = slurm.submit(f"--time=1 --signal=B:USR1@30 -o {log} {script}")
    assert slurm.wait(job) == "COMPLETED" and log.read_text() == "told\n"


# ---- exercise 14's job files ----

MODULE = '#!/bin/sh\nshift 2\nexec torchrun "$@"\n'
TORCHRUN = """#!/bin/sh
printf '%s\\n' "$(hostname)" "$@" > "$OUT/$SLURM_RESTART_COUNT.$(hostname).$$"
echo "attempt $SLURM_RESTART_COUNT"
[ "$WAIT$SLURM_RESTART_COUNT" != yes ] || sleep 30
"""


@pytest.fixture
def large_cluster(tmp_path):
    """Three machines that say they have 64 cores, and a torchrun that only notes."""
    (tmp_path / "bin").mkdir()
    for name, text in {"torchrun": TORCHRUN, "python": MODULE}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    conf = tmp_path / "slurm.conf"
    text = CONF.read_text().replace("CPUs=1", "CPUs=64")
    conf.write_text(f"SlurmdParameters=config_overrides\n{text}")
    with Machines(3, quiet=True) as machines, Slurm(machines, conf) as slurm:
        path = f"{tmp_path}/bin:{environment()['PATH']}"
        slurm.environment |= {"PATH": path}
        yield slurm


ADDRESS = r"10\.\d+\.0\.\d+"
GPUS = r"--(gpus|gres)\S*"


def without_gpus(text):
    """A job file for machines that have none."""
    return re.sub(rf"(?m)^#SBATCH {GPUS}\n|{GPUS}", "", text)


def submitted_file(slurm, folder, text, wait=""):
    script, out = folder / "job", folder / "out"
    script.write_text(text)
    out.mkdir()
    return slurm.submit(f"--export=ALL,OUT={out},WAIT={wait} -o {out}/log {script}")


def noted(folder):
    """What each torchrun was started with, after the name of its machine."""
    found = [path.read_text().splitlines() for path in folder.glob("out/*node*")]
    addresses = [[re.sub(ADDRESS, "address", word) for word in each] for each in found]
    return sorted(addresses)


@slow
@needs_namespaces
@needs_slurm
def test_a_check_of_exercise_14_starts_the_tasks_that_slurm_starts(
    large_cluster, tmp_path
):
    answers = [each for each in mutants.CANDIDATES if each.question == "job_file"]
    same = {"corrects_the_tasks_at_srun", "a_task_per_gpu", "the_name_of_each"}
    for each in answers:
        if each.pattern is not None and each.name not in same:
            continue
        folder = tmp_path / each.name
        folder.mkdir()
        text = without_gpus(each.answers[0](3, 2, 4, 5))
        job = submitted_file(large_cluster, folder, text)
        assert large_cluster.wait(job) == "COMPLETED", each.name
        hosts = ["node0", "node1", "node2"]
        seen = pretended_slurm.Job(text, job, hosts, "node[0-2]", 2, "ends").run()
        ours = [[task["host"], *task["words"]] for task in seen["started"]]
        ours = [[re.sub(ADDRESS, "address", word) for word in task] for task in ours]
        assert noted(folder) == sorted(ours), each.name
        assert seen["code"] == 0, each.name


@slow
@needs_namespaces
@needs_slurm
def test_our_job_file_of_exercise_14_goes_back_into_slurms_queue(
    large_cluster, tmp_path
):
    text = without_gpus(ex14.a_file(3, 2, 4, 5))
    job = submitted_file(large_cluster, tmp_path, text, wait="yes")
    wait_until(lambda: len(noted(tmp_path)) == 3, 60)
    large_cluster.run(f"scancel --signal=USR1 --batch {job}")
    assert large_cluster.wait(job) == "COMPLETED"
    assert len(noted(tmp_path)) == 6  # three in each attempt
    assert "attempt 1" in (tmp_path / "out" / "log").read_text()
