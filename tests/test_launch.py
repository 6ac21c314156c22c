"""launch() and its promises: real ranks, their results, output and errors, and nothing
left behind.
"""

import io
import itertools
import json
import multiprocessing.forkserver
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH, descendants, python, wait_until
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError
from ddp_course.ranks import environment
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import (
    RankError,
    RankTimeout,
    launch,
    launch_untrusted,
    rank_environment,
    start_server,
)
from ddp_course.ranks.store import host_store


def rank():
    return int(os.environ["RANK"])


def sum_of_ones():
    with process_group():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()


def living_ranks():
    """Processes of this test that are neither the fork server nor multiprocessing's
    resource tracker.
    """
    return [child for child in descendants() if child.ppid() != os.getpid()]


# ---- what goes in and what comes out ----


@pytest.mark.parametrize("nproc", [1, 2, 3, 5])
def test_results_come_in_rank_order(nproc):
    assert launch(rank, nproc=nproc) == list(range(nproc))


def test_ranks_meet_and_reduce():
    assert launch(sum_of_ones, nproc=3) == [3.0, 3.0, 3.0]


def test_closures_classes_and_keyword_arguments_travel():
    factor = 10

    class Scaled:
        def __init__(self, by):
            self.by = by

        def __call__(self, number, plus=0):
            return factor * self.by * number + plus + rank()

    assert launch(Scaled(2), 3, plus=4) == [64, 65]


def test_tensors_and_modules_come_back():
    model = torch.nn.Linear(2, 1)
    [same, _] = launch(lambda: model)
    assert torch.equal(same.weight, model.weight)


def test_it_works_after_this_process_has_run_multithreaded_torch():
    torch.set_num_threads(2)
    torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64), torch.randn(8, 3, 3, 3))
    (torch.randn(800, 800) @ torch.randn(800, 800)).sum()
    assert launch(
        lambda: (
            torch.nn.functional.conv2d(torch.ones(1, 1, 9, 9), torch.ones(1, 1, 3, 3))
            .sum()
            .item()
        )
    ) == [441, 441]


def test_a_module_edited_on_disk_is_read_afresh(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_lesson.py"
    module.write_text("def answer():\n    return 'before'\n")
    import edited_lesson

    assert launch(edited_lesson.answer) == ["before", "before"]
    module.write_text("def answer():\n    return 'after, and longer'\n")
    assert launch(edited_lesson.answer) == ["after, and longer"] * 2


def test_a_rank_starts_no_server_of_its_own():
    """An exercise's first cell calls start_server, and runs on the ranks, too."""

    def starts():
        start_server("json")
        return len(psutil.Process().children())

    assert launch(starts) == [0, 0]


def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\nfrom ddp_course.ranks.launch import launch\nimport os\nprint(len(set(launch(os.getpid))))\n"
    )
    assert python(script).stdout == "once\n2\n"


def test_the_environment_is_torchruns(tmp_path):
    """The same variables with the same values, but for addresses and names of runs; and
    gloo's interface.
    """
    script = tmp_path / "environment.py"
    script.write_text(
        "import json, os; json.dump(dict(os.environ), open(f'environment{os.environ[\"RANK\"]}', 'w'))"
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    }
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", script]
    assert python(*command, env=clean, cwd=tmp_path).returncode == 0
    of_rank_1 = json.loads((tmp_path / "environment1").read_text())
    theirs = {
        name: value for name, value in of_rank_1.items() if clean.get(name) != value
    }
    ours = rank_environment(1, 2, port=1234)
    where_they_log = {
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    }  # of torchrun's own agent
    assert set(theirs) - where_they_log == set(ours) - {"GLOO_SOCKET_IFNAME"}
    for name in set(ours) - {
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "GLOO_SOCKET_IFNAME",
    }:
        assert ours[name] == theirs[name], name


def test_ranks_have_the_callers_environment_and_what_env_adds(monkeypatch):
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    monkeypatch.setenv("WORLD_SIZE", "77")
    names = ("FROM_THE_CALLER", "WORLD_SIZE", "ADDED")
    read = lambda: [os.environ.get(name) for name in names]
    assert launch(read, env={"ADDED": "too"}) == [["yes", "2", "too"]] * 2


