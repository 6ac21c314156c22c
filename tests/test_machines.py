"""Several machines in one laptop, ranks on them, and what may happen to them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, wait_until

from ddp_course import UsageError
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, RankTimeout
from ddp_course.ranks.machines.machines import PRETENDED, Machines
from ddp_course.ranks.machines.namespaces import why_not

OBSTACLE = why_not()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
KINDS = [pytest.param("namespaces", marks=needs_namespaces), PRETENDED]
LESSON04 = "ddp_course/lesson04.py --data digits --epochs 1 --train-samples 256"


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Machines of both kinds."""
    monkeypatch.setenv("DDP_COURSE_MACHINES", request.param)
    return request.param


def place():
    """Where a rank is, and a sum over all of them."""
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
    with process_group() as (rank, _):
        total = torch.tensor([rank])
        dist.all_reduce(total)
        return [int(os.environ[name]) for name in names], total.item()


def seconds_of_all_reduce(elements, times=5):
    """The seconds of the quickest of several all-reduces of float32 elements."""
    taken = []
    with process_group():
        tensor = torch.ones(elements)
        for _ in range(times):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - begin)
    return min(taken)


def name_and_address():
    return socket.gethostname(), socket.gethostbyname(socket.gethostname())


# ---- who is where ----


def test_ranks_are_spread_over_machines_as_torchrun_spreads_them(kind):
    with Machines(2, quiet=True) as machines:
        found = machines.launch(place, nproc=2)
    places = [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2]]
    assert found == [(place, 6) for place in places]


@needs_namespaces
def test_each_machine_has_its_own_name_address_and_processes():
    with Machines(3, quiet=True) as machines:
        found = machines.launch(name_and_address, nproc=1)
        assert found == [(f"node{i}", f"10.77.0.{i + 1}") for i in range(3)]
        listed = [machines.run(i, "ls /proc").text.split() for i in range(3)]
        counted = [sum(name.isdecimal() for name in names) for names in listed]
        assert max(counted) <= 3  # process 1, ls, and at most one that has just ended
        assert machines.run(1, "getent hosts node2").text.split()[0] == "10.77.0.3"


def test_machines_say_what_they_are_and_pretended_ones_why(kind, capsys):
    with Machines(2, "100mbit", "1ms"):
        pass
    told = capsys.readouterr().out
    assert "100 Mbit/s, 1 ms" in told
    if kind == PRETENDED:
        assert "2 machines, pretended on loopback" in told
        assert f"(DDP_COURSE_MACHINES={PRETENDED})" in told
    else:
        assert told.startswith("2 machines in network namespaces")


FORBIDDEN = """
from ddp_course.ranks.machines.machines import Machines
with Machines(2) as machines:
    print(machines.launch(int, nproc=1))
"""


