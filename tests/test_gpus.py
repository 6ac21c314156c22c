"""Machines with GPUs, pretended where there is none: who asks for them, who gets which."""

import ast
import json
import os
import re
import threading

import pytest
import torch
from conftest import COURSE, PRELOADED, python

from ddp_course import UsageError
from ddp_course.cli import exercises
from ddp_course.data import images
from ddp_course.ranks import environment, gpus
from ddp_course.ranks.launch import launch, launch_untrusted
from ddp_course.ranks.machines.machines import Machines

PRETENDED = COURSE / "tests" / "pretended"

# ---- the fork server asks nobody ----

START = """
import sys
from ddp_course.ranks.launch import launch, start_server

def imported(names):
    return sorted(set(names) & set(sys.modules))

start_server(*sys.argv[1:])
print(*launch(imported, sys.argv[1:], nproc=1, timeout=600)[0])
"""


def preloads():
    """The modules that a server is told to import anywhere in the course."""
    names = set(PRELOADED)
    for path in COURSE.glob("*/*.ipynb"):
        names |= set(exercises.preloads(path))
    for path in (COURSE / "ddp_course" / "checks").rglob("*.py"):
        if found := re.search(r"(?m)^PRELOADED = (\[.*?\])", path.read_text()):
            names |= set(ast.literal_eval(found[1]))
    return sorted(names)


def on_a_machine_with_gpus(log, *command, count=1, **env):
    """Run a Python program where there seem to be GPUs; return what it printed, and who
    asked for them, a list of dicts.
    """
    # as it would be there
    outside = {name: os.environ[name] for name in os.environ if name not in gpus.HIDDEN}
    env = {
        "PYTHONPATH": os.pathsep.join([str(PRETENDED), str(COURSE)]),
        "DDP_COURSE_PRETENDED_GPUS": str(count),
        "DDP_COURSE_PRETENDED_LOG": str(log),
        **env,
    }
    done = python(*command, env=outside | env)
    assert done.returncode == 0, done.stderr
    rows = log.read_text().splitlines() if log.exists() else []
    return done.stdout, [json.loads(row) for row in rows]


def test_the_fork_server_never_asks_for_a_gpu_whatever_it_preloads(tmp_path):
    """Libraries that ask while they are imported are left to the ranks."""
    names = preloads()
    assert {"deepspeed", "transformers.trainer", "bitsandbytes"} <= set(names)
    log = tmp_path / "asked"
    printed, asked = on_a_machine_with_gpus(log, "-c", START, *names)
    assert [row for row in asked if row["server"]] == []
    left = {"deepspeed", "transformers.trainer", "bitsandbytes", "peft"}
    assert set(printed.split()) == set(names) - left


def test_a_server_that_asks_would_be_noticed(tmp_path):
    trusting = {"DDP_COURSE_PRETENDED_TRUST": "1"}
    log = tmp_path / "asked"
    printed, asked = on_a_machine_with_gpus(
        log, "-c", START, "deepspeed", "bitsandbytes", **trusting
    )
    assert printed.split() == ["bitsandbytes", "deepspeed"]
    kinds = {row["kind"] for row in asked if row["server"]}
    assert {"nvml", "capability"} <= kinds


def test_a_library_that_opens_the_driver_itself_asks(tmp_path, monkeypatch):
    """As those do that ask NVML without torch."""
    program = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
