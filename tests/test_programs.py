"""The lessons as programs: every command that they name, and every way to start them
wrongly.
"""

import ast
import importlib
import inspect
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import (
    COURSE,
    THOROUGH,
    descendants,
    python,
    remember_that_there_is_no_mnist,
    share_what_is_made_once,
    wait_until,
)

from ddp_course import UsageError, lesson04, runs
from ddp_course.ranks import environment
from ddp_course.ranks.launch import RankError, launch

LESSONS = sorted((COURSE / "ddp_course").glob("lesson[0-9][0-9].py"))
TORCHRUN = {
    # on a free port: until torch 2.13 or so, two runs at once would both take 29500
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "python": [sys.executable],
}
TORCHRUN["deepspeed"] = [sys.executable, "-m", "deepspeed.launcher.runner"]
TORCHRUN["accelerate"] = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]


def commands():
    """The commands in the docstrings of all lessons."""
    found = []
    for path in LESSONS:
        sentence, *lines = ast.get_docstring(ast.parse(path.read_text())).splitlines()
        assert sentence.endswith(".") and lines[0] == "" and all(lines[1:]), path
        found += lines[1:]
    return found


@pytest.fixture
def no_mnist(workplace):
    share_what_is_made_once(workplace)
    remember_that_there_is_no_mnist(workplace)


def commands_of(path):
    return [line for line in commands() if path.name in line or path.stem in line]


def ranks_of(words):
    """How many ranks a command starts."""
    flags = ("--nproc_per_node", "--nproc", "--num_gpus", "--num_processes")
    there = [flag for flag in flags if flag in words]
    return int(words[words.index(there[0]) + 1]) if there else 1


def lesson_and_flags(command):
    """The lesson of a command, a module, and the flags that it gives it."""
    words = shlex.split(command)
    [place] = [at for at, word in enumerate(words) if "lesson" in word]
    lesson = re.search("lesson[0-9]+", words[place])[0]
    return importlib.import_module(f"ddp_course.{lesson}"), words[place + 1 :]


def in_processes_of_their_own():
    """The commands that `make test` runs as they are; `make thorough` runs all so."""
    some = [
        "torchrun --nproc_per_node 2 ddp_course/lesson04.py --epochs 1",
        "python -m ddp_course.lesson05 --epochs 1",
    ]
    assert set(some) <= set(commands())
    return [[line] for line in some] if not THOROUGH else map(commands_of, LESSONS)


