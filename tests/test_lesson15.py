"""Lesson 15: the clinic. Each patient is diagnosed from what the tools say of it."""

import ast
import multiprocessing
import os
import pickle
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH, descendants, wait_until
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.debug import start_debug_server, stop_debug_server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course import UsageError, lesson04, lesson05, lesson15
from ddp_course.checks.ex15 import examining, patients
from ddp_course.detectors.desync import DesyncDetector, difference, digest
from ddp_course.detectors.flight_record import (
    _distributed_c10d,
    flight_record,
    flight_recorded,
    write_flight_record,
)
from ddp_course.detectors.nan import NanGuard
from ddp_course.detectors.samples import SampleDetector
from ddp_course.detectors.samples import digest as digest_of_batch
from ddp_course.detectors.straggler import StragglerDetector, slowest
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch
from ddp_course.ranks.machines.job import Job
from ddp_course.ranks.machines.machines import Machines
from ddp_course.ranks.machines.namespaces import why_not

CLINIC = COURSE / "lessons" / "clinic"
PATIENTS = sorted(path.stem for path in CLINIC.glob("*.py"))
WAITS = "Timed out waiting 5000ms"
GONE = "Connection (closed|reset) by peer"
OBSTACLE = why_not()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux' own limits and files"
)


def run_patient(name, watch=None, folder=None, after=None):
    train = runpy.run_path(str(CLINIC / f"{name}.py"))["train"]
    if folder is None:
        return train(watch)
    with flight_recorded(folder, after):
        train(watch)


def all_tools(model, optimizer):
    NanGuard(model, optimizer)
    DesyncDetector(model, optimizer, every=4)
    StragglerDetector(model, optimizer, print)


def story(name, *arguments, nproc=2, env=None, timeout=40):
    """What launch says of a patient that fails."""
    with pytest.raises(RankError) as failed:
        launch(run_patient, name, *arguments, nproc=nproc, env=env, timeout=timeout)
    return str(failed.value)


def line_of(name, words):
    """The number of the patient's line with these words."""
    lines = (CLINIC / f"{name}.py").read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if words in line]
    return number


def analysed(name, tmp_path, after=None, nproc=2):
    """What torchfrtrace says of a patient's flight records."""
    story(name, None, tmp_path, after, nproc=nproc)
    assert len(list(tmp_path.glob("fr_*"))) == nproc
    return torchfrtrace(tmp_path)


def torchfrtrace(folder):
    program = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", program, "-p", "fr_", "--print_stack_trace"]
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---- the patients are short programs ----


def test_a_jobs_program_is_split_as_a_shell_does():
    job = Job(
        "'my folder/train.py' --out \"a b\" --epochs 1", flags="--rdzv-conf 'a=1'"
    )
    assert job.command[-5:] == ["my folder/train.py", "--out", "a b", "--epochs", "1"]
    assert job.command[-7:-5] == ["--rdzv-conf", "a=1"]
    path = Path("my folder/train.py")
    assert Job(path).command[-1] == str(path)


def test_there_are_fourteen_patients_at_least_and_each_is_a_page_of_torch_alone():
    assert len(PATIENTS) >= 14
    for name in PATIENTS:
        text = (CLINIC / f"{name}.py").read_text()
        tree = ast.parse(text)
        assert 10 <= len(text.splitlines()) <= 42, name
        sentence, empty, command = ast.get_docstring(tree).splitlines()
        assert sentence.endswith(".") and not empty
        ranks = 4 if name == "patient_31" else 2
        assert command == f"torchrun --nproc_per_node {ranks} lessons/clinic/{name}.py"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or node.names[0].name
                assert module.split(".")[0] in {*sys.stdlib_module_names, "torch"}


def test_each_patient_is_diagnosed_here():
    """By a test that has its name in its own text."""
    text = Path(__file__).read_text()
    assert [name for name in PATIENTS if not re.search(rf'"{name}(\.py)?"', text)] == []


# ---- stuck: the time limit, DETAIL, monitored_barrier, the flight recorder ----