def test_the_debug_level_reaches_ranks_that_were_forked_before_it_was_set():
    level = lambda: str(dist.get_debug_level())
    assert (
        launch(level, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        == ["DebugLevel.DETAIL"] * 2
    )
    assert launch(level) == ["DebugLevel.OFF"] * 2


def test_numpy_and_random_differ_between_ranks_and_runs():
    import random

    import numpy

    draw = lambda: (random.random(), numpy.random.rand())
    draws = launch(draw) + launch(draw)
    assert (
        len({first for first, _ in draws}) == len({second for _, second in draws}) == 4
    )


def test_workers_of_a_ranks_data_loader_know_data_sets_of_a_cell():
    """A worker that had to import them would not: a cell is no module."""

    class Squares:  # as in a notebook: it cannot be imported
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return index**2

    def sum_of_squares():
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)
        return sum(batch.sum().item() for batch in loader)

    assert launch(sum_of_squares) == [55, 55]


@pytest.mark.parametrize("nproc", [0, -1, 2.0, "2", True])
def test_a_wrong_number_of_ranks_is_refused(nproc):
    with pytest.raises(ValueError, match="nproc is a number of ranks"):
        launch(rank, nproc=nproc)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", None])
def test_a_wrong_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="above 0"):
        launch(rank, timeout=timeout)


@pytest.mark.parametrize("env", [{"X": 1}, {1: "x"}, {"X": None}, ["X"], "X=1"])
def test_an_environment_of_something_else_than_texts_is_refused(env):
    with pytest.raises(TypeError, match='^env .*texts, {"NAME": "value"}, but'):
        launch(rank, env=env)


def test_an_environment_that_no_process_can_have_is_told():
    with pytest.raises(RankError, match="ValueError: embedded null byte"):
        launch(rank, env={"X": "\0"})


def test_too_few_open_files_are_counted_before_anything_is_started():
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        with pytest.raises(UsageError, match="64 ranks need .* files .*, and 256 are"):
            launch(rank, nproc=64)
        assert not living_ranks()
        assert launch(rank) == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


CRASHES = """
import multiprocessing.forkserver, os, resource, time
from ddp_course.ranks.launch import launch

launch(os.getpid)
server = multiprocessing.forkserver._forkserver._forkserver_pid
resource.prlimit(server, resource.RLIMIT_NOFILE, (9, 4096))
try:
    launch(os.getpid, nproc=8)
except (EOFError, ConnectionError):  # by how far the launch had come
    print("the server has crashed")
deadline = time.monotonic() + 60
while True:
    try:
        print(len(set(launch(os.getpid))), "ranks")
        break
    except (EOFError, ConnectionError):  # while the server is still leaving
        assert time.monotonic() < deadline
        time.sleep(0.1)
print(multiprocessing.forkserver._forkserver._forkserver_pid != server)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_after_its_server_has_crashed_a_program_can_launch_again(tmp_path):
    """A server that crashes takes nothing of its caller's with it."""
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    done = python(script)
    assert done.stdout == "the server has crashed\n2 ranks\nTrue\n", done.stderr


def test_a_call_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match="a function and then its arguments"):
        launch(print("called here"))


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def locked():
        return lock.locked()

    with pytest.raises(
        TypeError,
        match="locked and its arguments cannot be sent.*each rank needs its own",
    ):
        launch(locked)


def test_what_cannot_be_sent_back_is_named():
    with pytest.raises(RankError, match="cannot be sent back"):
        launch(threading.Lock)


def test_spawn_does_the_same_and_says_so(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_START_METHOD", "spawn")
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        assert launch(sum_of_ones) == [2.0, 2.0]
    assert "Ranks start with 'spawn' here" in stderr.getvalue()


# ---- output ----


def test_output_is_whole_in_rank_order_and_marked():
    def talk():
        time.sleep(0.2 * (2 - rank()))  # the last rank speaks first
        print("one")
        os.write(1, b"two, past Python\n")
        sys.stdout.write("three, without an end")

    stdout = io.StringIO()
    with redirect_stdout(stdout):
        launch(talk, nproc=3)
    words = ["one", "two, past Python", "three, without an end"]
    assert stdout.getvalue().splitlines() == [
        f"[rank{r}]: {word}" for r in range(3) for word in words
    ]


def test_stderr_stays_stderr():
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        launch(lambda: print("aside", file=sys.stderr), nproc=1)
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "[rank0]: aside\n")