@pytest.mark.parametrize("lines", in_processes_of_their_own(), ids=lambda x: x[0][:60])
def test_every_command_in_a_docstring_runs(lines, workplace, no_mnist):
    """One after the other, in the same folder."""
    for command in lines:
        program, *arguments = shlex.split(command)
        whole = TORCHRUN[program] + arguments
        done = subprocess.run(whole, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        lesson, _ = lesson_and_flags(command)
        name = lesson.__name__.rpartition(".")[2]
        result = json.loads((workplace / "runs" / name / "result.json").read_text())
        for value in [*result, *result.values()]:
            assert str(value) in done.stdout
        assert result["world_size"] == ranks_of(arguments)


TRAIN_NOTHING = {"lesson02", "lesson21"}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_commands_of_a_docstring_run_one_after_the_other(path, workplace, no_mnist):
    """In the same folder, as a reader types them; where one resumes, it can.

    In ranks that have imported torch already, and on few samples: `make thorough` runs
    them as they are.
    """
    for command in commands_of(path):
        lesson, flags = lesson_and_flags(command)
        nproc = ranks_of(shlex.split(command))
        if "--nproc" in flags:  # this lesson can start its ranks itself
            place = flags.index("--nproc")
            flags = flags[:place] + flags[place + 2 :]
        if "--train-samples" not in flags and path.stem not in TRAIN_NOTHING:
            flags += ["--train-samples", "192"]
        if "--batch-size" not in flags and path.stem not in TRAIN_NOTHING:
            flags += ["--batch-size", "16"]
        results = launch(lesson.main, flags, nproc=nproc, timeout=600)
        assert [result["world_size"] for result in results] == [nproc] * nproc
        stored = json.loads(
            (workplace / "runs" / path.stem / "result.json").read_text()
        )
        assert stored == {name: results[0][name] for name in stored}, command


def test_every_command_in_a_docstring_has_flags_that_its_lesson_knows():
    for command in commands():
        lesson, flags = lesson_and_flags(command)
        assert lesson.arguments(flags).lesson == lesson.__name__[-2:]
        with pytest.raises(UsageError, match="unrecognized arguments: --no-such-flag"):
            lesson.arguments([*flags, "--no-such-flag"])


@pytest.fixture
def parsers(monkeypatch):
    """The parsers that lessons make."""
    made, parser = [], runs.parser

    def recorded(*args, **named):
        made.append(parser(*args, **named))
        return made[-1]

    monkeypatch.setattr(runs, "parser", recorded)
    return made


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_flag_has_a_help_that_names_its_default(path, parsers):
    from ddp_course.data import images, questions  # which take long to import

    lesson = importlib.import_module(f"ddp_course.{path.stem}")
    args = lesson.arguments()
    for flag in parsers[0]._actions:
        said = flag.help % {"default": flag.default}
        if isinstance(flag.default, int | float) and flag.nargs != 0:
            assert float(re.search(r"\((\S+)\)$", said)[1]) == flag.default, said
        elif flag.choices and isinstance(flag.default, str):
            assert flag.default in said, said
    if "batch_size" in args:
        said = " ".join(parsers[0].format_help().split())
        several = "accumulate" in args or "global_batch" in args
        assert ("samples per micro-batch" in said) == several
        assert ("samples per step" in said) != several
        others = {"11": questions.MOST_ON_A_CPU, "13": 512}
        most = others.get(args.lesson, images.MOST_ON_A_CPU)
        most = getattr(lesson, "MOST_ON_A_CPU", most)
        assert f"(all on a GPU, at most {most} elsewhere)" in said


def test_every_lesson_names_a_command_for_ranks_and_one_without():
    for path in LESSONS:
        text = "\n".join(line for line in commands() if path.stem in line)
        assert re.search(rf"torchrun (--\S+ \d )*ddp_course/{path.name}", text)
        assert (
            f"python -m ddp_course.{path.stem}" in text
            or f"python ddp_course/{path.name}" in text
        )


# ---- wrong use: one clear line, exit code 2, nothing lost ----


def start(*arguments, nproc=None, **options):
    """Run lesson 04 from a shell, alone or as `ddp-course run` does it on ranks."""
    if nproc:
        return python(
            "-m",
            "ddp_course.cli.command",
            "run",
            "04",
            "--nproc",
            nproc,
            *arguments,
            timeout=600,
            **options,
        )
    return python("ddp_course/lesson04.py", *arguments, timeout=600, **options)


def start_here(monkeypatch, *arguments):
    """Run lesson 04 as a program, but in this process, which has imported torch
    already.
    """
    output, errors, code = io.StringIO(), io.StringIO(), 0
    monkeypatch.setattr(sys, "argv", ["lesson04.py"])
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            runs.start(lambda _: lesson04.main(list(arguments)))
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(
        returncode=code, stdout=output.getvalue(), stderr=errors.getvalue()
    )


def assert_one_line(done, expected):
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and expected in lines[0], done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--epochs", "0"], "argument --epochs: '0' is not a whole number from 1"),
        (
            ["--batch-size", "many"],
            "argument --batch-size: 'many' is not a whole number from 1",
        ),
        (["--data", "cifar"], "argument --data: invalid choice: 'cifar'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (
            ["--data", "digits", "--train-samples", "99999"],
            "--train-samples 99999 is more than digits has: 1437",
        ),
        (
            ["--data", "digits", "--batch-size", "1500"],
            "--batch-size 1500 is more than a rank's share, 1437 of 1437 samples",
        ),
        (["--device", "mps"], "mps is for lesson 1 on a Mac: it has no collectives"),
        (
            ["--local_rank=1"],
            "'1' contradicts the environment, where it is 0: leave this flag to",
        ),
        (["--local-rank", "first"], "'first' contradicts the environment"),
        (["--data", "mnist"], "MNIST could not be downloaded"),
        (
            ["--seed", str(2**64)],
            f"'{2**64}' is not a whole number from 0 to {2**31 - 1}",
        ),
        (["--seed", "-1" + "0" * 30], "argument --seed: '-1000"),
        (["--timeout", "1" + "0" * 30], f"not a whole number from 1 to {2**31 - 1}"),
        (["--learning-rate", "nan"], "'nan' is not a number from 0 to"),
        (["--learning-rate", "-1"], "'-1' is not a number from 0 to"),
        (["--out", ""], "a folder needs a name; . is the current one"),
    ],
)
def test_wrong_flags_give_one_line(arguments, expected, workplace, monkeypatch):
    own_process = THOROUGH or arguments[0] == "--epochs"
    assert_one_line(
        start(*arguments) if own_process else start_here(monkeypatch, *arguments),
        expected,
    )


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_every_lesson_takes_the_local_rank_that_launchers_append(
    flag, path, monkeypatch
):
    lesson = importlib.import_module(f"ddp_course.{path.stem}")
    assert lesson.arguments([f"{flag}=0"]).local_rank == 0
    for name, value in (PLACE | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert lesson.arguments([f"{flag}=1"]).local_rank == 1
    with pytest.raises(UsageError, match="'0' contradicts the .* where it is 1"):
        lesson.arguments([f"{flag}=0"])


def test_the_launcher_of_old_scripts_starts_a_lesson(workplace):
    """torch.distributed.launch, which appends --local-rank."""
    launcher = ["-W", "ignore", "-m", "torch.distributed.launch"]
    launcher += ["--nproc_per_node", "2", "ddp_course/lesson04.py", "--data", "digits"]
    done = python(*launcher, "--epochs", "1", "--train-samples", "128", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "world_size          2" in done.stdout


def test_deepspeeds_name_for_the_ranks_on_a_machine_is_known(monkeypatch):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    assert environment.torchrun_environment() == (0, 0, 2, 1)


def test_what_is_impossible_on_three_ranks_gives_one_line(workplace):
    few = ["--data", "digits", "--train-samples", "2", "--batch-size", "1"]
    assert_one_line(start(*few, nproc=3), "2 training samples are too few for 3 ranks")
    share = (
        "--batch-size 500 is more than a rank's share, 479 of 1437 samples on 3 ranks"
    )
    with pytest.raises(RankError, match=f"UsageError: {share}"):
        launch(lesson04.main, ["--data", "digits", "--batch-size", "500"], nproc=3)
    if THOROUGH:
        assert_one_line(
            start("--epochs", "-3", nproc=3),
            "argument --epochs: '-3' is not a whole number",
        )


def test_a_macs_gpu_is_for_a_program_without_collectives(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert environment.choose_device(collectives=False).type == "mps"
    assert environment.choose_device("cpu", collectives=False).type == "cpu"
    assert environment.choose_device().type == "cpu"
    with pytest.raises(UsageError, match="it has no collectives; use --device cpu"):
        environment.choose_device("mps")


# ---- bits that repeat ----


def test_deterministic_is_a_flag_of_every_program_that_trains_and_reaches_torch(
    tmp_path,
):
    """On a CPU the bits repeat without it, and it does not change them."""
    for path in LESSONS:
        lesson = importlib.import_module(f"ddp_course.{path.stem}")
        if path.stem not in TRAIN_NOTHING:
            assert lesson.arguments(["--deterministic"]).deterministic
            main = inspect.getsource(lesson)
            assert "deterministic=args.deterministic" in main, path
    flags = ["--data", "digits", "--train-samples", "192", "--epochs", "1", "--out"]
    plain = launch(lesson04.main, [*flags, str(tmp_path / "plain")])
    again = launch(deterministic, [*flags, str(tmp_path / "again")])
    for before, (result, switched) in zip(plain, again):
        assert result["params_sha256"] == before["params_sha256"]
        assert switched == (True, ":4096:8", False)


def deterministic(flags):
    result = lesson04.main([*flags, "--deterministic"])
    switches = torch.are_deterministic_algorithms_enabled()
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return result, (switches, config, torch.backends.cudnn.benchmark)


FORBIDDEN = """
import sys, torch
import torch.distributed as dist
from ddp_course import runs
from ddp_course.ranks.environment import choose_device, process_group

def main(argv=()):
    args = runs.parser("lesson99.py", "doc").parse_args(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group():
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        dist.barrier()
    print("done")

if __name__ == "__main__":
    runs.start(main)
"""


@pytest.mark.parametrize("nproc", [None, 2])
def test_an_operation_without_a_deterministic_form_gives_one_line(nproc, tmp_path):
    """Also where one rank only comes upon it."""
    (tmp_path / "lesson99.py").write_text(FORBIDDEN)
    command = [tmp_path / "lesson99.py"]
    if nproc:
        command = [
            "-m",
            "ddp_course.ranks.machines.agent",
            "--nproc_per_node",
            nproc,
            *command,
        ]
    line = "lesson99.py: put_ cannot repeat its bits: leave out --deterministic"
    done = python(*command, "--deterministic", timeout=600)
    said = [row for row in done.stderr.splitlines() if "lesson99" in row]
    assert said == [line] and done.returncode in (1, 2), done.stderr
    assert (done.returncode == 2) or nproc
    if not nproc:
        assert python(*command, timeout=600).stdout == "done\n"


def sharded_fingerprints():
    from torch.distributed.fsdp import fully_shard

    with environment.process_group():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        before = runs.params_sha256(model)
        fully_shard(model)
        return before, runs.params_sha256(model)


def test_a_sharded_modules_fingerprint_is_the_whole_modules():
    for before, after in launch(sharded_fingerprints, nproc=3):
        assert before == after


def test_more_ranks_than_gpus_give_one_line(workplace):
    done = start("--device", "cuda", nproc=1)
    assert_one_line(
        done, "1 rank on this host, but 0 GPUs; nccl needs one per rank: start fewer"
    )


@pytest.mark.parametrize(
    "missing",
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ],
)
def test_a_half_set_torchrun_environment_is_named(missing, monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(missing)
    with pytest.raises(
        UsageError, match=f"set, but {missing} not: start with torchrun"
    ):
        environment.torchrun_environment()


def test_a_half_set_environment_gives_one_line(workplace):
    assert_one_line(
        start(env=os.environ | {"WORLD_SIZE": "2"}),
        "WORLD_SIZE set, but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE",
    )


def test_a_garbled_environment_is_named(monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "first")
    with pytest.raises(UsageError, match="RANK must be a whole number, but is 'first'"):
        environment.torchrun_environment()


PLACE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"RANK": "5"}, "RANK is impossible, the environment says: RANK 5, .*SIZE 2"),
        ({"RANK": "-1"}, "RANK is impossible"),
        ({"WORLD_SIZE": "0"}, "RANK is impossible"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is impossible"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is impossible"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a port, 1 to 65535, but is 'x'"),
        ({"MASTER_PORT": "99999"}, "must be a port, 1 to 65535, but is '99999'"),
        ({"MASTER_PORT": "-1"}, "must be a port, 1 to 65535, but is '-1'"),
        ({"DDP_COURSE_NETWORK": "x"}, "NETWORK must be two numbers, .* but is 'x'"),
        ({"DDP_COURSE_NETWORK": "1 -1"}, "must be two numbers, .* but is '1 -1'"),
        (
            {"TORCHELASTIC_RESTART_COUNT": "x"},
            "TORCHELASTIC_RESTART_COUNT must be a whole number, but is 'x'",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "nope0"},
            "GLOO_SOCKET_IFNAME=nope0 is no interface: this machine has .*lo",
        ),
        (
            {"MASTER_ADDR": "no.such.host.invalid", "LOCAL_WORLD_SIZE": "1"},
            "MASTER_ADDR=no.such.host.invalid cannot be found",
        ),
    ],
)
def test_an_impossible_environment_is_named(wrong, expected, monkeypatch):
    for name, value in (PLACE | wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=expected):
        with environment.process_group():
            pass