@pytest.mark.skipif(
    not dist.is_nccl_available(), reason="this torch was built without nccl"
)
def test_the_flight_record_of_nccl_is_that_of_nccls_own_recorder(monkeypatch):
    """No GPU here: the recorder is real, and empty; only the backend's name is not."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace", None)
    record = flight_record(stacks=True)
    assert record["entries"] == [] and "pg_status" in record


def test_a_rank_conditional_collective_is_told_by_the_flight_recorder(tmp_path):
    said = analysed("rank_conditional", tmp_path)
    assert "Collective sequence number: 7 has errors" in said  # after six steps
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said
    assert "'all_reduce' does not match found collective type: 'barrier'" in said
    line = line_of("rank_conditional", "dist.all_reduce(loss)")
    assert f"rank_conditional.py:{line}" in said
    for path in tmp_path.glob("fr_*"):  # without the repair, it cannot read them
        record = pickle.loads(path.read_bytes())
        record["pg_config"].pop("0")
        path.write_bytes(pickle.dumps(record))
    with pytest.raises(AssertionError, match="KeyError"):
        torchfrtrace(tmp_path)


def test_a_healthy_collective_of_some_ranks_is_not_taken_for_a_fault(tmp_path):
    def two_of_three(folder):
        with process_group(timeout=20) as (rank, _):
            few = dist.new_group([0, 1])
            if rank < 2:
                dist.all_reduce(torch.ones(3), group=few)
            dist.barrier()
            write_flight_record(folder)

    launch(two_of_three, tmp_path, nproc=3)
    said = torchfrtrace(tmp_path)
    assert "missing ranks" not in said and "errors" not in said, said


def test_a_rank_that_hangs_before_it_joins_writes_its_stacks(tmp_path, capfd):
    for name in ("fr_1", "stack_1.txt", "fr_2", "stack_3.txt"):
        (tmp_path / name).write_text("of an earlier run, on four ranks")

    def joins_late(folder):
        with flight_recorded(folder, after=1):
            if os.environ["RANK"] == "0":
                sleeps_too_long()
            with process_group(timeout=20):
                pass

    def sleeps_too_long():
        time.sleep(3)

    launch(joins_late, tmp_path)
    assert "sleeps_too_long" in (tmp_path / "stack_0.txt").read_text()
    assert "of an earlier run" not in (tmp_path / "stack_1.txt").read_text()
    assert "Exception in thread" not in "".join(capfd.readouterr())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"stack_0.txt", "stack_1.txt"}, "nobody had joined a group"


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def test_a_swapped_order_times_out_and_detail_names_both_collectives(tmp_path):
    plain = story("swapped_order", None, tmp_path)
    assert re.search(WAITS, plain)
    assert "sequence number: 7" in torchfrtrace(tmp_path)  # step 4, its first of two
    said = story("swapped_order", env=DETAIL)
    assert "Detected mismatch between collectives on ranks" in said
    assert re.search("Op type: (ALLREDUCEvs BROADCAST|BROADCASTvs ALLREDUCE)", said)
    assert re.search(r"SequenceNumber=6", said)


def last_calls(folder, ranks=2):
    """The last collective of each rank: (its group's name, its number there)."""
    paths = [folder / f"fr_{rank}" for rank in range(ranks)]
    records = [pickle.loads(path.read_bytes()) for path in paths]
    last = [record["entries"][-1] for record in records]
    return [(call["process_group"][0], call["collective_seq_id"]) for call in last]


def test_of_two_groups_in_two_orders_each_rank_waits_in_another_one(tmp_path):
    assert "Timed out" in story("two_groups", None, tmp_path)
    assert last_calls(tmp_path) == [("0", 4), ("1", 4)]
    said = story("two_groups", env=DETAIL)
    assert "Ranks 1 failed to pass monitoredBarrier" in said
    assert "mismatch" not in said, "of the order in each group, which is right"


def with_the_loss_first_on_all_ranks():
    train = runpy.run_path(str(CLINIC / "two_groups.py"))["train"]
    train.__globals__["loss_first"] = lambda rank, step: step == 4
    train()


def test_one_order_on_all_ranks_cures_two_groups(capfd):
    launch(with_the_loss_first_on_all_ranks)
    assert capfd.readouterr().out.count("step 8") == 2


def test_on_a_mesh_the_record_shows_a_circle_of_four_ranks_that_wait(tmp_path):
    """Each waits in a group whose other rank waits in its other group."""
    said = analysed("patient_31", tmp_path, nproc=4)
    found = re.findall(r"group info: \d:(\w+)\n.*\nmissing ranks: \{(\d)\}", said)
    assert set(found) == {
        ("tensor", "1"),
        ("tensor", "2"),
        ("data", "3"),
        ("data", "0"),
    }
    assert last_calls(tmp_path, 4) == [("1", 4), ("4", 4), ("3", 4), ("2", 4)]


def in_one_order_on_all_ranks():
    train = runpy.run_path(str(CLINIC / "patient_31.py"))["train"]
    train.__globals__["data_is_ready_first"] = lambda rank, step: step == 4
    train()
    return dist.is_initialized()


def test_one_order_on_all_ranks_cures_a_mesh():
    assert launch(in_one_order_on_all_ranks, nproc=4) == [False] * 4


def test_a_whole_state_dict_on_rank_0_is_a_collective_in_disguise(tmp_path):
    said = story("patient_7", env=DETAIL)
    assert re.search("BARRIERvs ALLGATHER|ALLGATHER[A-Z_]*vs BARRIER", said)
    line = line_of("patient_7", "dist.barrier()")
    assert f"patient_7.py, line {line}" in said or f"line {line - 1}" in said


def test_a_thread_keeps_a_rank_that_has_ended_its_training():
    with Job(CLINIC / "patient_12.py") as job:
        ranks = job.ranks()
        job.wait_for("rank 0: done")
        job.wait_for("rank 1: done")
        assert wait_until(lambda: not ranks[1].is_running())
        time.sleep(1)
        assert ranks[0].is_running()
        ranks[0].send_signal(signal.SIGUSR1)
        job.wait_for("_shutdown", 20)
        line = line_of("patient_12", "lines.get(")
        assert f"line {line} in write_the_log" in job.text


def test_an_error_at_the_exit_is_ignored_and_the_metric_is_missing():
    with Job(CLINIC / "mean_at_exit.py") as job:
        code, said = job.wait(60)
    assert code is not None and "Exception ignored in atexit callback" in said
    assert re.search(GONE, said) and "the metric's mean" not in said


def test_other_shapes_abort_a_rank_and_detail_names_the_shapes():
    plain = story("other_shapes")
    assert "SIGABRT" in plain and "Is there a distributed collective mismatch" in plain
    said = story("other_shapes", env=DETAIL)
    assert re.search("Tensor shapes: (8vs 4|4vs 8)", said)
    assert re.search(r"SequenceNumber=4, OpType=ALLGATHER", said)


@pytest.mark.parametrize(
    "name, silent, detail",
    [
        ("half_a_broadcast", "[1.0, 1.0, 1.0, 1.0, 1.0, 2.0,", "Tensor shapes: (5vs 10|10vs 5)"),
        ("other_dtypes", "[1119092736, 1120403456]", "Tensor dtypes: (Floatvs Int|Intvs Float)"),
    ],
)  # fmt: skip
def test_what_gloo_corrupts_silently_is_found_by_detail(name, silent, detail, capfd):
    launch(run_patient, name)
    assert silent in capfd.readouterr().out, "the patient is healthy here"
    said = story(name, env=DETAIL)
    assert "Detected mismatch" in said and re.search(detail, said)


def test_equal_collectives_of_other_things_are_found_by_no_tool(capfd):
    """The lesson says so, and what to do instead."""
    for env in (None, DETAIL):
        launch(run_patient, "mixed_up", env=env)
        said = capfd.readouterr().out
        assert said.count("'loss': 1.25, 'accuracy': 1.25") == 2


def without_that_log(name):
    dist.Logger.set_construction_data_and_log = lambda *_: None
    run_patient(name)


def test_detail_finds_a_ddp_program_s_fault_with_the_lesson_s_line():
    plain = story("out_of_data", env=DETAIL)
    assert "SIGSEGV" in plain, "torch has repaired it: so may the lesson, Break it 7"
    with pytest.raises(RankError) as failed:
        launch(without_that_log, "out_of_data", env=DETAIL)
    said = str(failed.value)
    assert "Detected mismatch between collectives on ranks" in said
    lines = [line_of("out_of_data", words) for words in (".backward()", ".barrier()")]
    assert any(f"line {line}" in said for line in lines), "of the rank that is first"
    assert re.search("OpType=BARRIER", said) and re.search("OpType=ALLREDUCE", said)


def test_a_rank_without_data_is_told_by_the_flight_recorder(tmp_path):
    said = analysed("out_of_data", tmp_path)
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said
    line = line_of("out_of_data", ".backward()")
    assert "gloo:all_reduce" in said and f"out_of_data.py:{line}" in said


def test_of_three_ranks_the_analyser_may_call_the_majority_culprits(tmp_path):
    """The lesson says so: it compares all ranks with one, here the one that is wrong."""
    said = analysed("out_of_data", tmp_path, nproc=3)
    assert "sequence number: 12 has errors" in said
    barrier, all_reduce = (
        set(re.findall(rf"rank (\d)[^,]*, [^,]*found collective type: '{kind}'", said))
        for kind in ("barrier", "all_reduce")
    )
    assert (barrier, all_reduce) in ((set(), {"0", "1"}), ({"2"}, set()))


def test_slow_preparation_is_told_by_the_records_and_the_stacks(tmp_path):
    said = analysed("slow_preparation", tmp_path, after=2)
    assert "Not all ranks joining collective, sequence number: 1" in said
    assert "missing ranks: {0}" in said and "gloo:barrier" in said
    assert "in prepare_the_data" in (tmp_path / "stack_0.txt").read_text()


def a_rank_without_data_and_a_debug_server():
    """On rank 0 the server's page of stacks, and the addresses at which it listens."""
    with process_group(timeout=60) as (rank, _):
        start_debug_server(port=25999)
        dist.barrier()
        if rank == 1:
            waits_for_data()
        else:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            time.sleep(2)
            with urlopen("http://127.0.0.1:25999/stacks", timeout=20) as answer:
                page = answer.read().decode()
            listens = addresses_of_the_debug_server()
            work.wait()
            stop_debug_server()
            return page, listens
        dist.all_reduce(torch.ones(3))


def waits_for_data():
    time.sleep(6)


def addresses_of_the_debug_server():
    """Where a program of this machine listens at the server's port."""
    listens = subprocess.check_output(["ss", "-ltnH"], text=True)
    return re.findall(r"(\S+):25999 ", listens)


@needs_namespaces
def test_the_debug_server_shows_all_ranks_stacks_and_listens_everywhere():
    found = []
    with Machines(1, quiet=True) as machine:
        job = a_rank_without_data_and_a_debug_server
        running = threading.Thread(
            target=lambda: found.extend(machine.launch(job, timeout=600))
        )
        running.start()
        outside = []
        while running.is_alive():
            outside += addresses_of_the_debug_server()
            time.sleep(0.2)
    page, listens = found[0]
    of_rank_0, of_rank_1 = page.split("Rank 1:")
    assert "waits_for_data" in of_rank_1 and "waits_for_data" not in of_rank_0
    assert "in a_rank_without_data_and_a_debug_server" in of_rank_0
    # that is why the lesson starts it in a machine of the laboratory only
    assert set(listens) & {"*", "0.0.0.0", "[::]"}
    assert outside == [], "nor can this machine be reached from here"


def before_the_barrier(model=None):
    with process_group(timeout=30) as (rank, _):
        if rank == 1:
            time.sleep(4)
        from datetime import timedelta

        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)