@needs_namespaces
def test_where_user_namespaces_are_forbidden_machines_are_pretended_and_say_so():
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces; exec "
    inside = ["unshare", "-Ur", "sh", "-c", f'{forbid} "$@"', "sh", sys.executable]
    done = subprocess.run([*inside, "-c", FORBIDDEN], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert "pretended on loopback" in first and "No space left on device" in first
    assert "the administrator can allow user namespaces" in first
    assert second == "[0, 0]"


@pytest.mark.parametrize("count", [0, 201, True, 1.0, "2"])
def test_a_wrong_number_of_machines_is_refused(count):
    with pytest.raises(UsageError, match=f"from 1 to 200, not {count!r}"):
        Machines(count)


@pytest.mark.parametrize(
    ("network", "text"),
    [
        ({"bandwidth": "fast"}, "'fast' is no such quantity: write it as 100mbit"),
        ({"bandwidth": "0mbit"}, "'0mbit'"),
        ({"bandwidth": 100}, "100 is no such"),
        ({"delay": "1min"}, "write it as 1ms .us, ms, s"),
        ({"delay": "-1ms"}, "'-1ms'"),
    ],
)
def test_a_wrong_network_is_refused(network, text):
    with pytest.raises(UsageError, match=text):
        Machines(2, **network)


# ---- the network ----


@needs_namespaces
def test_the_bandwidth_that_an_all_reduce_measures_is_the_links():
    elements = 250_000
    with Machines(2, "40mbit", quiet=True) as machines:
        before = machines.sent(0)
        seconds = max(machines.launch(seconds_of_all_reduce, elements, nproc=1))
        sent = machines.sent(0) - before
        # the ring: each machine sends 2 (n - 1) / n of the tensor, which is all of it
        assert 0.6 < elements * 4 * 8 / seconds / 40e6 < 1.1
        assert 1.0 < sent / (5 * elements * 4) < 1.15
        machines.limit(1, "10mbit")
        slow = max(machines.launch(seconds_of_all_reduce, elements, 2, nproc=1))
    assert slow > 2.5 * seconds


@pytest.mark.parametrize("bandwidth", [None, "1gbit"])
def test_an_all_reduce_waits_for_the_delay_of_each_round(kind, bandwidth):
    with Machines(2, bandwidth, "20ms", quiet=True) as machines:
        assert max(machines.launch(seconds_of_all_reduce, 1, nproc=1)) > 0.04


@needs_namespaces
def test_without_netem_packets_go_through_a_switch_of_the_course(monkeypatch):
    from ddp_course.ranks.machines.namespaces import Namespaces

    monkeypatch.setattr(Namespaces, "_has_netem", lambda self: False)
    with Machines(3, "100mbit", "2ms", quiet=True) as machines:
        assert machines.namespaces.switch.poll() is None
        assert [total for _, total in machines.launch(place, nproc=1)] == [3] * 3
        machines.power_off(1)
        machines.power_on(1)
        machines.unplug(2)
        machines.plug_in(2)
        assert [total for _, total in machines.launch(place, nproc=1)] == [3] * 3
        switch = machines.namespaces.switch
    assert switch.poll() is not None


# ---- what may happen to a machine ----


@needs_namespaces
def test_a_machine_without_its_cable_is_waited_for_and_is_back_with_it():
    with Machines(2, quiet=True) as machines:
        machines.unplug(1)
        with pytest.raises(RankTimeout):
            machines.launch(place, nproc=1, timeout=3)
        machines.plug_in(1)
        assert len(machines.launch(place, nproc=1)) == 2


@needs_namespaces
def test_a_machine_without_power_has_no_processes_and_can_be_started_again():
    with Machines(2, quiet=True) as machines:
        sleeper = machines.start(1, ["sleep", "1000"])
        machines.power_off(1)
        assert sleeper.wait(10) != 0
        for use in (machines.launch, lambda fn: machines.run(1, "true")):
            with pytest.raises(UsageError, match="^node1 is off$"):
                use(place)
        machines.power_on(1)
        with pytest.raises(UsageError, match="^node1 is on$"):
            machines.power_on(1)
        assert len(machines.launch(place, nproc=1)) == 2


def test_pretended_machines_cannot_be_unplugged_and_say_why(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    with Machines(2, quiet=True) as machines:
        for what in (machines.unplug, machines.power_off, machines.sent):
            with pytest.raises(UsageError, match=f"{what.__name__} needs machines of"):
                what(1)


@needs_namespaces
def test_spawned_ranks_cannot_enter_a_machine_and_that_is_said(monkeypatch):
    """They have a second thread as soon as they import torch, see setns(2)."""
    monkeypatch.setenv("DDP_COURSE_START_METHOD", "spawn")
    with Machines(1, quiet=True) as machines:
        with pytest.raises(UsageError, match="without DDP_COURSE_START_METHOD=spawn"):
            machines.launch(place)
        assert machines.run(0, "hostname").text == "node0\n"


# ---- without root ----

SMALL = """
import socket
from ddp_course.ranks.machines.machines import Machines
from ddp_course.ranks.machines.namespaces import Namespaces
Namespaces._has_netem = lambda self: False
with Machines(2, "1gbit", "1ms") as machines:
    machines.power_off(1)
    machines.power_on(1)
    machines.unplug(1)
    machines.plug_in(1)
    print(machines.launch(socket.gethostname, nproc=2))
    print(machines.run(1, "getent hosts node0").text)
"""


def as_somebody(folder):
    """The beginning of a command that runs Python as an ordinary user with an empty
    environment, a list of texts. Skips the test where that user cannot read Python.
    """
    become = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    packages = [path for path in sys.path if "site-packages" in path]
    become += ["env", "-i", f"HOME={folder}", f"TMPDIR={folder}", "PATH=/usr/bin:/bin"]
    become += [f"PYTHONPATH={os.pathsep.join([str(COURSE), *packages])}"]
    become += ["PYTHONDONTWRITEBYTECODE=1"]
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    for program in (sys.executable, system):
        tried = subprocess.run([*become, program, "-c", "import torch"], cwd="/")
        if tried.returncode == 0:
            return [*become, program]
    pytest.skip("an ordinary user cannot read this Python, and there is no other")


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="this user is an ordinary one already")
def test_an_ordinary_user_has_machines_too_also_with_a_delay():
    with tempfile.TemporaryDirectory() as home:  # pytest's own are closed to others
        os.chown(home, 12345, 12345)
        line = [*as_somebody(home), "-c", SMALL]
        done = subprocess.run(line, cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert [n for n in os.listdir(home) if not n.startswith("torchinductor_")] == []
    kind, names, found = done.stdout.split("\n")[:3]
    assert kind == "2 machines in network namespaces, 1000 Mbit/s, 1 ms"
    assert names == "['node0', 'node0', 'node1', 'node1']"
    assert found.split() == ["10.77.0.1", "node0"]


# ---- nothing is left ----

DIES = """
import os, sys, time
from ddp_course.ranks.machines.machines import Machines
machines = Machines(2, "100mbit", "1ms", quiet=True).__enter__()
command = ["sleep", sys.argv[1]]
started = [machines.start(machine, command).pid for machine in (0, 1)]
print("up", flush=True)
time.sleep(60)
"""


def running(argument):
    """The processes of this machine that have an argument."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and argument in (process.info["cmdline"] or []):
            found.append(process)
    return found


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_made_the_machines(how):
    mark = str(10**6 + os.getpid() * 10 + how)  # no other process has it
    interfaces, mounts = socket.if_nameindex(), open("/proc/mounts").read()
    line = [sys.executable, "-c", DIES, mark]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, **pipes) as maker:
        assert maker.stdout.readline() == b"up\n"
        assert len(running(mark)) >= 3
        maker.send_signal(how)
    deadline = time.monotonic() + 60
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(mark)
    assert socket.if_nameindex() == interfaces
    assert open("/proc/mounts").read() == mounts


@needs_namespaces
def test_a_machine_whose_first_process_does_not_answer_is_removed_all_the_same():
    with Machines(2, quiet=True) as machines:
        spaces = machines.namespaces
        first = [*spaces.machines, spaces.outer]
        for process in first:
            os.kill(process, signal.SIGSTOP)  # it will not see its pipe close
        openers = [*spaces.openers, spaces.outer_opener]
    assert all(opener.returncode is not None for opener in openers)
    assert wait_until(lambda: not any(map(psutil.pid_exists, first)))


@needs_namespaces
def test_a_block_that_fails_leaves_no_machine():
    with pytest.raises(RankError, match="ZeroDivisionError"):
        with Machines(2, "1gbit", "1ms", quiet=True) as machines:
            machines.launch(lambda: 1 / 0, nproc=1)
    assert machines.namespaces.outer_opener.poll() is not None
    assert not psutil.pid_exists(machines.namespaces.outer)


AGENTS = """
import sys
from ddp_course.ranks.machines.machines import Machines
with Machines(2, quiet=True) as machines:
    machines.torchrun(["-m", "timeit", "-n", "1", "-s", "import time", f"time.sleep({sys.argv[1]})"], nproc=1)
"""


def test_pretended_machines_end_with_their_maker(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    mark = str(10**6 + os.getpid())
    maker = subprocess.Popen([sys.executable, "-c", AGENTS, mark])
    waits = f"time.sleep({mark})"
    deadline = time.monotonic() + 60
    while len(running(waits)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(running(waits)) >= 4  # two agents, each with its rank
    maker.kill()
    maker.wait()
    while running(waits) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(waits)


# ---- programs ----


def sha_of(folder):
    return json.loads((folder / "result.json").read_text())["params_sha256"]


def test_two_machines_with_two_ranks_end_as_one_machine_with_four(kind, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    line = [
        sys.executable,
        "-m",
        "ddp_course.cli.command",
        "run",
        *LESSON04.split()[1:],
    ]
    line[4:4] = ["04", "--nproc", "4", "--out", str(one)]
    done = subprocess.run(line, cwd=COURSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Machines(2, quiet=True) as machines:
        ended = machines.torchrun(f"{LESSON04} --out {two}", nproc=2)
    assert [code for code, _ in ended] == [0, 0]
    assert "world_size          4" in ended[0].text and sha_of(one) == sha_of(two)


@needs_namespaces
def test_the_command_runs_a_program_on_machines_and_keeps_exit_code_2(tmp_path):
    run = [sys.executable, "-m", "ddp_course.cli.command", "run", "04"]
    flags = ["--machines", "2", "--data", "digits", "--epochs", "1"]
    flags += ["--out", str(tmp_path), "--train-samples", "64"]
    both = {"cwd": COURSE, "capture_output": True, "text": True}
    done = subprocess.run([*run, *flags, "--batch-size", "33"], **both)
    assert done.returncode == 2 and "use 32 or less" in done.stdout
    lines = re.findall(
        r"node\d \$ torchrun --nnodes 2 .* --node-rank (\d)", done.stdout
    )
    assert lines == ["0", "1"]
    done = subprocess.run([*run, *flags, "--bandwidth", "much"], **both)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "'much' is no such quantity" in done.stderr


@needs_namespaces
def test_what_a_followed_command_prints_can_be_waited_for(capsys):
    with Machines(2, quiet=True) as machines:
        followed = machines.follow(1, ["sh", "-c", "echo begin 7; sleep 1; echo end"])
        assert followed.wait_for(r"begin (\d)")[1] == "7"
        with pytest.raises(TimeoutError, match="node1 did not print 'never'"):
            followed.wait_for("never", timeout=0.1)
        assert followed.wait() == (0, "begin 7\nend\n")
        with pytest.raises(TimeoutError, match="'never' before it ended"):
            followed.wait_for("never", timeout=1000)
        waits = machines.follow(0, "sleep 1000")
        waits.end()
        assert waits.wait().code == -signal.SIGKILL
    assert "node1 | begin 7\nnode1 | end\n" in capsys.readouterr().out
