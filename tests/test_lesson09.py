"""Lesson 09: a run that is killed, at any moment and at any byte, and started again,
ends as if nothing had happened.
"""

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, wait_until
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_course import files, lesson09, runs
from ddp_course.checkpoints import resumable
from ddp_course.checkpoints import whole as checkpoints
from ddp_course.models.convnets import MLP
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

SAVE_EVERY = 2
# on 2 ranks, three updates in each of four epochs, the last of them with a batch of 2;
# a checkpoint after every second
DIGITS = [
    "--data",
    "digits",
    "--train-samples",
    "84",
    "--epochs",
    "4",
    "--batch-size",
    "8",
    "--accumulate",
    "2",
]
DIGITS += ["--save-every", str(SAVE_EVERY)]


def small_network(dropout):
    return nn.Sequential(nn.Dropout(0.2 if dropout else 0.0), MLP(width=16))


def run(out, *options, before=lambda out: None, make_network=small_network):
    """The program of lesson 09 on a rank, with a small network; `before(out)` may plant
    something first.

    Notes the number of each update in <out>/steps.txt, and this rank's process in
    <out>/<attempt>-<rank>.pid.
    """
    original = lesson09.update

    def update(model, micro_batches, optimizer, scheduler, *rest):
        loss = original(model, micro_batches, optimizer, scheduler, *rest)
        if dist.get_rank() == 0:
            with open(out / "steps.txt", "a") as file:
                file.write(f"{scheduler.last_epoch}\n")
        return loss

    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    out.mkdir(exist_ok=True)
    (out / f"{attempt}-{rank}.pid").write_text(str(os.getpid()))
    lesson09.update, lesson09.ConvNet = update, make_network
    before(out)
    return lesson09.main([*DIGITS, *options, "--out", str(out)])


def launched(out, *options, attempt=0, nproc=2, before=lambda out: None, **more):
    return launch(
        partial(run, before=before),
        out,
        *options,
        nproc=nproc,
        env={"TORCHELASTIC_RESTART_COUNT": str(attempt)},
        **more,
    )


def outcome(out):
    """All that a run leaves: the losses of every update, and the parameters' bits."""
    return (out / "metrics.jsonl").read_text(), json.loads(
        (out / "result.json").read_text()
    )["params_sha256"]


def steps_of(out):
    """The numbers of the updates of all attempts, in the order of time."""
    return [int(line) for line in (out / "steps.txt").read_text().split()]


def repeated(steps):
    """How many updates each attempt after the first had to redo."""
    return [before - now + 1 for before, now in zip(steps, steps[1:]) if now <= before]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    launched(out, "--keep", "99")
    seconds = (out / "result.json").stat().st_mtime - (out / "0-0.pid").stat().st_mtime
    assert steps_of(out) == list(range(1, 13))
    assert [path.name for path in checkpoints.checkpoints(out / "checkpoints")] == [
        f"step-{step:08}" for step in range(2, 13, 2)
    ]
    return out, seconds


# ---- a hundred kills ----