def test_monitored_barrier_names_the_rank_that_does_not_come():
    with pytest.raises(RankError, match=r"Ranks 1 failed to pass monitoredBarrier"):
        launch(before_the_barrier, nproc=3)


def test_a_worker_that_waits_for_a_lost_lock_is_seen_by_py_spy(nothing_of_the_job):
    with Job(CLINIC / "loader_after_fork.py") as job:
        nothing_of_the_job(job)
        job.ranks()
        wait_until(lambda: len(job.processes()) > 3, 30)
        said = ""

        def worker_seen():
            nonlocal said
            said = job.py_spy(1, "--subprocesses")
            waits = re.search(r"_next_data|_get_data|get \(", said)
            return waits and "collate (loader_after_fork.py" in said

        if "Permission" in job.py_spy(0) or "not installed" in job.py_spy(0):
            pytest.skip("py-spy is not here, or may not look")
        assert wait_until(worker_seen, 20), said
        code, text = job.wait(40)
        assert code == 1 and re.search(WAITS, text)
        assert re.search(r"rank +: 0 [^\[]*Root|Root Cause[\s\S]*rank +: 0", text)


# ---- dead: torchrun's table, exit codes, error files ----


@pytest.fixture
def nothing_of_the_job():
    """Afterwards no process of these jobs is alive."""
    jobs = []
    yield jobs.append
    for job in jobs:
        assert job.processes() == []


@pytest.fixture
def treated(nothing_of_the_job):
    """Run a patient under torchrun; return the code and the text.

    `culprit` is the rank that fails first. Where both ranks ended between two of its
    looks, torchrun may name the other one: then the patient is run again.
    """

    def run(name, flags="", env=None, limit=60, culprit=None):
        for _ in range(5):
            with Job(CLINIC / f"{name}.py", flags=flags, env=env) as job:
                nothing_of_the_job(job)
                ended = job.wait(limit)
            # torchrun may have ended a rank that was writing its error file
            if "Failed to parse reply file" in ended.text:
                continue
            if culprit is None or root_cause(ended.text)[0] == culprit:
                break
        return ended

    return run


def root_cause(text):
    """The rank and the exit code that torchrun's table names, and its traceback."""
    table = text.split("Root Cause (first observed failure):")[1]
    rank, code = (
        re.search(rf"{name} +: (-?\d+)", table)[1] for name in ("rank", "exitcode")
    )
    return int(rank), int(code), table


def test_an_exception_is_the_root_cause_with_its_rank_and_line(treated):
    _, text = treated("exception", culprit=1)
    rank, code, table = root_cause(text)
    # an interpreter that ends with a process group may abort, in gloo's threads
    assert rank == 1 and code in (1, -6)
    assert "ValueError: could not convert string to float: 'n/a'" in table
    assert f"line {line_of('exception', 'dist.all_reduce(read')}" in table
    assert text.count("rank 1: step") == 2, "it was the third step"