@pytest.mark.parametrize(
    "number, flags, expected",
    [
        ("03", ["--bucket-size-mb", "inf"], "'inf' is not a number from 0 to 1e+06"),
        ("16", ["--bucket-mb", "1e30"], "'1e30' is not a number from 0 to 1e+06"),
        ("10", ["--dropout", "2"], "'2' is not a number from 0 to 1"),
        ("10", ["--master-port", "70000"], "--master-port must be a port, 1 to 65535"),
        ("13", ["--warmup", "-3"], "'-3' is not a whole number from 0"),
    ],
)
def test_a_number_that_is_too_large_for_its_use_is_named(number, flags, expected):
    lesson = importlib.import_module(f"ddp_course.lesson{number}")
    with pytest.raises(UsageError, match=re.escape(expected)):
        lesson.arguments(flags)


def test_an_impossible_environment_gives_one_line(workplace):
    assert_one_line(start(env=os.environ | PLACE | {"RANK": "5"}), "RANK is impossible")


def test_a_loss_that_is_not_a_number_ends_a_run_with_the_step_and_the_rank(workplace):
    too_fast = ["--data", "digits", "--learning-rate", "1e30", "--epochs", "2"]
    with pytest.raises(
        RankError, match=r"UsageError: the loss is not a number in step .* on rank \d"
    ):
        launch(lesson04.main, too_fast)
    assert not list(workplace.glob("runs/**/result.json")), "a NaN is no success"