def test_a_long_run_is_shown_as_it_goes(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from ddp_course.ranks.launch import launch
        def work():
            print("early")
            time.sleep(4.5)
            print("late")
        launch(work, nproc=1)
        """)
    )
    with subprocess.Popen(
        [sys.executable, "-u", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "[rank0]: early\n"
        early = time.monotonic()
        assert process.stdout.readline() == "[rank0]: late\n"
        assert time.monotonic() - early > 0.5


# ---- errors ----


def fails_on(failing_rank, how):
    """A function for launch: all ranks meet, one of them comes to grief in some way,
    the others wait for it.
    """

    def work():
        with process_group(timeout=30):
            dist.barrier()
            if rank() == failing_rank:
                how()
            dist.all_reduce(torch.ones(1))

    return work


def divide_by_zero():
    return 1 // 0


@pytest.mark.parametrize("nproc, failing_rank", [(2, 0), (2, 1), (3, 2)])
def test_the_rank_that_raised_is_named_first_with_its_own_traceback(
    nproc, failing_rank
):
    for _ in range(
        5
    ):  # the others fail too, within microseconds, since their peer is gone
        with pytest.raises(RankError) as caught:
            launch(fails_on(failing_rank, divide_by_zero), nproc=nproc)
        text = str(caught.value)
        assert caught.value.rank == failing_rank
        assert text.startswith(f"rank {failing_rank} of {nproc} raised\n\n")
        assert (
            "in divide_by_zero: return 1 // 0\nZeroDivisionError: integer division or modulo by zero"
            in text
        )
        for insides in ("ranks/launch.py", "ranks/in_each_rank.py", "multiprocessing"):
            assert insides not in text


def says(*words):
    """A function for launch: each rank raises an error of its own, the last rank
    first.
    """

    def work():
        with process_group():
            dist.barrier()
            time.sleep(0.05 * (len(words) - rank()))
            raise RuntimeError(words[rank()])

    return work


@pytest.mark.parametrize(
    "words, first",
    [
        (["Timed out waiting 2000ms", "Connection closed by peer"], 0),
        (["Connection closed by peer", "Timed out waiting 2000ms"], 1),
        (["a reason", "Timed out waiting 2000ms"], 0),
        (["Broken pipe", "Connection closed by peer"], 1),
    ],
)
def test_reasons_come_before_timeouts_and_these_before_lost_connections(words, first):
    with pytest.raises(RankError) as caught:
        launch(says(*words))
    assert caught.value.rank == first
    assert (
        f"meanwhile rank {1 - first} failed: RuntimeError: {words[1 - first]}"
        in str(caught.value)
    )


def test_a_raising_rank_is_reported_at_once():  # benchmarks/ measures how soon
    launch(sum_of_ones)
    begin = time.monotonic()
    with pytest.raises(RankError):
        launch(fails_on(1, divide_by_zero))
    assert time.monotonic() - begin < 20  # the other rank would have waited 60 s


def test_code_of_a_cell_is_quoted_and_long_library_tracebacks_are_not(tmp_path):
    import linecache

    source = "def cell_function():\n    import torch\n    return torch.ones(2) @ torch.ones(3)\n"
    linecache.cache["<a cell>"] = (
        len(source),
        None,
        source.splitlines(True),
        "<a cell>",
    )
    names = {"__name__": "__main__"}
    exec(compile(source, "<a cell>", "exec"), names)
    with pytest.raises(
        RankError,
        match=r"cell, line 3, in cell_function: return torch.ones\(2\) @ torch.ones\(3\)\nRuntimeError",
    ):
        launch(names["cell_function"], nproc=1)


@pytest.mark.parametrize("code", [0, None])
def test_a_program_that_ends_with_sys_exit_0_has_ended_well(code):
    assert launch(sys.exit, code) == [None, None]
    with pytest.raises(RankError, match=r"left with sys.exit\((0|None)\)"):
        launch_untrusted(sys.exit, code)  # an answer that leaves has not returned


@pytest.mark.parametrize(
    "how, expected",
    [
        (
            lambda: sys.exit(3),
            r"rank 1 of 2 raised\n[\s\S]*SystemExit: the rank left with sys.exit\(3\)",
        ),
        (
            lambda: os._exit(3),
            "rank 1 of 2 left with exit code 3 before it had returned",
        ),
        (
            lambda: os._exit(0),
            "rank 1 of 2 left with exit code 0 before it had returned",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 1 of 2 was killed by SIGKILL",
        ),
        (os.abort, "rank 1 of 2 was killed by SIGABRT"),
    ],
)
def test_a_rank_that_leaves_or_dies_is_named_with_how(how, expected):
    begin = time.monotonic()
    with pytest.raises(RankError, match=expected):
        launch(fails_on(1, how))
    assert time.monotonic() - begin < 20  # and not the 60 s that the others would have
    assert not living_ranks()


@pytest.mark.parametrize(
    "forged",
    [
        "{",
        "[]",
        "7",
        '{"time": "soon", "message": "", "frames": []}',
        '{"message": "x"}',
        "\\xff",
    ],
)
def test_a_report_that_no_rank_of_ours_writes_is_a_rank_that_died(forged):
    def forge():
        folder = os.path.dirname(os.readlink("/proc/self/fd/1"))
        with open(f"{folder}/{os.environ['RANK']}.failure", "wb") as file:
            file.write(forged.encode().replace(b"\\xff", b"\xff"))
        os._exit(3)

    with pytest.raises(RankError, match="rank 0 of 1 left with exit code 3"):
        launch(forge, nproc=1)


def test_the_last_words_of_a_killed_rank_are_told_once():
    def complain():
        os.write(2, b"terminate called after throwing an instance of something\n")
        os.abort()

    stderr = io.StringIO()
    with (
        redirect_stderr(stderr),
        pytest.raises(RankError, match="last words:\n\n    terminate called after"),
    ):
        launch(fails_on(1, complain))
    assert "terminate called" not in stderr.getvalue()


def wait_for_ever():
    time.sleep(1000)


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()


def test_a_rank_that_a_thread_keeps_after_its_function_is_told_so():
    with pytest.raises(RankTimeout, match="rank 0 had returned, .* is a thread"):
        launch(leave_a_thread, nproc=1, timeout=4)


def test_a_timeout_names_each_rank_and_where_it_stood():
    begin = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        launch(fails_on(1, wait_for_ever), timeout=5)
    assert time.monotonic() - begin < 30  # the group's own timeout
    assert str(caught.value).startswith("the 2 ranks did not finish within 5 s\n")
    assert "rank 0 was in" in str(
        caught.value
    ) and "dist.all_reduce(torch.ones(1))" in str(caught.value)
    assert "rank 1 was in" in str(
        caught.value
    ) and "in wait_for_ever: time.sleep(1000)" in str(caught.value)
    assert not living_ranks()


def test_a_timeout_tells_returned_ranks_from_waiting_ones():
    with pytest.raises(RankTimeout, match="rank 0 had returned\n  rank 1 was in"):
        launch(lambda: rank() == 0 or wait_for_ever(), timeout=5)


def test_a_loop_in_python_that_never_ends_is_stopped():
    def spin():
        while True:
            pass

    with pytest.raises(RankTimeout, match="in spin"):
        launch(spin, timeout=1, nproc=1)
    assert not living_ranks()


def test_a_failed_launch_does_not_disturb_the_next():
    for _ in range(3):
        with pytest.raises(RankError):
            launch(fails_on(0, divide_by_zero))
        assert launch(sum_of_ones) == [2.0, 2.0]


# ---- nothing left behind ----


def test_a_run_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    launch(sum_of_ones)  # the fork server, which stays, has a folder of its own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch(sum_of_ones)
    assert not living_ranks()
    with pytest.raises(RankError):
        launch(divide_by_zero)
    assert not living_ranks()
    assert not list(tmp_path.iterdir())


ADDS = """
import torch, torch.distributed as dist
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch
def add():
    with process_group():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()
print(launch(add))
"""


def test_a_temporary_folder_with_a_long_name_does_no_harm(tmp_path):
    """A socket's address has a hundred characters at most; TMPDIR may have more."""
    long = tmp_path / ("job_" + "x" * 100)
    long.mkdir()
    done = python("-c", ADDS, env=os.environ | {"TMPDIR": str(long)})
    assert done.stdout == "[2.0, 2.0]\n", done.stderr
    assert not [path for path in long.iterdir() if "torch" not in path.name]


def test_what_a_rank_has_started_ends_with_it():
    def start_a_sleeper():
        return subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1000)"]
        ).pid

    [sleeper] = launch(start_a_sleeper, nproc=1)
    assert wait_until(
        lambda: (
            not psutil.pid_exists(sleeper)
            or psutil.Process(sleeper).status() == "zombie"
        )
    )