def test_a_killed_rank_is_the_root_cause_with_its_signal(treated):
    for _ in range(5):
        _, text = treated("killed", culprit=1)
        rank, code, table = root_cause(text)
        assert (rank, code) == (1, -9) and "SIGKILL" in table
        assert text.count("rank 1: step") == 4
        complained = re.search(GONE, text)
        if complained:  # on a busy machine, torchrun often ends rank 0 before that
            break
    assert complained


@LINUX
def test_a_rank_out_of_memory_says_what_it_wanted():
    said = story("out_of_memory")
    assert said.startswith("rank 1 of 2 raised") and "can't allocate memory" in said
    assert f"line {line_of('out_of_memory', 'torch.ones(length')}" in said
    assert "you tried to allocate 1600000000 bytes" in said


@LINUX
def test_a_full_disk_is_told_by_the_line_that_saves_and_not_by_torchs_words():
    said = story("full_disk")
    assert said.startswith("rank 0 of 2 raised") and "unexpected pos" in said
    assert f"line {line_of('full_disk', 'torch.save(')}" in said


def test_a_port_in_use_is_named():
    said = story("port_in_use")
    assert said.startswith("rank 0 of 2 raised") and "EADDRINUSE" in said
    assert "port: 29517" in said


@LINUX
@pytest.mark.parametrize(
    "name, rank, words",
    [
        ("out_of_memory", 1, "can't allocate memory"),
        ("full_disk", 0, "unexpected pos"),
        ("port_in_use", 0, "EADDRINUSE"),
    ],
)
def test_a_real_job_says_it_in_the_log_of_that_rank(name, rank, words, treated):
    """Without the course's launch."""
    _, text = treated(name, "--tee 3", culprit=rank)
    failed, code, table = root_cause(text)
    assert failed == rank and code in (1, -6) and words in table
    log = text.partition("Root Cause")[0].splitlines()
    told = {line.partition("]")[0] for line in log if words in line and "[" == line[0]}
    assert told == {f"[default{rank}"}


def test_torchrun_keeps_a_log_and_an_error_file_for_each_rank(tmp_path, treated):
    treated("exception", f"--log-dir {tmp_path} --redirects 3 --tee 3")
    [error] = tmp_path.glob("*/attempt_0/1/error.json")
    assert "could not convert string to float" in error.read_text()
    logs = sorted(
        path.parent.name for path in tmp_path.glob("*/attempt_0/*/stderr.log")
    )
    assert logs == ["0", "1"]
    [stdout] = tmp_path.glob("*/attempt_0/1/stdout.log")
    assert "rank 1: step 2" in stdout.read_text()


# ---- stopped ----


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
def test_a_stopped_rank_has_that_state_and_the_others_wait_for_it(nothing_of_the_job):
    with Job(CLINIC / "stopped.py") as job:
        nothing_of_the_job(job)
        one = job.ranks()[1]
        assert wait_until(lambda: one.status() == psutil.STATUS_STOPPED, 60)
        stopped, waits = job.py_spy(1), job.py_spy(0)
        job.wait_for("Timed out waiting 5000ms")
        assert job.text.count("rank 1: step") == 4
        if not re.search("Permission|not installed", waits):
            assert re.search(r"all_reduce[\s\S]*stopped\.py", waits), waits
            assert "Process" in stopped and "Thread" not in stopped, stopped
        if THOROUGH:  # torchrun sends SIGTERM, waits for 30 seconds, and kills
            _, text = job.wait(90)
            assert root_cause(text)[0] == 0, "torchrun blames the rank that waited"


# ---- slow ----


def test_a_straggler_is_named_within_ten_steps(capfd):
    """On a machine that other programs keep busy, too: in one of three runs at least,
    and in none is another rank named.
    """
    first = []
    for _ in range(3):
        launch(run_patient, "straggler", all_tools, nproc=3, timeout=600)
        said = capfd.readouterr().out
        named = re.findall(r"straggler in step (\d+): rank (\d)", said)
        assert {rank for _, rank in named} == {"2"}
        first.append(named[0][0])
        if first[-1] == "10":
            return
    raise AssertionError(f"named first in the steps {first}")


def healthy(runs, steps=20, width=128):
    """Train several times; return the alarms of each run."""
    torch.set_num_threads(1)
    found = []
    with process_group(timeout=120) as (rank, _):
        for run in range(runs):
            torch.manual_seed(run)
            alarms = []
            layers = (
                nn.Linear(width, width),
                nn.Dropout(),
                nn.ReLU(),
                nn.Linear(width, 1),
            )
            model = DistributedDataParallel(nn.Sequential(*layers))
            optimizer = torch.optim.AdamW(model.parameters())
            NanGuard(model, optimizer, 120)
            DesyncDetector(model, optimizer, 5, 120)
            StragglerDetector(model, optimizer, alarms.append, timeout=120)
            torch.manual_seed(1000 * run + rank)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(32, width)).pow(2).mean().backward()
                optimizer.step()
            found.append(alarms)
    return found


def burn():
    while True:
        sum(range(10_000))


@pytest.fixture
def busy_machine():
    """Other programs have the CPUs half of the time."""
    context = multiprocessing.get_context("spawn")
    programs = [context.Process(target=burn, daemon=True) for _ in range(2)]
    for program in programs:
        program.start()
    yield
    for program in programs:
        program.kill()
        program.join()


@pytest.mark.parametrize("ranks, slow", [(2, 1), (4, 2), (16, 2), (16, 8), (3, 1)])
def test_a_slow_machine_is_named_too(ranks, slow):
    """Its ranks are equally slow, so none of them always waits least."""
    torch.manual_seed(0)
    for _ in range(300):
        own = 0.01 * (1 + 0.03 * torch.randn(ranks, 9).abs())
        own[:slow] *= 3
        waits = (own.max(0).values - own).median(1).values
        rows = [(times.tolist(), wait.item()) for times, wait in zip(own, waits)]
        line = slowest(rows, 1.5)
        assert int(re.match(r"rank (\d+) needs", line)[1]) < slow
    rows = [([0.01 + 0.001 * rank] * 9, 0.001) for rank in range(3)]
    assert slowest(rows, 1.5) is None