from ddp_course.ranks import gpus
gpus.DRIVERS = ({str(tmp_path / "nvidia")!r},)
print(gpus.asks("opens"), gpus.asks("json"), gpus.asks("there_is_no_such_module"))
"""
    (tmp_path / "nvidia0").touch()
    text = f"driver = open({str(tmp_path / 'nvidia0')!r})"
    (tmp_path / "opens.py").write_text(text)
    done = python("-c", program)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


# ---- who gets which ----

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
PLACES = {  # what launchers set for a rank, and the number of GPUs that its job needs
    "one process": ((0, 0, 1, 1, "127.0.0.1"), 1, 0),
    "rank 1 of 2 here": ((1, 1, 2, 2, "127.0.0.1"), 2, 1),
    "machine 1 of 2 pretended ones, a rank each": ((1, 0, 2, 1, "127.0.0.1"), 2, 1),
    "machine 1 of 2 pretended ones, rank 1 of 2": ((3, 1, 4, 2, "localhost"), 4, 3),
    "machine 1 of 2 real ones, rank 1 of 2": ((3, 1, 4, 2, "10.0.0.1"), 2, 1),
}


@pytest.fixture
def there_are(monkeypatch):
    """A function that pretends a number of GPUs, at the one place that counts them."""

    def pretend(number):
        monkeypatch.setattr(gpus, "count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return pretend


@pytest.mark.parametrize("number", [0, 1, 2, 8])
@pytest.mark.parametrize("place", PLACES)
def test_ranks_and_gpus_are_counted_on_the_host(
    place, number, there_are, monkeypatch, capsys
):
    """A GPU for each rank on this host, or none for all of them."""
    variables, needed, index = PLACES[place]
    for name, value in zip(NAMES, [*map(str, variables), "29999"]):
        monkeypatch.setenv(name, value)
    there_are(number)
    expected = torch.device("cuda", index) if number >= needed else torch.device("cpu")
    assert environment.choose_device() == expected
    if number < needed:
        few = (
            f"{needed} ranks? on this host, but {number} GPUs?; nccl needs one per rank"
        )
        with pytest.raises(UsageError, match=few):
            environment.choose_device("cuda")
    assert environment.choose_device("cpu") == torch.device("cpu")


def test_without_a_launcher_a_process_takes_the_first_gpu(there_are):
    there_are(8)
    assert environment.choose_device() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "number, rank, line",
    [
        (0, 0, ""),
        (
            1,
            0,
            "device: cpu (2 ranks on this host, but 1 GPU: nccl needs one per rank)\n",
        ),
        (1, 1, ""),
        (2, 0, ""),
    ],
)
def test_one_line_says_why_gpus_are_not_used(
    number, rank, line, there_are, monkeypatch, capsys
):
    variables = (rank, rank, 2, 2, "127.0.0.1", 29999)
    for name, value in zip(NAMES, map(str, variables)):
        monkeypatch.setenv(name, value)
    there_are(number)
    environment.choose_device()
    assert capsys.readouterr().out == line


def device_where_there_are(number):
    gpus.count = lambda: number
    torch.cuda.set_device = lambda device: None
    return str(environment.choose_device())


def test_launches_at_once_each_count_their_own_ranks():
    """As several torchruns do: a GPU serves many processes, but one rank per job."""
    found = {}

    def start(nproc, number):
        found[nproc, number] = launch(device_where_there_are, number, nproc=nproc)

    cases = [(1, 1), (2, 1), (2, 2), (3, 2)]
    threads = [threading.Thread(target=start, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        (1, 1): ["cuda:0"],
        (2, 1): ["cpu", "cpu"],
        (2, 2): ["cuda:0", "cuda:1"],
        (3, 2): ["cpu", "cpu", "cpu"],
    }


def test_hidden_gpus_are_not_counted(tmp_path):
    """By CUDA_VISIBLE_DEVICES, also in a rank that is given another one."""
    program = """
import os
from ddp_course.ranks import gpus

for shown in (None, "", "0", "1,0", "0,1,2,3"):
    if shown is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = shown
    print(gpus.count())
"""
    printed, _ = on_a_machine_with_gpus(tmp_path / "asked", "-c", program, count=2)
    assert printed.split() == ["2", "0", "1", "2", "2"]


def what_is_hidden():
    return [os.environ.get(name) for name in gpus.HIDDEN]


def test_machines_of_the_laboratory_have_no_gpus(there_are, capsys):
    hidden = list(gpus.HIDDEN.values())
    there_are(1)
    with Machines(2) as machines:
        assert machines.launch(what_is_hidden, nproc=1) == [hidden, hidden]
        told = machines.run(1, ["sh", "-c", 'echo "<$CUDA_VISIBLE_DEVICES>"']).text
    assert told == "<>\n"
    assert "without the GPUs of this host" in capsys.readouterr().out
    there_are(0)
    assert "GPU" not in str(machines)


def test_answers_are_judged_without_gpus():
    assert launch_untrusted(what_is_hidden) == [list(gpus.HIDDEN.values())]


def test_batches_come_from_the_device_of_the_images():
    """So nothing is copied to a GPU in each step. 'meta' is another device than the CPU."""
    for data_set in images.load_images("digits", device="meta"):
        pictures, labels = next(iter(torch.utils.data.DataLoader(data_set, 8)))
        assert pictures.is_meta and labels.is_meta
        assert pictures.shape == (8, 1, 28, 28) and labels.shape == (8,)
