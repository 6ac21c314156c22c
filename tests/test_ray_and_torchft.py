"""The outlook of lesson 14: its programs on Ray Train and torchft, for real."""

import getpass
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from io import StringIO

import psutil
import pytest
from conftest import COURSE, THOROUGH, descendants, python, wait_until
from test_machines import needs_namespaces

from ddp_course import UsageError, lesson04
from ddp_course.notebook import plots
from ddp_course.notebook.plots import display
from ddp_course.ranks.launch import launch
from ddp_course.ranks.machines.machines import Machines

ON_RAY = COURSE / "clusters" / "ray" / "lesson04_on_ray.py"
ON_TWO = COURSE / "clusters" / "ray" / "two_machines.py"
DILOCO = COURSE / "clusters" / "torchft" / "diloco.py"
TWO_GROUPS = COURSE / "clusters" / "torchft" / "two_groups.py"
OUTPUT = COURSE / "clusters" / "ray" / "output.txt"
FLAGS = "--epochs 1 --data digits --train-samples 576 --no-dropout".split()
INSTALL = 'pip install -c constraints.txt -e ".[engines]"'

slow = pytest.mark.skipif(not THOROUGH, reason="takes some minutes: make thorough")


def needs(package):
    missing = importlib.util.find_spec(package) is None
    reason = f"{package} is not installed: {INSTALL}"
    return pytest.mark.skipif(missing, reason=reason)


def lacks(package):
    present = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(present, reason=f"{package} is installed here")


def module(path):
    """A program of clusters/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# ---- where it cannot run, one line says why ----


def test_torchft_is_refused_outside_of_the_laboratory_in_one_line(tmp_path):
    done = python(DILOCO, "--out", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("diloco.py: torchft's servers are for the laboratory only")
    assert list(tmp_path.iterdir()) == []


def test_a_host_name_and_an_address_do_not_make_a_laboratory(monkeypatch):
    """A machine of the laboratory has its own two cards and no default route."""
    diloco = module(DILOCO)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    with pytest.raises(UsageError, match="for the laboratory only"):
        diloco.check_laboratory()
    here = psutil.net_if_addrs()
    planted = next(iter(here.values()))[0]._replace(address="10.77.0.1")
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: here | {"docker9": [planted], "eth0": []}
    )
    with pytest.raises(UsageError, match="for the laboratory only"):
        diloco.check_laboratory()


@needs_namespaces
def test_a_machine_of_the_laboratory_is_one_until_it_has_a_way_out():
    check = "import sys; sys.path.insert(0, sys.argv[1])\n"
    check += "import diloco; diloco.check_laboratory(); print('inside')"
    command = ["python", "-c", check, str(DILOCO.parent)]
    with Machines(2, quiet=True) as machines:
        for machine in range(2):
            assert machines.run(machine, command).text == "inside\n"
        machines.run(1, "ip route add default via 10.77.0.1")
        ended = machines.run(1, command)
    assert ended.code == 1 and "for the laboratory only" in ended.text


@lacks("ray")
@pytest.mark.parametrize("program", [ON_RAY, ON_TWO])
def test_without_ray_one_line_says_how_to_install_it(program, tmp_path):
    done = python(program, *FLAGS, "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"{program.name}: Ray is not installed: {INSTALL}\n"


@lacks("torchft")
def test_without_torchft_one_line_says_how_to_install_it(tmp_path):
    done = python(TWO_GROUPS, "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"two_groups.py: torchft is not installed: {INSTALL}\n"


# ---- Ray ----


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory):
    """The result of lesson 4 on two ranks."""
    out = str(tmp_path_factory.mktemp("torchrun"))

    def run():
        with redirect_stdout(StringIO()):
            return lesson04.main([*FLAGS, "--out", out])

    return launch(run, nproc=2)[0]


@pytest.fixture
def temporary():
    """A folder for temporary files. Its name is short: Ray's sockets are in there."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def on_ray(program, folder, out, look=lambda process: None):
    """Run a program on Ray and look at it meanwhile; return what it printed."""
    command = [sys.executable, str(program), *FLAGS, "--lose-a-worker", "--out", out]
    env = os.environ | {"TMPDIR": folder}
    env["PATH"] = os.pathsep.join([os.path.dirname(shutil.which("ray")), env["PATH"]])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for _ in range(3):
        with subprocess.Popen(list(map(str, command)), env=env, **pipes) as running:
            wait_until(lambda: look(running.pid) or running.poll() is not None, 800)
            printed, errors = running.communicate(timeout=600)
        # Ray gives its processes 15 seconds to start, and no setting changes that
        if "too busy" not in errors and "Ray runtime started" not in errors:
            break
    assert running.returncode == 0, errors
    return printed


def check_a_run(printed, out, of_torchrun):
    """Both workers began twice, and the result is torchrun's."""
    attempts = re.findall(r"attempt (\d): rank (\d) of 2 on \S+", printed)
    assert attempts == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    result = json.loads((out / "result.json").read_text())
    assert result["params_sha256"] == of_torchrun["params_sha256"]
    assert result["params_sha256"] in printed


def check_that_nothing_is_left(folder):
    def left():
        return [
            process.info["name"]
            for process in psutil.process_iter(["name", "cmdline"])
            if any(folder in text for text in process.info["cmdline"] or [])
        ]

    assert wait_until(lambda: not left()), left()
    cache = f"torchinductor_{getpass.getuser()}"  # torch's own, which stays everywhere
    assert set(os.listdir(folder)) <= {cache}