def test_a_step_without_gradients_is_no_fault():
    def skips():
        with process_group():
            said = []
            model = DistributedDataParallel(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            # steps of a millisecond: on a busy machine 1.5 times as long says nothing
            detector = StragglerDetector(
                model, optimizer, said.append, every=6, factor=1e6
            )
            for step in range(12):
                optimizer.zero_grad()
                if step % 3:
                    model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            return said, len(detector.times)

    assert launch(skips) == [([], 2), ([], 2)]  # 8 steps: one report of 6, and 2 more


@pytest.mark.parametrize("nproc", [2, 3])
def test_clean_runs_on_a_busy_machine_give_no_alarm(nproc, busy_machine):
    runs = 200 if THOROUGH else 12
    alarms = launch(healthy, runs, nproc=nproc, timeout=600)
    assert alarms == [[[]] * runs] * nproc


# ---- wrong ----


def test_nan_on_one_rank_stops_all_ranks_in_that_step():
    said = story("nan_on_one_rank", all_tools)
    assert "NaN or infinity in step 5, first in the output of 2 on rank 1" in said
    assert "failed in the same way" in said


@pytest.mark.parametrize(
    "name, place",
    [
        ("head_after_wrapping", "2.weight of rank 1"),
        ("cut_gradient", "scale of rank 1"),
        ("unequal_seeds", "weight of rank 1"),
    ],
)
def test_parameters_that_drift_are_named_with_the_first_step(name, place):
    said = story(name, all_tools)
    assert f"desync in step 1: {place} differs from that of rank 0" in said
    assert "failed in the same way" in said


def drifting(step_of_fault, rank_of_fault, fault, every=7):
    """Train; one rank goes wrong in one step. Return what the detector says."""
    with process_group(timeout=30) as (rank, _):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        detector = DesyncDetector(model, optimizer, every, 30)
        try:
            for step in range(1, 22):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).pow(2).mean().backward()
                if (step, rank) == (step_of_fault, rank_of_fault):
                    fault(model.module)
                if step == step_of_fault and fault is BROADCASTS:
                    wide = 6 if rank == rank_of_fault else 4
                    dist.broadcast(torch.zeros(wide), src=0)
                optimizer.step()
        except UsageError as error:
            return str(error), detector.step
        return None, detector.step


def lowest_bit(network):
    weight = network[1].weight.data.view(torch.int32)
    weight[0, 3] ^= 1


def swaps_two_numbers(network):
    weight = network[0].weight.data
    weight[0, 0], weight[3, 3] = weight[3, 3].item(), weight[0, 0].item()


def doubles_all(network):
    network[0].bias.data.fill_(2.0)


def BROADCASTS(network):  # noqa: N802, a marker: its collective is in drifting()
    pass