HANGS = """
import os, time
from ddp_course.ranks.launch import launch
def hang(folder):
    open(f"{folder}/{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(1000)
launch(hang, FOLDER, nproc=3, timeout=900)
"""


class Hanging:
    """A program whose three ranks hang: its process, the ranks' process ids, and its
    folder for temporary files.
    """

    def __init__(self, folder):
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir()
        script = folder / "hangs.py"
        script.write_text(HANGS.replace("FOLDER", repr(str(folder))))
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        options = {
            "stderr": subprocess.PIPE,
            "text": True,
            "env": environment,
            "start_new_session": True,
        }
        self.process = subprocess.Popen([sys.executable, script], **options)

    def wait_for_ranks(self):
        files = [self.folder / str(number) for number in range(3)]
        assert wait_until(
            lambda: all(file.exists() and file.read_text() for file in files), 90
        )
        self.ranks = [int(file.read_text()) for file in files]

    def has_left(self):
        """What is left a moment later: ranks, and files other than torch's own
        cache.
        """
        wait_until(lambda: not any(map(alive, self.ranks)), 5)
        files = lambda: [
            path.name
            for path in self.temporary.iterdir()
            if not path.name.startswith("torchinductor")
        ]
        wait_until(lambda: not files(), 5)
        return [rank for rank in self.ranks if alive(rank)] + files()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def hanging(tmp_path_factory):
    """Three programs that hang, started together, since each takes some seconds to
    start.
    """
    programs = [Hanging(tmp_path_factory.mktemp(name)) for name in ("a", "b", "c")]
    for program in programs:
        program.wait_for_ranks()
    yield programs
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.process.stderr.close()