LOGGED = {
    number: ["--data", "digits", "--train-samples", "128", "--batch-size", "16"]
    for number in ("04", "05", "06", "07", "08", "09", "12", "13", "14", "15", "16")
}
LOGGED["12"] = LOGGED["13"] = ["--train-samples", "16", "--batch-size", "4"]
LOGGED["14"] = [*LOGGED["14"], "--global-batch", "32"]


@pytest.mark.parametrize("number", LOGGED)
def test_the_last_loss_in_the_log_is_that_of_all_ranks(number, tmp_path):
    """As in metrics.jsonl; rank 0's own is another one."""
    lesson = importlib.import_module(f"ddp_course.lesson{number}")
    flags = [*LOGGED[number], "--epochs", "1", "--out", str(tmp_path)]
    launch(lesson.main, flags, nproc=2, timeout=600)
    said = re.findall(r"\bloss (\d+\.\d+)", (tmp_path / "train.log").read_text())
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(said[-1]) == pytest.approx(last["loss"], abs=6e-4)


WAITS = """
import os, signal, sys, time
import torch
from ddp_course import lesson04, runs
real, steps, fault = torch.optim.AdamW.step, [], sys.argv.pop(1)

def step(self, *args, **kwargs):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 4:
        if fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "leaves":
            os._exit(0)
        while fault == "loops":
            time.sleep(1)
        if fault == "comes late":
            time.sleep(4.5)
    return real(self, *args, **kwargs)

def short(model, loader, *args):
    fewer = fault == "has less data" and os.environ["RANK"] == "1"
    return train_one_epoch(model, list(loader)[:3] if fewer else loader, *args)

torch.optim.AdamW.step = step
train_one_epoch, lesson04.train_one_epoch = lesson04.train_one_epoch, short
runs.start(lesson04.main)
"""
IN_BACKWARD = r"ddp_course/lesson01.py, line \d+, in train_one_epoch: loss.backward\(\)"
ABSENT = {
    "stops": "rank 1, which is stopped (SIGSTOP), did not come to step 5 within 3 s: ",
    "loops": "rank 1 did not come to step 5 within 3 s: rank 0 has waited in ",
    "comes late": "a rank came to step 5 later than within 3 s: rank 0 has waited in ",
    "leaves": "rank 1 has left before step 5: rank 0 has waited in ",
    "has less data": "the ranks wait for each other, in different places: rank 0 in ",
}