@pytest.mark.parametrize("nproc, rank", [(2, 1), (3, 2), (3, 1)])
@pytest.mark.parametrize(
    "fault, place",
    [
        (lowest_bit, r"1\.weight of rank {} differs"),
        (swaps_two_numbers, r"0\.weight of rank {} differs"),
        (BROADCASTS, r"of rank {} is broadcast \[\[6\]\] Float, and that of rank 0 is"),
    ],
)
def test_a_desync_is_named_by_all_ranks_with_its_step(fault, place, nproc, rank):
    for step in (1, 9, 14):
        said = launch(drifting, step, rank, fault, nproc=nproc)
        assert len(set(said)) == 1
        line, checked = said[0]
        assert re.search(rf"desync in step {step}: .*{place.format(rank)}", line)
        assert checked == -(-step // 7) * 7, "with the next check"


def test_a_fault_of_rank_0_is_found_too_though_another_is_named():
    line, _ = launch(drifting, 9, 0, lowest_bit)[0]
    assert "desync in step 9: 1.weight of rank 1 differs" in line


def difference_of(first, other):
    """What differs between two ranks, each (count, calls, hashes) in one group."""
    of_ranks = [
        (3, {"0": ([0, 1], count, calls)}, hashes)
        for count, calls, hashes in (first, other)
    ]
    return difference(of_ranks, [[0, 1], [0, 1]])


def test_a_difference_of_counts_calls_and_parameters_is_told():
    call = {1: "all_reduce [[4]] Float"}
    assert difference_of((1, call, {}), (1, call, {})) is None
    said = difference_of((1, call, {}), (0, {}, {}))
    assert said == "rank 1 has called 0 collectives, and rank 0 1"
    said = difference_of((0, {}, {"a": 1}), (0, {}, {"b": 1}))
    assert said == "rank 1 has other parameters than rank 0"
    # one rank's ring has lost its first call already
    both = {1: "all_reduce [[4]] Float", 2: "broadcast [[4]] Float"}
    later = {2: "broadcast [[4]] Float"}
    assert difference_of((2, both, {}), (2, later, {})) is None
    later = {2: "barrier []"}
    said = difference_of((2, both, {}), (2, later, {}))
    assert said.startswith("collective 2 of rank 1 is barrier []")


# ---- on a mesh: two ranks share each layer, and there are two such replicas ----


def on_a_mesh(attach, fault=None):
    """Train on 2 x 2 ranks with torch's tensor parallelism; what the tools say.

    attach: takes the model, its optimizer, the data and the tensor group, and a list.
    """
    with process_group(timeout=30) as (rank, _):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        said, samples = [], torch.Generator().manual_seed(rank // 2)
        detector = attach(model, optimizer, data, tensor, said)
        try:
            for step in range(1, 11):
                optimizer.zero_grad()
                inputs = torch.randn(4, 8, generator=samples)
                if hasattr(detector, "look"):
                    detector.look(inputs)
                loss = model(inputs).pow(2).sum()
                time.sleep(0.3 if fault == "slow" and rank in (2, 3) else 0)
                loss.backward()
                for value in model.parameters():
                    part = getattr(value.grad, "_local_tensor", value.grad)
                    dist.all_reduce(part, group=data)
                if fault and fault != "slow" and step == 6:
                    fault(model, rank, data)
                optimizer.step()
        except UsageError as error:
            said.append(str(error))
        return said


def cut_drifts(model, rank, data):
    if rank == 3:
        model[0].weight.data._local_tensor[0, 0] += 1


def norm_drifts(model, rank, data):
    """On both ranks that have this half of the layers: the replicas are equal."""
    if rank in (1, 3):
        model[2].weight.data[0] += 1


def another_collective(model, rank, data):
    wide = 6 if rank == 3 else 4
    dist.broadcast(torch.zeros(wide), group_src=0, group=data)


def all_of_them(model, optimizer, data, tensor, said):
    NanGuard(model, optimizer)
    DesyncDetector(model, optimizer, every=4, group=data)
    DesyncDetector(model[2], optimizer, every=4, group=tensor)
    StragglerDetector(model, optimizer, said.append, factor=50, group=data)
    return SampleDetector(every=4, group=data)


def without_groups(model, optimizer, data, tensor, said):
    DesyncDetector(model, optimizer, every=4)


def in_the_world(model, optimizer, data, tensor, said):
    return SampleDetector(every=4)


def nan_in_a_layer(model, rank, data):
    if rank == 2:
        model[1].bias.data._local_tensor[0] = float("nan")


def straggler_of_a_replica(model, optimizer, data, tensor, said):
    StragglerDetector(model, optimizer, said.append, group=data)


def said_on_a_mesh():
    """All of them, in ranks that have to start once only."""
    tried = [
        (all_of_them, None),
        (all_of_them, cut_drifts),
        (all_of_them, norm_drifts),
        (all_of_them, another_collective),
        (all_of_them, nan_in_a_layer),
        (without_groups, None),
        (in_the_world, None),
        (straggler_of_a_replica, "slow"),
    ]
    return [on_a_mesh(*each) for each in tried]


def test_on_a_mesh_each_detector_compares_the_ranks_that_should_be_alike():
    """Without a group, what tensor ranks have of their own is taken for a fault."""
    of_ranks = launch(said_on_a_mesh, nproc=4, timeout=600)
    healthy, cut, norm, call, nan, *without, slow = zip(*of_ranks)
    assert healthy == ([],) * 4
    same = lambda said: {line for [line] in said}
    assert same(cut) == {
        "desync in step 6: 0.weight of rank 3 differs from that of rank 1"
    }
    assert same(norm) == {
        "desync in step 6: weight of rank 1 differs from that of rank 0"
    }
    [line] = same(call)
    text = "desync in step 6: collective 7 of rank 3 in the group [1, 3] is broadcast"
    assert line.startswith(f"{text} [[6]] Float, and that of rank 1 is broadcast [[4]]")
    assert same(nan) == {
        "NaN or infinity in step 7, first in the output of 1 on rank 2, and in the "
        "output of 1 on rank 3"
    }
    assert "0.weight of rank 1 differs from that of rank 0" in same(without[0]).pop()
    assert "ranks 0, 1 have the same batch in 4 of 4 steps" in same(without[1]).pop()
    named = [re.search(r"rank (\d) needs", lines[0])[1] for lines in slow]
    assert named == ["2", "3", "2", "3"], "the slow replica's, in each data group"


def test_a_full_ring_is_no_desync():
    """Two of three ranks have a group of their own, which fills their rings earlier."""

    def train(every):
        with process_group(timeout=60) as (rank, _):
            pair = dist.new_group([0, 2])
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            DesyncDetector(model, optimizer, every)
            for _ in range(every):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                if rank != 1:
                    dist.all_reduce(torch.ones(1), group=pair)
                optimizer.step()
            return len(flight_record()["entries"])

    ring = {"TORCH_FR_BUFFER_SIZE": "60"}
    assert launch(train, 60, nproc=3, env=ring) == [60] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_digest_changes_with_each_single_bit(dtype):
    """Of any dtype: these are the bits of the floats of their size."""
    torch.manual_seed(0)
    tensor = torch.randint(0, 100, (7, 5), dtype=dtype)
    before, bits = digest(tensor).item(), 8 * tensor.element_size()
    assert digest(tensor.t().contiguous().t()).item() == before
    seen = set()
    for place in range(tensor.numel()):
        for bit in range(bits):
            changed = tensor.clone().flatten()
            changed.view(torch.uint8)[place * bits // 8 + bit // 8] ^= 1 << bit % 8
            seen.add(digest(changed.view(7, 5)).item())
    assert before not in seen and len(seen) == tensor.numel() * bits


def test_a_digest_changes_where_two_changes_might_cancel_out():
    ones = torch.ones(64)
    before = digest(ones)
    for changed in (2 * ones, -ones, 0 * ones, ones + 2**-23):
        assert digest(changed) != before
    torch.manual_seed(0)
    drawn = torch.randn(200)
    seen = {digest(drawn).item()}
    for one in range(0, 200, 7):
        for other in range(one + 1, 200, 5):
            signs, places = drawn.clone(), drawn.clone()
            signs[[one, other]] *= -1
            places[[one, other]] = places[[other, one]]
            seen |= {digest(signs).item(), digest(places).item()}
    pairs = sum(len(range(one + 1, 200, 5)) for one in range(0, 200, 7))
    assert len(seen) == 1 + 2 * pairs


def test_a_digest_takes_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        assert digest(tensor) != digest(torch.zeros_like(tensor))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.empty(0)) == 0


# ---- redundant ----

PATIENT_20_HAS = "ranks 0, 1 have the same batch in 4 of 4 steps"


def test_a_patient_whose_ranks_read_the_same_samples_is_told_by_its_batches(capfd):
    launch(run_patient, "patient_20")
    said = re.findall(r"rank (\d): (epoch 4, 8 steps, .*)", capfd.readouterr().out)
    assert len(said) == 2 and said[0][1] == said[1][1], "to the last digit"
    told = story("patient_20", lambda model, _: SampleDetector(model, every=4))
    assert PATIENT_20_HAS in told and "failed in the same way" in told


def reading(cases):
    """What the detector says of two epochs, for each of several mistakes."""
    with process_group(timeout=30) as (rank, _):
        return [read(case, rank) for case in cases]


def read(case, rank):
    labels = (torch.arange(96) % 12 == 0).long()
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    if case == "uneven":  # ranks 0 and 1 have four and eight batches
        inputs, labels = inputs[32 * rank : 32 + 64 * rank], labels[: 32 + 32 * rank]
    data = TensorDataset(inputs, labels)
    own = None if case in ("sampler", "seeds", "uneven") else DistributedSampler(data)
    torch.manual_seed(rank if case == "seeds" else 0)
    loader = DataLoader(data, 8, sampler=own, shuffle=own is None)
    norm = lesson05.SyncBatchNorm(8) if case == "sync" else nn.BatchNorm1d(8)
    network = nn.Sequential(norm, nn.Linear(8, 2))
    if case == "buffers":
        names = ["0.running_mean"]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(network, names)
    model = DistributedDataParallel(network)
    shares = [0.5, 0.5] if case == "balance" else [11 / 12, 1 / 12]
    every = None if case == "uneven" else 5
    detector = SampleDetector(model, 96, shares, every=every, timeout=30)
    try:
        for epoch in range(2):
            if own and case != "set_epoch":
                own.set_epoch(epoch)
            with Join([model]):
                for number, (batch, targets) in enumerate(loader):
                    detector.look({"inputs": batch, "labels": targets}, targets)
                    with model.no_sync() if number % 3 == 0 else nullcontext():
                        model(batch).pow(2).mean().backward()
            detector.end_epoch()
    except UsageError as error:
        return str(error)


READ = {
    "none": None,
    "sync": None,
    "uneven": None,
    "sampler": "ranks 0, 1 have the same batch in 5 of 5 steps",
    "seeds": "epoch 1, step 12: the ranks have read 192 samples, and there are 96",
    "set_epoch": "epoch 2, step 6: the batches are those of the epoch before",
    "balance": "91.7% of the samples have the label 0, and 50.0% were promised",
    "buffers": "step 4: buffers differ between the ranks: 0.running_mean",
}


def test_what_the_ranks_read_is_told_to_all_of_them_and_a_healthy_run_is_silent():
    """With no_sync() in some steps, and Join where a rank has more batches."""
    said = launch(reading, list(READ), timeout=600)
    assert said[0] == said[1], "all ranks learn it"
    for line, (case, wanted) in zip(said[0], READ.items()):
        assert line == wanted if wanted is None else wanted in line, (case, line)


def exchanges():
    """The collectives of the detector's group, where rank 0 has five steps more."""
    with process_group() as (rank, _):
        detector = SampleDetector(every=3, timeout=10)
        for step in range(2 if rank else 7):
            detector.look([step, rank])
        detector.end_epoch()
        entries = flight_record()["entries"]
        return [call for call in entries if call["process_group"][0] != "0"]


def test_ranks_that_run_out_of_samples_answer_the_others_small_messages():
    """As the docstring says: one per `every` steps, of 40 + 16 * every bytes."""
    for calls in launch(exchanges):
        assert [call["input_sizes"] for call in calls] == [[[5 + 2 * 3]]] * 3
        assert {call["profiling_name"] for call in calls} == {"gloo:all_gather"}
        assert {dtype for call in calls for dtype in call["input_dtypes"]} == {"Long"}


def test_a_batchs_digest_is_of_its_contents_their_places_and_their_shape():
    torch.manual_seed(0)
    batch = torch.randn(4, 6)
    seen = {digest_of_batch(batch).item()}
    for number in range(24):
        for bit in (0, 15, 31):
            changed = batch.clone()
            changed.view(torch.uint8).view(-1)[4 * number + bit // 8] ^= 1 << bit % 8
            seen.add(digest_of_batch(changed).item())
    orders = [batch.flip(0), batch.view(6, 4), batch[:, [1, 0, 2, 3, 4, 5]]]
    seen |= {digest_of_batch(each).item() for each in orders}
    assert len(seen) == 1 + 24 * 3 + 3
    assert digest_of_batch(batch.t().contiguous().t()).item() in seen
    both = {"x": batch, "y": [3, 1]}
    assert digest_of_batch(both) == digest_of_batch({"y": [3, 1], "x": batch.clone()})
    assert digest_of_batch([1, 2, 3]) == digest_of_batch(torch.tensor([1, 2, 3]))
    assert digest_of_batch([1, 2, 3]) != digest_of_batch([1, 3, 2])


def bad_number(rank_of_fault, step_of_fault, where, value):
    with process_group(timeout=30) as (rank, _):
        torch.manual_seed(0)
        layers = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
        network = nn.Sequential(*layers)
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = NanGuard(model, optimizer, 30)
        try:
            for step in range(1, 9):
                before = [value.clone() for value in network.parameters()]
                inputs = torch.randn(4, 6)
                bad = (rank, step) == (rank_of_fault, step_of_fault)
                if bad and where == "input":
                    inputs[1, 2] = value
                optimizer.zero_grad()
                outputs = model(inputs)
                loss = outputs.pow(2).mean()
                if bad and where == "loss":
                    loss = loss * value
                loss.backward()
                optimizer.step()
        except UsageError as error:
            untouched = all(map(torch.equal, before, network.parameters()))
            return str(error), guard.step, untouched


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "where, place", [("input", "output of 0"), ("loss", "gradient of 2.bias")]
)
@pytest.mark.parametrize("nproc, rank", [(2, 0), (3, 2)])
def test_the_guard_names_rank_and_layer_before_the_step(
    where, place, value, nproc, rank
):
    said = launch(bad_number, rank, 6, where, value, nproc=nproc)
    assert len(set(said)) == 1
    line, step, untouched = said[0]
    assert line == f"NaN or infinity in step 6, first in the {place} on rank {rank}"
    assert step == 6 and untouched, "the parameters are still those of step 5"


def test_masks_of_infinity_give_no_alarm_and_a_nan_in_a_tuple_does():
    class Mask(nn.Module):
        def forward(self, scores):
            later = torch.ones(4, 4).triu(1).bool()
            return scores.masked_fill(later, -torch.inf)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.mask, self.recurrent = (
                nn.Linear(4, 4), Mask(), nn.LSTM(4, 2),
            )  # fmt: skip

        def forward(self, inputs):
            return self.recurrent(self.mask(self.scores(inputs)).softmax(-1))[0]

    def train(bad):
        with process_group():
            model = DistributedDataParallel(Attention())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            NanGuard(model, optimizer)
            for step in range(3):
                if step == 2 and bad:
                    model.module.recurrent.bias_hh_l0.data[0] = torch.nan
                optimizer.zero_grad()
                model(torch.randn(4, 4)).sum().backward()
                optimizer.step()

    launch(train, False)
    with pytest.raises(RankError, match="step 3, first in the output of recurrent on"):
        launch(train, True)


def test_tools_look_at_the_whole_of_a_model_that_is_not_wrapped():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def detector():
        with process_group():
            model = Parts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            found = list(DesyncDetector(model, optimizer).model._modules)
            dist.barrier()  # a rank that leaves closes a group that others still make
            return found

    assert launch(detector) == [["module", "head"]] * 2


# ---- the program ----

FEW = ["--data", "digits", "--train-samples", "300", "--epochs", "2"]


def lesson(module, out, *flags):
    return module.main([*FEW, "--batch-size", "16", "--out", str(out), *flags])


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_watched_training_ends_with_the_bits_of_lesson_4(nproc, tmp_path):
    plain = launch(lesson, lesson04, tmp_path / "plain", nproc=nproc)
    watched = launch(lesson, lesson15, tmp_path / "watched", nproc=nproc)
    assert watched[0]["params_sha256"] == plain[0]["params_sha256"]


def test_lesson15_ends_with_one_line_if_a_rank_drifts(tmp_path):
    def main(out):
        network = lesson15.ConvNet

        class Drifts(network):
            def forward(self, images):
                outputs = super().forward(images)
                if self.training and dist.get_rank() == 1:
                    self.conv1.bias.data[0] += 1e-3
                return outputs

        lesson15.ConvNet = Drifts
        return lesson(lesson15, out, "--check-every", "2")

    with pytest.raises(
        RankError, match="UsageError: desync in step 1: conv1.bias of rank 1"
    ):
        launch(main, tmp_path)


def test_no_model_is_saved_whose_last_steps_differ(tmp_path):
    """The drift is in the steps after the last comparison."""

    def main(out):
        step = torch.optim.AdamW.step

        def drifts_at_the_end(self, closure=None):
            step(self, closure)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 19 and dist.get_rank() == 1:
                self.param_groups[0]["params"][0].data.view(torch.int32)[0] ^= 1

        torch.optim.AdamW.step = drifts_at_the_end
        return lesson(lesson15, out, "--check-every", "15")  # 20 steps in all

    with pytest.raises(RankError, match="UsageError: desync in step .* of rank 1"):
        launch(main, tmp_path)
    assert not (tmp_path / "model.pt").exists()


def test_the_tools_take_models_of_which_a_part_is_frozen():
    def train_a_head():
        with process_group():
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
            network[0].requires_grad_(False)
            model = DistributedDataParallel(network)
            optimizer = torch.optim.SGD(network[1].parameters(), lr=0.01)
            all_tools(model, optimizer)
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).pow(2).mean().backward()
                optimizer.step()

    launch(train_a_head)


def test_nothing_of_all_this_is_left():
    """The ranks and workers of launch; Job's own tests look for theirs."""
    patients = [
        process
        for process in descendants()
        if "clinic" in " ".join(process.cmdline()) and process.status() != "zombie"
    ]
    assert patients == []


# ---- the patients of the exercise ----


def attached(cause):
    """The tool for a cause, as a learner attaches it."""

    def watch(model, optimizer):
        if cause == "nan":
            NanGuard(model, optimizer)
        if cause == "drift":
            DesyncDetector(model, optimizer, every=1)
        if cause == "straggler":
            StragglerDetector(model, optimizer, print, every=1, factor=4)

    return watch


@pytest.mark.parametrize("cause", patients.CAUSES)
def test_each_cause_in_the_exercise_is_told_by_what_examine_prints(
    cause, capsys, monkeypatch
):
    rank, step = random.randrange(3), random.randint(3, 16)
    truth = patients.Truth(rank, step, cause)
    monkeypatch.setattr(examining, "truths", lambda name: {"A": truth})
    examining.examine("A", "somebody", attached(cause))
    said = capsys.readouterr().out
    if cause == "nan":
        assert (
            f"NaN or infinity in step {step}, first in the output of 0 on rank {rank}"
            in said
        )
    elif cause == "drift":  # it compares with rank 0, and names the first that differs
        assert f"desync in step {step}: 2.bias of rank {rank or 1} differs" in said
    elif cause == "straggler":
        named = re.findall(r"straggler in step (\d+): rank (\d)", said)
        assert named[0] == (str(step), str(rank))
    else:
        others = [other for other in range(3) if other != rank]
        for other in others:
            assert f"rank {other}: collective {step} is all_reduce" in said
        last = {
            "out of data": f"rank {rank}: collective {step} is barrier [], in after_the_training",
            "another collective": f"rank {rank}: collective {step} is barrier [], in before_the_step",
            "stuck": f"rank {rank}: collective {step - 1} is all_reduce",
            "killed": f"rank {rank} has left no flight record",
        }
        assert (
            last[cause] in said and f"rank {rank}: collective {step} is all" not in said
        )


def test_patients_of_two_names_differ_and_those_of_one_do_not():
    names = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Barbara Liskov"]
    drawn = [str(patients.truths(name)) for name in names]
    assert len(set(drawn)) == 4
    assert patients.truths(" ada  LOVELACE") == patients.truths("Ada Lovelace")
    for name in names:
        found = patients.truths(name).values()
        assert len({truth.cause for truth in found}) == len(patients.PATIENTS)


def in_the_folder(folder):
    with process_group(), flight_recorded(folder):
        return True


def test_a_flight_folder_with_odd_names_is_no_obstacle_and_a_folder_in_it_is_named(
    tmp_path,
):
    (tmp_path / "fr_²").touch()
    (tmp_path / "fr_0").write_bytes(b"of an earlier run")
    assert launch(in_the_folder, tmp_path, nproc=1) == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["fr_²"]
    (tmp_path / "stack_0.txt").mkdir()
    with pytest.raises(RankError, match="cannot write to .*stack_0.txt"):
        launch(in_the_folder, tmp_path, nproc=1)