def test_an_interrupt_or_the_death_of_the_caller_leaves_nothing(hanging):
    an_interrupt_leaves_nothing_and_says_where_the_ranks_stood(hanging[0])
    hanging[1].process.kill()
    assert not hanging[1].has_left()
    os.killpg(
        hanging[2].process.pid, signal.SIGKILL
    )  # as Jupyter does with a kernel that it restarts
    assert not hanging[2].has_left()


def an_interrupt_leaves_nothing_and_says_where_the_ranks_stood(program):
    program.process.send_signal(signal.SIGINT)
    _, stderr = program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    for number in range(3):
        assert f"rank {number} was in hangs.py, line" in stderr
    assert "in hang: time.sleep(1000)" in stderr
    assert not program.has_left()


def listening_addresses(processes):
    addresses = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = [
                c for c in process.net_connections() if c.status == psutil.CONN_LISTEN
            ]
            addresses |= {connection.laddr.ip for connection in connections}
    return addresses


def test_sockets_listen_on_loopback_only():
    """Neither the store nor gloo's connections can be reached from outside, while a run
    is under way.
    """

    def meet_and_wait():
        with process_group():
            dist.all_reduce(torch.ones(1))
            time.sleep(2)

    runner = threading.Thread(target=launch, args=(meet_and_wait,))
    runner.start()
    seen = set()
    while runner.is_alive():
        seen |= listening_addresses([psutil.Process(), *descendants()])
        time.sleep(0.1)
    runner.join()
    assert seen == {"127.0.0.1"}


def test_the_check_of_sockets_catches_a_plain_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not listening_addresses([psutil.Process()]) <= {"127.0.0.1", "::1"}
    del store


def test_the_stores_port_is_free_again_after_a_run():
    ports = launch(lambda: int(os.environ["MASTER_PORT"]))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", ports[0])) != 0


def test_a_hosted_store_answers():
    store = host_store()
    store.set("key", "value")
    assert (
        dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    )


def test_a_ddp_model_is_never_the_last_to_know_its_group():
    """With torch 2.11, a model that was the last held Python's lock while it waited for
    gloo's threads, and 4 of 18 launches like these hung. A group that was left is kept
    until the next one is, and no longer.
    """

    def leave_twice():
        groups = []
        for _ in range(2):
            with process_group():
                model = DistributedDataParallel(torch.nn.Linear(8, 2))
                model(torch.ones(4, 8)).sum().backward()
                dist.all_reduce(torch.ones(1))
                groups.append(weakref.ref(dist.group.WORLD))
        del model
        return [group() is not None for group in groups]

    for _ in range(3):
        assert launch(leave_twice, timeout=30) == [[False, True]] * 2