@pytest.mark.parametrize("fault", ABSENT if THOROUGH else ["stops", "has less data"])
def test_under_torchrun_the_ranks_say_who_did_not_come(fault, workplace, tmp_path):
    """Within --timeout, and before torchrun blames the rank that has waited."""
    (tmp_path / "waits.py").write_text(WAITS)
    flags = ["--data", "digits", "--train-samples", "256", "--epochs", "1"]
    flags += ["--batch-size", "16", "--timeout", "3", "--out", tmp_path / "out"]
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *(tmp_path / "waits.py", fault, *flags),
        timeout=600,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("waits.py: ")]
    assert len(lines) == 1, done.stderr
    said = lines[0].replace("within its timeout", "within 3 s")  # where gloo tells none
    assert said.startswith(f"waits.py: {ABSENT[fault]}")
    assert re.search(IN_BACKWARD, lines[0])
    assert "Traceback" not in done.stderr.partition("waits.py: ")[0]


@pytest.mark.parametrize(
    "rank, expected",
    [
        ("0", "rank 1 did not come to the group within 2 s"),
        ("1", "rank 0 did not come to the group within 2 s: nothing answers at 127"),
    ],
)
def test_a_rank_says_who_did_not_come_to_the_group(rank, expected, workplace):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = PLACE | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    place["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch says it, too, in its words
    done = start("--timeout", "2", env=os.environ | place)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"lesson04.py: {expected}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_another_run_has_gives_one_line(workplace):
    with socket.create_server(("127.0.0.1", 0)) as another:
        port = another.getsockname()[1]
        place = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        done = start(
            env=os.environ
            | place
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        )
    assert_one_line(
        done,
        f"cannot listen on 127.0.0.1:{port}: Address already in use; another run may have it",
    )


def test_without_an_environment_a_process_is_alone(monkeypatch):
    assert environment.torchrun_environment() == (0, 0, 1, 1)


def test_lesson_01_refuses_to_train_twice(workplace):
    with pytest.raises(
        RankError,
        match="UsageError: lesson 01 is for one process, lesson 04 for many",
    ):
        launch(importlib.import_module("ddp_course.lesson01").main, [])


def test_a_folder_that_cannot_be_written_to_gives_one_line(workplace):
    (workplace / "file").write_text("in the way")
    done = start("--data", "digits", "--out", workplace / "file" / "out")
    assert_one_line(
        done,
        "file/out: Not a directory; make room, or choose another folder",
    )


FEW = ["--data", "digits", "--train-samples", "128", "--epochs", "1"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("may not mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("nproc", [None, 2] if THOROUGH else [2])
def test_a_full_disk_gives_one_line_and_loses_nothing(nproc, small_disk, workplace):
    (small_disk / "result.json").write_text("the result of last week")
    (small_disk / "model.pt").write_text("the model of last week")
    done = start(*FEW, "--out", small_disk, nproc=nproc)
    assert_one_line(
        done,
        "model.pt: No space left on device; make room, or choose another folder",
    )
    assert (small_disk / "result.json").read_text() == "the result of last week"
    assert (small_disk / "model.pt").read_text() == "the model of last week"
    assert sorted(path.name for path in small_disk.iterdir()) == [
        "model.pt",
        "result.json",
        "train.log",
    ]


def test_a_limit_on_file_sizes_gives_one_line(workplace):
    import resource

    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    done = start(*FEW, "--out", workplace / "out", preexec_fn=limit)
    assert_one_line(done, "model.pt: File too large")


def test_a_disk_that_is_full_at_the_end_has_cost_no_number(small_disk, capsys):
    """The table is printed before the files are written."""
    (small_disk / "filler").write_bytes(b"x" * (2**20 - 4096))
    with pytest.raises(UsageError, match="cannot write"):
        runs.write_result(
            small_disk, {"test_accuracy": 0.97}, [{"step": 0, "loss": 1.0}] * 1000
        )
    assert "0.97" in capsys.readouterr().out


def test_what_a_lesson_reports_besides_comes_in_the_order_of_all_results(tmp_path):
    args = SimpleNamespace(
        lesson="99", data="python", epochs=2, batch_size=4, out=tmp_path
    )
    cpu, model, train_set, losses = (
        torch.device("cpu"),
        torch.nn.Linear(1, 1),
        [0],
        [2, 1],
    )
    run = args, cpu, model, train_set, losses, 0.5
    more = {"tokens": 8, "method": "lora", "samples_per_second": None}
    result = runs.finish(*run, more=more)
    names = "lesson world_size backend device method data train_samples epochs"
    names += " batch_size train_loss tokens seconds params_sha256"
    assert list(result) == names.split()
    assert result["train_loss"] == 1 and result["data"] == "python"
    assert json.loads((tmp_path / "result.json").read_text()) == result
    with pytest.raises(ValueError, match="acuracy"):
        runs.finish(*run, more={"acuracy": 1})


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_is_no_file_gives_one_line(make, tmp_path, monkeypatch):
    """A pipe would be waited for."""
    make(tmp_path / "train.log")
    done = start_here(monkeypatch, *FEW, "--out", str(tmp_path))
    assert_one_line(done, f"cannot write to {tmp_path}: ")


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    writer = f"""
import pathlib
from ddp_course.runs import write_atomically
for number in range(10**9):
    write_atomically(pathlib.Path({str(path)!r}), f"{{number}} " * 100_000)
"""
    process = subprocess.Popen([sys.executable, "-c", writer])
    assert wait_until(path.exists, 60)
    for _ in range(300):  # a reader never sees half a file
        words = path.read_text().split()
        assert len(words) == 100_000 and len(set(words)) == 1
    process.kill()  # nor does one who comes after a crash
    process.wait()
    assert len(set(path.read_text().split())) == 1


# ---- Ctrl-C ----


def test_ctrl_c_under_torchrun_leaves_no_rank(workplace):
    command = [
        sys.executable,
        "-m",
        "ddp_course.cli.command",
        "run",
        "04",
        "--nproc",
        "2",
        "--data",
        "digits",
        "--epochs",
        "1000",
    ]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert wait_until(
            lambda: (
                (workplace / "runs/lesson04/train.log").exists()
                and len(descendants(process.pid)) >= 2
            ),
            60,
        )
        started = descendants(process.pid)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130
        output.seek(0)
        assert "Traceback" not in output.read()
    assert wait_until(
        lambda: (
            not [
                child
                for child in started
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
            ]
        ),
        10,
    )
    assert not (workplace / "runs/lesson04/result.json").exists()


INTERRUPTS_ITSELF = """
import os, signal, time
from ddp_course.runs import start

def main(flags):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(200)
    except KeyboardInterrupt:
        print("an exception, within whatever C++ had called")

start(main)
"""


@pytest.mark.parametrize("under_torchrun", [True, False])
def test_ctrl_c_becomes_no_exception_under_torchrun(under_torchrun, tmp_path):
    """C++ that calls Python, as DDP does, aborts where that raises: so under torchrun
    nothing is to be raised at all.
    """
    own_file = tmp_path / "0" / "error.json"
    own_file.parent.mkdir()
    variables = os.environ | (
        {"TORCHELASTIC_ERROR_FILE": str(own_file)} if under_torchrun else {}
    )
    done = python("-c", INTERRUPTS_ITSELF, env=variables, timeout=180)
    assert done.stderr == ""
    expected = (
        (130, "")
        if under_torchrun
        else (0, "an exception, within whatever C++ had called\n")
    )
    assert (done.returncode, done.stdout) == expected


def test_ctrl_c_alone_ends_quietly(workplace):
    command = [
        sys.executable,
        "ddp_course/lesson01.py",
        "--data",
        "digits",
        "--epochs",
        "1000",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        log = workplace / "runs/lesson01/train.log"
        # before the first epoch ends, torch may still be importing its C++ parts, which
        # abort if they meet the exception
        assert wait_until(lambda: log.exists() and "epoch 1" in log.read_text(), 60)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 130
    finally:
        process.kill()


# ---- importing ----


def loaded_by(*modules):
    """Which of these heavy packages come along when a fresh process imports modules of
    the course.
    """
    heavy = [
        "torch",
        "torchvision",
        "accelerate",
        "transformers",
        "peft",
        "bitsandbytes",
        "deepspeed",
    ]
    program = f"import sys, {', '.join(modules)}; print(*[name for name in {heavy} if name in sys.modules])"
    return python("-c", program).stdout.split()


def test_importing_the_course_and_its_commands_loads_no_torch():
    assert (
        loaded_by("ddp_course", "ddp_course.cli.command", "ddp_course.ranks.launch")
        == []
    )


def test_each_lesson_loads_what_it_teaches_and_nothing_heavier():
    names = [f"ddp_course.{path.stem}" for path in LESSONS]
    assert loaded_by(
        *[name for name in names if name[-2:] not in ("07", "08", "11")]
    ) == ["torch"]
    assert loaded_by("ddp_course.lesson07") == ["torch", "accelerate"]
    loaded = loaded_by("ddp_course.lesson08", "ddp_course.lesson11")
    assert "transformers" in loaded and "deepspeed" not in loaded