def dies_writing(file, offset, checkpoint):
    """Plant this: the system kills the process when `offset` bytes of `file` have been
    written, in the checkpoint of this number.

    The kernel does so at exactly this byte: RLIMIT_FSIZE, and SIGXFSZ with its default
    action. An offset of None is the moment when all bytes have been written, and the
    file has not been renamed.
    """

    def plant(out):
        write, rename, seen = resumable.write_atomically, os.replace, []

        def write_and_die(path, content):
            if path.name == file:
                seen.append(path)
            if path.name == file and len(seen) == checkpoint:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if offset is None:
                    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                else:
                    resource.setrlimit(
                        resource.RLIMIT_FSIZE,
                        (offset, resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
                    )
            write(path, content)
            os.replace = rename

        resumable.write_atomically = write_and_die

    return plant


@pytest.mark.parametrize("file", ["rank0.pt", "rank1.pt", "shared.pt", "manifest.json"])
def test_killed_at_spread_out_bytes_of_its_files_it_ends_bit_for_bit_the_same(
    file, undisturbed, tmp_path
):
    """Twenty kills for each of the four files. Every fifth one comes a checkpoint
    later, so that the run gets on.
    """
    size = (undisturbed[0] / "checkpoints" / "step-00000002" / file).stat().st_size
    places = 19
    offsets = [
        *(round(place / (places - 1) * (size - 1)) for place in range(places)),
        None,
    ]
    for attempt, offset in enumerate(offsets):
        plant = dies_writing(file, offset, checkpoint=2 if attempt % 5 == 4 else 1)
        with pytest.raises(
            RankError, match="SIGKILL" if offset is None else "SIGXFSZ"
        ) as killed:
            launched(tmp_path, attempt=attempt, before=plant)
        assert killed.value.rank == (1 if file == "rank1.pt" else 0)
    launched(tmp_path, attempt=len(offsets))
    assert outcome(tmp_path) == outcome(undisturbed[0])
    assert (
        len(repeated(steps_of(tmp_path))) == len(offsets)
        and max(repeated(steps_of(tmp_path))) <= SAVE_EVERY
    )


def kill_later(out, attempt, rank, seconds):
    """In a thread: wait until this rank begins, wait for some seconds, and kill it."""
    pid_file = out / f"{attempt}-{rank}.pid"

    def kill():
        if wait_until(lambda: pid_file.exists() and pid_file.read_text()):
            time.sleep(seconds)
            try:
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was done before

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_killed_at_random_moments_on_any_rank_it_ends_bit_for_bit_the_same(
    undisturbed, tmp_path
):
    expected, seconds = outcome(undisturbed[0]), undisturbed[1]
    seed = random.randrange(10**6)
    draw, kills, runs_made = random.Random(seed), 0, 0
    while kills < 20:
        out, attempt = tmp_path / str(runs_made), 0
        while attempt < 15:
            killer = kill_later(
                out, attempt, draw.randrange(2), draw.uniform(0, 0.8 * seconds)
            )
            try:
                launched(out, attempt=attempt)
                break
            except RankError as error:
                assert "SIGKILL" in str(error), (seed, str(error))
                kills += 1
                attempt += 1
            finally:
                killer.join()
        else:
            launched(out, attempt=attempt)
        assert outcome(out) == expected, seed
        if (out / "steps.txt").exists():
            assert max(repeated(steps_of(out)), default=0) <= SAVE_EVERY, seed
        runs_made += 1


def save_in_place(path, state, offset=None):
    """The control, as in most tutorials. It is killed at byte `offset`, if given."""
    if offset is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (offset, offset))
    torch.save(state, path)


def test_torch_save_in_place_killed_at_the_same_bytes_leaves_nothing_to_go_on_from(
    undisturbed, tmp_path
):
    shared = undisturbed[0] / "checkpoints" / "step-00000002" / "shared.pt"
    state, size, path = (
        torch.load(shared, weights_only=True),
        shared.stat().st_size,
        tmp_path / "checkpoint.pt",
    )
    for part in range(5):
        launch(save_in_place, path, state, nproc=1)
        torch.load(path, weights_only=True)
        with pytest.raises(RankError, match="SIGXFSZ"):
            launch(save_in_place, path, state, round(part / 4 * (size - 1)), nproc=1)
        with pytest.raises((RuntimeError, EOFError, OSError)):
            torch.load(path, weights_only=True)


# ---- to the same bits, on any number of ranks, in any precision ----


def interrupted(at):
    """Plant an error in the update of this number."""

    def plant(out):
        original = lesson09.update

        def update(model, micro_batches, optimizer, scheduler, *rest):
            if scheduler.last_epoch + 1 == at:
                raise RuntimeError("planted")
            return original(model, micro_batches, optimizer, scheduler, *rest)

        lesson09.update = update

    return plant


def stopped_and_resumed(out, *options, nproc, **more):
    with pytest.raises(RankError, match="planted"):
        launched(out, *options, nproc=nproc, before=interrupted(at=6), **more)
    launched(out, *options, "--resume", nproc=nproc, **more)
    steps = steps_of(out)
    assert steps == [1, 2, 3, 4, 5, *range(5, max(steps) + 1)]
    return outcome(out)


def one_run(out, *options, nproc, **more):
    launched(out, *options, nproc=nproc, **more)
    return outcome(out)