def test_ranks_that_torchrun_has_restarted_do_not_meet_the_addresses_of_those_before(
    monkeypatch,
):
    """torchrun keeps its store. Whether a stale address is read is a matter of chance,
    so look at the store.
    """
    server = host_store()
    for name, value in rank_environment(0, 2, server.port).items():
        monkeypatch.setenv(name, value)
    seen = []
    for attempt in (1, 2, 3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setattr(
            environment, "_groups", itertools.count()
        )  # as in a new process
        for _ in range(2):  # it joins a group, leaves it, and joins another
            store = environment.rendezvous()["store"]
            seen.append(store.check(["address"]))
            store.set("address", "here")
            assert store.check(["address"])
    assert seen == [False] * 6


# ---- many at once ----


def test_launches_from_threads_do_not_mix():
    results = {}
    threads = [
        threading.Thread(
            target=lambda n=n: results.update({n: launch(lambda: (n, rank()), nproc=2)})
        )
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(n, 0), (n, 1)] for n in range(6)}


def test_each_exit_code_is_read_by_one_thread_only(monkeypatch):
    """Two threads may know at the same moment that a rank has ended."""
    read = multiprocessing.forkserver.read_signed

    def read_a_moment_later(file):
        time.sleep(0.02)
        return read(file)

    launch(int)
    monkeypatch.setattr(multiprocessing.forkserver, "read_signed", read_a_moment_later)
    for _ in range(3):  # each time, it would happen more often than not
        test_launches_from_threads_do_not_mix()


def test_a_lesson_started_many_times_at_once_does_not_clash(tmp_path):
    """Two processes start lesson 04 some times each, on two ranks, all into one folder:
    all come to one result.
    """
    times = 10 if THOROUGH else 2
    arguments = [
        "--data",
        "digits",
        "--train-samples",
        "128",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        from concurrent.futures import ThreadPoolExecutor
        from ddp_course import lesson04
        from ddp_course.ranks.launch import launch
        with ThreadPoolExecutor({times}) as pool:
            runs = [pool.submit(launch, lesson04.main, {arguments!r}, timeout=600) for _ in range({times})]
        print([run.result()[1]["params_sha256"] for run in runs], file=open(__file__ + __import__("sys").argv[1], "w"))
        """)
    )
    processes = [
        subprocess.Popen(
            [sys.executable, script, name], stdout=subprocess.DEVNULL, cwd=COURSE
        )
        for name in "ab"
    ]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    results = [eval((tmp_path / f"run.py{name}").read_text()) for name in "ab"]
    assert len(results[0]) == len(results[1]) == times
    assert len(set(results[0] + results[1])) == 1
    assert (
        json.loads((tmp_path / "out" / "result.json").read_text())["params_sha256"]
        == results[0][0]
    )
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "metrics.jsonl",
        "model.pt",
        "result.json",
        "train.log",
    ]


# ---- stopped, and NaN ----


def stops_itself():
    import signal

    with process_group(timeout=60) as (rank, _):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()


def test_a_rank_that_a_signal_has_stopped_is_called_stopped():
    # another thread may take the signal, so this one may be a line further
    stopped = r"rank 1 was stopped \(SIGSTOP\) in .*(kill|barrier)"
    with pytest.raises(RankTimeout, match=stopped):
        launch(stops_itself, timeout=2)


def one_step(bad):
    with process_group() as (rank, _):
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            nan = bad and rank == 1 and step == 2
            (model(torch.ones(3)) * (float("nan") if nan else 1.0)).sum().backward()
            optimizer.step()


def test_parameters_that_become_nan_are_noted_with_step_and_rank(capsys):
    launch(one_step, True)
    said = "note: after step 3, parameters are NaN on rank 1\n"
    assert capsys.readouterr().out == said
    launch(one_step, False)
    assert capsys.readouterr().out == ""


# ---- a machine that is busy ----


def compute(seconds):
    """Use so many seconds of the first CPU, which others use, too."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while time.process_time() < seconds:
        pass
    return 1


@contextmanager
def others_on_the_first_cpu(count):
    first = min(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, {{{first}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", pin]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_others_have_the_cpu_their_time_does_not_count_for_an_answer():
    """A fifth of the time is enough for it alone; with eight others, it takes nine times as
    long. A rank that waits for nothing but time gets no more of it.
    """
    launch_untrusted(int)
    with others_on_the_first_cpu(8):
        assert launch_untrusted(compute, 0.4, timeout=2) == [1]
        begin = time.monotonic()
        with pytest.raises(RankTimeout):
            launch_untrusted(time.sleep, 60, timeout=2)
        assert time.monotonic() - begin < 5