@slow
@needs("ray")
@pytest.mark.timeout(900)
def test_on_ray_a_worker_dies_and_the_run_ends_as_torchruns(
    tmp_path, temporary, of_torchrun
):
    everywhere, names = set(), set()

    def look(pid):
        time.sleep(1)
        for process in descendants(pid):
            with suppress(psutil.Error):
                for link in process.net_connections("tcp"):
                    if link.status == psutil.CONN_LISTEN:
                        names.add(process.name())
                        if link.laddr.ip.removeprefix("::ffff:") != "127.0.0.1":
                            everywhere.add(process.name()[:15])

    printed = on_ray(ON_RAY, temporary, tmp_path, look)
    check_a_run(printed, tmp_path, of_torchrun)
    assert {"gcs_server", "raylet"} <= names
    # the store of the process group, which torch opens for Ray
    assert everywhere <= {"ray::RayTrainWo"}
    check_that_nothing_is_left(temporary)


@slow
@needs("ray")
@needs_namespaces
@pytest.mark.timeout(900)
def test_on_two_machines_of_ray_the_run_ends_as_torchruns(
    tmp_path, temporary, of_torchrun
):
    printed = on_ray(ON_TWO, temporary, tmp_path)
    check_a_run(printed, tmp_path, of_torchrun)
    for attempt in (1, 2):
        for machine in (0, 1):
            place = rf"attempt {attempt}: rank \d of 2 on node{machine}"
            assert re.search(place, printed)
    check_that_nothing_is_left(temporary)


def test_the_output_that_the_lesson_shows_is_that_of_these_programs():
    """Of torchrun, of Ray on one machine, and of Ray on two: all end with one hash."""
    text = OUTPUT.read_text()
    flags = " ".join(FLAGS)
    commands = [line for line in text.splitlines() if line.startswith("$ ")]
    assert commands == [
        f"$ torchrun --nproc_per_node 2 ddp_course/lesson04.py {flags}",
        f"$ python clusters/ray/lesson04_on_ray.py {flags} --lose-a-worker",
        f"$ python clusters/ray/two_machines.py {flags} --lose-a-worker",
    ]
    hashes = re.findall(r"params_sha256 +(\w{64})\n", text)
    assert len(hashes) == 3 and len(set(hashes)) == 1
    printed = "\n".join(line for line in text.splitlines() if line not in commands)
    assert not re.search(r"/\w+/|\d+\.\d+\.\d+\.\d+|pid=", printed)


# ---- torchft ----


def drawn(timeline):
    """The alternative text of the time line's figure."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "display", lambda bundle, raw: shown.append(bundle))
        plots.replica_groups(timeline, "Two groups")
    return shown[0]["text/plain"]


@slow
@needs("torchft")
@needs_namespaces
@pytest.mark.timeout(900)
def test_a_replica_group_dies_and_comes_back_and_both_end_with_equal_parameters(
    tmp_path, capfd
):
    two_groups = module(TWO_GROUPS)
    two_groups.main(["--out", str(tmp_path)])
    first, second = json.loads((tmp_path / "timeline.json").read_text())
    printed = capfd.readouterr().out
    hashes = re.findall(r"params_sha256 (\w{64})", printed)
    assert len(hashes) == 2 and len(set(hashes)) == 1
    results = [
        json.loads((tmp_path / f"group{n}.jsonl").read_text().splitlines()[-1])
        for n in (0, 1)
    ]
    assert results[0] == results[1] and results[0]["accuracy"] > 0.8
    alone = [row for row in first["rounds"] if row["groups"] == 1 and row["committed"]]
    assert len(alone) >= 2 and not any(row["groups"] == 1 for row in second["rounds"])
    # group 0 has done each round, in order; group 1 has missed those done alone
    numbers = [row["round"] for row in first["rounds"] if row["committed"]]
    assert numbers == list(range(1, numbers[-1] + 1))
    assert numbers[-1] == second["rounds"][-1]["round"]
    [[off, on]], [received] = second["off"], second["received"]
    assert off < on < received
    assert "receives its state at" in drawn([first, second])


def test_the_time_line_that_the_lesson_shows_is_of_this_program():
    """A group is off, the other one goes on alone, and both end in the same round."""
    folder = TWO_GROUPS.parent / "output"
    first, second = json.loads((folder / "timeline.json").read_text())
    lines = (folder / "output.txt").read_text().splitlines()
    assert lines[0] == "$ python clusters/torchft/two_groups.py"
    _, told, first_ends, other, second_ends = lines[1:]
    assert first_ends == second_ends and "params_sha256" in first_ends
    in_words = module(TWO_GROUPS).in_words
    assert told == f"group 0: {in_words(first)}"
    assert other == f"group 1: {in_words(second)}"
    assert first["rounds"][-1]["round"] == second["rounds"][-1]["round"]
    assert "receives its state at" in drawn([first, second])


def test_a_story_is_in_seconds_since_the_first_round_began(tmp_path):
    def a_round(number, begin):
        times = {"begin": begin, "computed": begin + 1, "end": begin + 2}
        return {"round": number, "groups": 2, "committed": True, **times}

    ends = {"accuracy": 0.5, "params_sha256": "ab"}
    rows = [[a_round(1, 100.5), ends], [a_round(1, 100), {"received": 101}, ends]]
    for number, group in enumerate(rows):
        lines = [json.dumps(row) + "\n" for row in group]
        (tmp_path / f"group{number}.jsonl").write_text("".join(lines))
    times = {"off": 103, "on": 104}
    groups, results = module(TWO_GROUPS).story(tmp_path, times)
    assert groups[0]["rounds"][0]["begin"] == 0.5 and groups[0]["off"] == []
    assert groups[1]["received"] == [1] and groups[1]["off"] == [[3, 4]]
    assert results == [ends, ends]