@pytest.mark.parametrize("nproc, precision", [(1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_stopped_between_checkpoints_and_resumed_it_ends_bit_for_bit_the_same(
    nproc, precision, tmp_path
):
    options = ["--precision", precision]
    expected = one_run(tmp_path / "whole", *options, nproc=nproc)
    assert stopped_and_resumed(tmp_path / "parts", *options, nproc=nproc) == expected


def told(rank, at):
    """Plant the signal that a scheduler sends, to one rank in one update."""

    def plant(out):
        original = lesson09.update

        def update(model, micro_batches, optimizer, scheduler, *rest):
            if (dist.get_rank(), scheduler.last_epoch + 1) == (rank, at):
                os.kill(os.getpid(), signal.SIGUSR1)
            return original(model, micro_batches, optimizer, scheduler, *rest)

        lesson09.update = update

    return plant


@pytest.mark.parametrize(
    "nproc, rank, at", [(1, 0, 1), (2, 1, 5), (3, 2, 3), (2, 0, 6)]
)
def test_told_to_leave_all_ranks_save_after_that_update_and_the_end_is_the_same(
    nproc, rank, at, tmp_path
):
    expected = one_run(tmp_path / "whole", nproc=nproc)
    out = tmp_path / "parts"
    assert launched(out, nproc=nproc, before=told(rank, at)) == [None] * nproc
    assert steps_of(out) == list(range(1, at + 1))
    assert checkpoints.finished(out / "checkpoints")[-1].name == f"step-{at:08}"
    assert f"told to leave: step-{at:08} is written" in (out / "train.log").read_text()
    assert not any((out / name).exists() for name in ("model.pt", "result.json"))
    launched(out, "--resume", nproc=nproc)
    steps = steps_of(out)
    assert steps == list(range(1, max(steps) + 1))  # no update is done again
    assert outcome(out) == expected


def test_told_to_leave_in_its_last_update_a_run_ends_as_usual(undisturbed, tmp_path):
    launched(tmp_path / "run", before=told(rank=1, at=12))
    assert outcome(tmp_path / "run") == outcome(undisturbed[0])


def test_after_the_program_the_signal_has_the_handler_that_it_had():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with lesson09.told_to_leave() as entries:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: entries, 5)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert entries == [True]

        def in_a_thread():
            with lesson09.told_to_leave() as entries:
                return entries

        assert ThreadPoolExecutor(1).submit(in_a_thread).result() == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def several_buckets(dropout):
    """More than the MiB of DDP's first bucket, so that buckets are arranged anew after
    the first backward.
    """
    return MLP(width=256)


@pytest.mark.parametrize("arranged", [True, False])
def test_on_three_ranks_the_bits_are_the_same_because_the_buckets_are_arranged_before(
    arranged, tmp_path
):
    def forget(out):
        if not arranged:
            lesson09.arrange_buckets = lambda *_: None

    def plant(out):
        forget(out)
        interrupted(at=6)(out)

    launched(tmp_path / "whole", nproc=3, make_network=several_buckets, before=forget)
    with pytest.raises(RankError, match="planted"):
        launched(
            tmp_path / "parts", nproc=3, make_network=several_buckets, before=plant
        )
    launched(
        tmp_path / "parts",
        "--resume",
        nproc=3,
        make_network=several_buckets,
        before=forget,
    )
    assert (outcome(tmp_path / "parts") == outcome(tmp_path / "whole")) == arranged


def forgets(what):
    """Plant this: a part of the checkpoint is not restored."""

    def plant(out):
        load = resumable.load_checkpoint

        def load_checkpoint(checkpoint, settings):
            shared, own = load(checkpoint, settings)
            if what == "own random states":
                of_rank_0 = torch.load(checkpoint / "rank0.pt", weights_only=True)
                own["random"] = of_rank_0["random"]
            if what == "optimizer":
                shared["optimizer"]["state"] = {}
            if what == "scheduler":
                shared["scheduler"]["last_epoch"] = 1
            return shared, own

        resumable.load_checkpoint = load_checkpoint
        if what == "place in the epoch":
            lesson09.ResumableSampler.__iter__ = DistributedSampler.__iter__
        if what == "epoch":
            lesson09.ResumableSampler.set_epoch = lambda *_: None
        if what == "random states":
            lesson09.set_random_states = lambda *_: None
        if what == "generator of its own":
            loader = lesson09.DataLoader
            lesson09.DataLoader = lambda *args, generator, **options: loader(
                *args, **options
            )

    return plant


@pytest.mark.parametrize(
    "what",
    [
        "place in the epoch",
        "epoch",
        "random states",
        "own random states",
        "optimizer",
        "scheduler",
    ]
    + ["generator of its own"],
)
def test_the_comparison_finds_each_part_that_is_not_restored(
    what, undisturbed, tmp_path
):
    stopped = tmp_path / "stopped"
    shutil.copytree(
        undisturbed[0] / "checkpoints" / "step-00000008",
        stopped / "checkpoints" / "step-00000008",
    )
    launched(stopped, "--resume")
    assert outcome(stopped) == outcome(undisturbed[0])
    planted = tmp_path / "planted"
    shutil.copytree(
        undisturbed[0] / "checkpoints" / "step-00000008",
        planted / "checkpoints" / "step-00000008",
    )
    launched(planted, "--resume", before=forgets(what))
    assert outcome(planted)[1] != outcome(undisturbed[0])[1]


# ---- damaged, missing, of another run ----


def damage(checkpoint, how):
    shared = checkpoint / "shared.pt"
    if how == "cut short":
        shared.write_bytes(shared.read_bytes()[:-1])
    elif how == "one bit":
        content = bytearray(shared.read_bytes())
        content[len(content) // 2] ^= 1
        shared.write_bytes(content)
    elif how == "a rank's file is missing":
        (checkpoint / "rank1.pt").unlink()
    elif how == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "half a manifest":
        (checkpoint / "manifest.json").write_text(
            (checkpoint / "manifest.json").read_text()[:50]
        )
    elif how == "an empty manifest":
        (checkpoint / "manifest.json").write_text("{}")
    elif how == "a folder in its place":
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "manifest.json").mkdir()


HOW = [
    "cut short",
    "one bit",
    "a rank's file is missing",
    "no manifest",
    "half a manifest",
    "an empty manifest",
]
HOW += ["a folder in its place"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_checkpoint_is_seen(how, undisturbed, tmp_path):
    checkpoint = tmp_path / "step-00000012"
    shutil.copytree(undisturbed[0] / "checkpoints" / checkpoint.name, checkpoint)
    assert checkpoints.is_whole(checkpoint)
    damage(checkpoint, how)
    assert not checkpoints.is_whole(checkpoint)


def test_the_newest_good_one_is_used_and_the_end_is_the_same(undisturbed, tmp_path):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step-00000012", "one bit")
    damage(tmp_path / "checkpoints" / "step-00000010", "no manifest")
    launched(tmp_path, "--resume")
    assert steps_of(tmp_path) == [9, 10, 11, 12]
    assert outcome(tmp_path) == outcome(undisturbed[0])
    assert "resuming from step-00000008" in (tmp_path / "train.log").read_text()
    kept = checkpoints.checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in kept] == ["step-00000010", "step-00000012"]
    assert all(map(checkpoints.is_whole, kept))


def test_with_nothing_to_go_on_from_it_begins_and_without_resume_it_begins_anew(
    undisturbed, tmp_path
):
    launched(tmp_path, "--resume")
    assert outcome(tmp_path) == outcome(undisturbed[0])
    launched(tmp_path)
    assert steps_of(tmp_path) == [*range(1, 13), *range(1, 13)]
    launched(tmp_path, "--resume")
    assert steps_of(tmp_path)[24:] == []
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.parametrize(
    "options, nproc, said",
    [
        (
            ["--batch-size", "4"],
            2,
            "was made with batch-size 8, not 4: use that, or start anew",
        ),
        (["--seed", "1"], 2, "was made with seed 0, not 1"),
        ([], 3, "was made with ranks 2, not 3"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(
    options, nproc, said, undisturbed, tmp_path
):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(RankError) as error:
        launched(tmp_path, "--resume", *options, nproc=nproc)
    assert (
        error.value.message.startswith("ddp_course.UsageError: ")
        and said in error.value.message
    )
    assert len(checkpoints.checkpoints(tmp_path / "checkpoints")) == 6


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def forge(checkpoint, name, content):
    """Replace a file of a checkpoint, and its checksum in the manifest."""
    torch.save(content, checkpoint / name)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {name: digest}))
    assert checkpoints.is_whole(checkpoint)


def with_content(checkpoint, how, harm):
    """Make a checkpoint unusable, although all its checksums fit."""
    shared = torch.load(checkpoint / "shared.pt", weights_only=True)
    own = torch.load(checkpoint / "rank1.pt", weights_only=True)
    weights = shared["model"]
    if how == "an older program's":
        shared.pop("settings")
    elif how == "with other settings than today's":
        shared["settings"]["epochs"] = 4
    elif how == "without a scheduler":
        shared.pop("scheduler")
    elif how == "a list":
        shared = [1, 2, 3]
    elif how == "weights of another shape":
        weights["1.1.weight"] = weights["1.1.weight"][:3]
    elif how == "averages of another shape":
        shared["optimizer"]["state"][0]["exp_avg"] = torch.zeros(2)
    elif how == "NaN weights":
        weights["1.1.weight"][0, 0] = float("nan")
    elif how == "beyond its end":
        shared["updates"] = 99
    elif how == "losses that are one number in memory":
        own["losses"] = own["losses"][:1].expand(shared["updates"])
    elif how == "code":
        shared = {"model": Payload(str(harm))}
    elif how == "rank 1 has random states of nothing":
        own["random"] = {}
    forge(checkpoint, "shared.pt", shared)
    forge(checkpoint, "rank1.pt", own)
    if how == "rank 1 is not in the manifest":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest.pop("rank1.pt")
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "how, said",
    [
        ("an older program's", "another program made it"),
        ("with other settings than today's", "another program made it"),
        ("without a scheduler", "KeyError: 'scheduler'"),
        ("a list", "another program made it"),
        ("weights of another shape", "size mismatch for 1.1.weight"),
        ("averages of another shape", "the averages for 1.1.weight have another"),
        ("NaN weights", "1.1.weight, or an average for it, is NaN or infinite"),
        ("beyond its end", "it has 12 losses of 99 updates"),
        ("losses that are one number in memory", "the memory of the losses is of"),
        ("code", "shared.pt holds more than tensors and numbers"),
        ("rank 1 has random states of nothing", "KeyError: 'cpu'"),
        ("rank 1 is not in the manifest", "its manifest does not name rank1.pt"),
    ],
)
def test_where_content_does_not_fit_the_log_says_so_and_an_older_one_is_used(
    how, said, undisturbed, tmp_path
):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000012"
    with_content(checkpoint, how, harm=tmp_path / "harm")
    launched(tmp_path, "--resume")
    lines = (tmp_path / "train.log").read_text().splitlines()
    [warning] = [line for line in lines if "WARNING" in line]
    assert "checkpoint step-00000012 cannot be used because" in warning
    assert said in warning and not (tmp_path / "harm").exists()
    assert steps_of(tmp_path) == [11, 12]
    assert outcome(tmp_path) == outcome(undisturbed[0])


def test_the_payload_of_that_test_would_do_harm(tmp_path):
    """The control."""
    torch.save({"model": Payload(str(tmp_path / "harm"))}, tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "harm").exists()


def test_where_none_can_be_used_it_stops_with_one_line_and_deletes_nothing(
    undisturbed, tmp_path
):
    kept = tmp_path / "checkpoints" / "step-00000012"
    shutil.copytree(undisturbed[0] / "checkpoints" / kept.name, kept)
    with_content(kept, "NaN weights", harm=None)
    with pytest.raises(RankError) as error:
        launched(tmp_path, "--resume")
    message = error.value.message
    assert message.startswith("ddp_course.UsageError: no checkpoint in ")
    assert "can be used: see train.log; without --resume" in message
    assert checkpoints.is_whole(kept)


def test_a_copy_a_pipe_and_a_manifest_without_end_are_passed_over(
    undisturbed, tmp_path
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(undisturbed[0] / "checkpoints", folder)
    shutil.copytree(folder / "step-00000002", folder / "step-99999999.bak")
    (folder / "step-00000012" / "shared.pt").unlink()
    os.mkfifo(folder / "step-00000012" / "shared.pt")
    (folder / "step-00000010" / "manifest.json").write_text("[" * 100_000)
    (folder / "step-00000008" / "manifest.json").unlink()
    os.mkfifo(folder / "step-00000008" / "manifest.json")
    launched(tmp_path, "--resume")
    assert steps_of(tmp_path) == [7, 8, 9, 10, 11, 12]
    said = (tmp_path / "train.log").read_text()
    assert "step-00000012 cannot be used because shared.pt is missing" in said
    assert "step-00000010 cannot be used because its manifest cannot be read" in said
    assert (folder / "step-99999999.bak" / "manifest.json").exists()
    assert outcome(tmp_path) == outcome(undisturbed[0])


def test_a_file_in_the_way_of_the_next_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    in_the_way = tmp_path / "checkpoints" / "step-00000002"
    in_the_way.write_text("mine")
    with pytest.raises(RankError) as error:
        launched(tmp_path)
    said = f"UsageError: {in_the_way} is in the way of a folder: move it away"
    assert said in error.value.message
    assert in_the_way.read_text() == "mine"


# ---- longer than planned ----


def test_a_finished_run_is_resumed_for_more_epochs_with_its_schedule_planned_anew(
    undisturbed, tmp_path
):
    launched(tmp_path, "--epochs", "2")
    [after_two] = checkpoints.checkpoints(tmp_path / "checkpoints")[-1:]
    launched(tmp_path, "--epochs", "4", "--resume")
    assert steps_of(tmp_path) == list(range(1, 13))
    said = (tmp_path / "train.log").read_text()
    assert (
        after_two.name == "step-00000006" and f"resuming from {after_two.name}" in said
    )
    assert "the learning rate is 5.0e-04" in said
    rates = {}
    for step in ("step-00000010", "step-00000012"):
        for out in (tmp_path, undisturbed[0]):
            path = out / "checkpoints" / step / "shared.pt"
            optimizer = torch.load(path, weights_only=True)["optimizer"]
            rates.setdefault(step, []).append(optimizer["param_groups"][0]["lr"])
    assert all(longer == planned for longer, planned in rates.values()), rates
    # its first two epochs had a schedule of their own, so the end is another
    assert outcome(tmp_path)[1] != outcome(undisturbed[0])[1]


def test_a_run_that_is_further_than_its_epochs_is_told_so(undisturbed, tmp_path):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(RankError) as error:
        launched(tmp_path, "--epochs", "1", "--resume")
    assert "are 12 updates into their run; --epochs 1 has only 3" in error.value.message
    assert len(checkpoints.checkpoints(tmp_path / "checkpoints")) == 6


# ---- NaN ----


def spoils(out):
    """Plant this: rank 1's loss is NaN in update 5, and so are all weights then."""
    original = lesson09.update

    def update(model, micro_batches, optimizer, scheduler, *rest):
        if (dist.get_rank(), scheduler.last_epoch + 1) == (1, 5):
            micro_batches = [(images * torch.nan, y) for images, y in micro_batches]
        return original(model, micro_batches, optimizer, scheduler, *rest)

    lesson09.update = update


def test_a_nan_ends_the_run_with_one_line_and_is_in_no_checkpoint(tmp_path):
    with pytest.raises(RankError) as error:
        launched(tmp_path, before=spoils)
    said = "UsageError: the loss is not a number in step 2 of the epoch, on rank 1"
    assert said in error.value.message
    names = [path.name for path in checkpoints.checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000004"]


# ---- workers ----


class Noisy(Dataset):
    """Samples that a worker draws."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


def drawn_by_workers(rank, epochs, seeded):
    generator = torch.Generator()
    loader = DataLoader(Noisy(), 4, num_workers=2, generator=generator)
    drawn = []
    for epoch in epochs:
        if seeded:
            lesson09.seed_workers(generator, 0, epoch, rank)
        drawn.append(torch.cat(list(loader)).tolist())
    return drawn


def test_workers_draw_different_numbers_on_each_rank_and_the_same_in_a_resumed_epoch():
    whole = [drawn_by_workers(rank, [0, 1, 2], seeded=True) for rank in (0, 1)]
    numbers = [number for rank in whole for epoch in rank for number in epoch]
    assert len(set(numbers)) == len(numbers) == 2 * 3 * 8
    assert drawn_by_workers(1, [1, 2], seeded=True) == whole[1][1:]
    # the control: a fresh generator
    assert drawn_by_workers(0, [0], seeded=False) == drawn_by_workers(
        1, [1], seeded=False
    )


def test_the_program_seeds_its_loaders_workers_by_seed_epoch_and_rank(tmp_path):
    def note(out):
        seed_workers, rank = lesson09.seed_workers, os.environ["RANK"]

        def seeded(generator, *numbers):
            seed_workers(generator, *numbers)
            with open(out / f"seeds-{rank}.txt", "a") as file:
                file.write(f"{numbers} {generator.initial_seed()}\n")

        lesson09.seed_workers = seeded

    launched(tmp_path, "--epochs", "2", before=note)
    launched(tmp_path, "--epochs", "2", "--resume", before=note)
    for rank in range(2):
        lines = (tmp_path / f"seeds-{rank}.txt").read_text().splitlines()
        assert [line.rpartition(" ")[0] for line in lines] == [
            f"(0, {epoch}, {rank})" for epoch in (0, 1, 1)
        ]
        assert lines[1] == lines[2] != lines[0]


@pytest.mark.parametrize("keep", ["1", "3"])
def test_it_keeps_as_many_checkpoints_as_it_is_told_to(keep, tmp_path):
    launched(tmp_path, "--keep", keep)
    left = checkpoints.checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in left] == [f"step-{step:08}" for step in (8, 10, 12)][
        -int(keep) :
    ]
    for path in left:
        assert sorted(file.name for file in path.iterdir()) == [
            "manifest.json",
            "rank0.pt",
            "rank1.pt",
            "shared.pt",
        ]


def test_a_full_disk_ends_it_with_one_line_and_the_older_checkpoint_stays(tmp_path):
    def full(out):
        write = resumable.write_atomically

        def fill(path, content):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if path.parent.name == "step-00000004":
                signal.signal(
                    signal.SIGXFSZ, signal.SIG_IGN
                )  # then write says: File too large
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            try:
                write(path, content)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        resumable.write_atomically = fill

    with pytest.raises(RankError) as error:
        launched(tmp_path, before=full)
    assert (
        "UsageError: cannot write" in error.value.message
        and "File too large" in error.value.message
    )
    [good] = filter(
        checkpoints.is_whole, checkpoints.checkpoints(tmp_path / "checkpoints")
    )
    assert good.name == "step-00000002"


def test_ranks_that_do_not_see_the_same_folder_are_told_so(tmp_path):
    def apart(out):
        lesson09.main([*DIGITS, "--out", str(out / os.environ["RANK"])])

    with pytest.raises(RankError) as error:
        launch(apart, tmp_path)
    assert (
        error.value.rank == 1
        and "--out must be on a disk that all machines share" in error.value.message
    )


def test_the_content_and_then_the_name_reach_the_disk_before_it_returns(
    tmp_path, monkeypatch
):
    seen, fsync, replace = [], os.fsync, os.replace

    def note(descriptor):
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(
        os, "replace", lambda *args: (seen.append("renamed"), replace(*args))[1]
    )
    runs.write_atomically(tmp_path / "file", b"content")
    assert [Path(entry).name for entry in seen] == [
        f".file.{socket.gethostname()}.{os.getpid()}.unfinished",
        "renamed",
        tmp_path.name,
    ]


def test_a_run_that_begins_leaves_alone_what_another_is_writing(tmp_path, monkeypatch):
    """And deletes what a process has left behind that is no more, and what another
    machine has not touched for an hour.
    """
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    name = files.temporary_name
    (tmp_path / name("old", process=ended.pid)).touch()
    there, abandoned = (name(of, "elsewhere", ended.pid) for of in ("new", "old"))
    (tmp_path / there).touch()
    (tmp_path / abandoned).touch()
    os.utime(tmp_path / abandoned, (0, time.time() - 3700))
    fsync = os.fsync

    def flushed(descriptor):
        fsync(descriptor)
        files.remove_unfinished(tmp_path)

    monkeypatch.setattr(os, "fsync", flushed)
    runs.write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert {path.name for path in tmp_path.iterdir()} == {"file", there}


# ---- how often ----


def updates_on_ranks(saving, update):
    with process_group() as (rank, _):
        # ranks measure differently, and must save together
        return lesson09.updates_between(saving + rank, update, torch.device("cpu"))


def test_the_interval_is_youngs_and_the_same_on_all_ranks():
    """For the mean of what the ranks have measured, and one failure a day."""
    assert resumable.best_interval(2.0, 100.0) == 20.0
    expected = round((2 * 1.5 * 86400) ** 0.5 / 0.1)
    assert launch(updates_on_ranks, 1.0, 0.1, nproc=2) == [expected] * 2
    assert launch(updates_on_ranks, 0.0, 1e6, nproc=2) == [1, 1]


def test_saving_automatically_writes_the_first_checkpoint_and_the_last(tmp_path):
    """Ten updates after the start, and then as often as pays: not again in a short run."""
    flags = "--data digits --epochs 1 --save-every auto --keep 9 --out".split()
    result = launch(lesson09.main, [*flags, str(tmp_path)], nproc=1)[0]
    steps = [path.name for path in checkpoints.checkpoints(tmp_path / "checkpoints")]
    last = -(-result["train_samples"] // result["batch_size"])
    assert steps == ["step-00000010", f"step-{last:08}"]


# ---- torchrun restarts it ----


def test_torchrun_restarts_a_killed_job_by_itself_and_it_ends_bit_for_bit_the_same(
    tmp_path,
):
    """The program as it is; one of its ranks is killed from outside."""
    options = [
        "--data",
        "digits",
        "--train-samples",
        "320",
        "--epochs",
        "2",
        "--batch-size",
        "16",
    ]
    options += ["--save-every", "3"]
    launch(lesson09.main, [*options, "--out", str(tmp_path / "whole")])
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "2",
    ]
    command += [COURSE / "ddp_course" / "lesson09.py", *options, "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        open(tmp_path / "said", "w") as said,
        subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=environment
        ) as torchrun,
    ):
        try:
            wait_until(lambda: list(out.glob("checkpoints/*/manifest.json")), 60)
            ranks = [
                p
                for p in psutil.Process(torchrun.pid).children()
                if "lesson09.py" in " ".join(p.cmdline())
            ]
            ranks[1].kill()
            assert torchrun.wait(90) == 0, (tmp_path / "said").read_text()
        finally:
            torchrun.kill()
    assert len(ranks) == 2
    assert len(re.findall("resuming from step-", (out / "train.log").read_text())) == 1
    assert outcome(out) == outcome(tmp_path / "whole")


ALL_UPDATES = list(range(1, 13))


def counting_restarts_of_one(restarted):
    """Give one rank, which is in the process group already, a restart to its count, as
    torchrun does, which counts on each machine for itself.
    """

    def before(out):
        load_images = lesson09.load_images

        def count_and_load(*args):
            count = int(dist.get_rank() == restarted)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)
            return load_images(*args)

        lesson09.load_images = count_and_load

    return before


@pytest.mark.parametrize("restarted", [0, 1])
def test_it_is_enough_if_one_rank_was_restarted(restarted, tmp_path):
    """Where one machine has been replaced. Otherwise some rank would wait for others."""
    launched(tmp_path, "--epochs", "1")
    launched(tmp_path, before=counting_restarts_of_one(restarted), timeout=600)
    assert steps_of(tmp_path) == ALL_UPDATES


def of_job(name):
    return lambda out: os.environ.update(TORCHELASTIC_RUN_ID=name)


def test_a_machine_that_joins_a_job_deletes_no_checkpoints(tmp_path):
    """torchrun does not count that as a restart; the job's id is the same."""
    launched(tmp_path, "--epochs", "1", before=of_job("a"))
    there = sorted((tmp_path / "checkpoints").rglob("*"))
    with pytest.raises(RankError, match="was made with ranks 2, not 3"):
        launched(tmp_path, before=of_job("a"), nproc=3)
    assert sorted((tmp_path / "checkpoints").rglob("*")) == there
    launched(tmp_path, before=of_job("a"))
    # it is the job's own now that another one has taken the run over
    launched(tmp_path, "--resume", before=of_job("b"))
    launched(tmp_path, before=of_job("b"))
    assert steps_of(tmp_path) == ALL_UPDATES


@pytest.mark.parametrize("first, second", [("a", "b"), ("none", "none")])
def test_another_job_begins_anew(first, second, tmp_path):
    launched(tmp_path, "--epochs", "1", before=of_job(first))
    launched(tmp_path, before=of_job(second))
    assert steps_of(tmp_path) == [1, 2, 3] + ALL_UPDATES


# ---- torch's own checkpoints ----


def save_shards(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    with process_group():
        mesh = DeviceMesh("cpu", range(dist.get_world_size()))
        whole = torch.arange(35.0).view(7, 5)
        dcp.save(
            {"value": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path
        )


def load_shards(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DeviceMesh, Shard, zeros

    with process_group():
        mesh = DeviceMesh("cpu", range(dist.get_world_size()))
        state = {"value": zeros(7, 5, device_mesh=mesh, placements=[Shard(0)])}
        dcp.load(state, checkpoint_id=path)
        return state["value"].to_local()


@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 3), (3, 2)])
def test_a_sharded_checkpoint_is_read_by_any_number_of_ranks(
    writers, readers, tmp_path
):
    launch(save_shards, str(tmp_path), nproc=writers)
    parts = launch(load_shards, str(tmp_path), nproc=readers)
    assert torch.equal(torch.cat(parts), torch.arange(35.0).view(7, 5))
    assert len(parts) == readers and all(len(part) < 7 for part in parts) == (
        readers > 1
    )
