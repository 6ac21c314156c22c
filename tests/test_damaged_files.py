"""Whatever is in a file that a program reads: it is used, or refused in one line, and
nothing in it is run.
"""

import hashlib
import io
import json
import os
import pickle
import random
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import damages
import pytest
import torch
import torch.distributed as dist
from conftest import THOROUGH
from safetensors.torch import save_file

os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.runtime.fp16.loss_scaler import LossScaler  # noqa: E402

from ddp_course import UsageError, lesson09
from ddp_course.checkpoints import of_trainer, one_file, resumable
from ddp_course.checkpoints import (
    sharded as sharded_checkpoints,
)
from ddp_course.checkpoints import (
    whole as checkpoints,
)
from ddp_course.checkpoints.deepspeed_configurations import (
    check_batch,
    read_configuration,
)
from ddp_course.checkpoints.of_deepspeed import settings_in
from ddp_course.cli import start
from ddp_course.cli.grading import handed_in, rules, run
from ddp_course.data import shards, text
from ddp_course.data.tokenizers import BPE
from ddp_course.detectors.traces import STEP, read_trace, time_use
from ddp_course.files import Unusable, check_alike
from ddp_course.judge import progress
from ddp_course.ranks.environment import process_group

ROUNDS = 10_000 if THOROUGH else 0
SEED = int(os.environ.get("DDP_COURSE_SEED", 7))


# ---- what is read: a good file each, and the program's own way to read it ----


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def stepped():
    made = parts()
    made["model"](torch.ones(1, 3)).sum().backward()
    made["optimizer"].step()
    return made


SETTINGS = {"seed": 0, "ranks": 1}


class OneFileCheckpoint:
    """Lesson 14's."""

    def make(self, folder):
        progress = {"losses": [1.5, 1.0], "seconds": 1.0, "began": 2.0}
        progress |= {"settings": SETTINGS}
        one_file.save_checkpoint(folder / "checkpoint.pt", stepped(), progress)

    def read(self, folder):
        return one_file.resume(folder / "checkpoint.pt", parts(), SETTINGS)

    def is_whole(self, progress):
        if progress is not None:
            assert all(isinstance(loss, int | float) for loss in progress["losses"])
            assert progress["began"] + progress["seconds"] > 0


class Checkpoint:
    """Lesson 9's folder."""

    def make(self, folder):
        losses = [torch.tensor(1.0), torch.tensor(0.5)]
        device = torch.device("cpu")
        shared, own = lesson09.snapshot(stepped(), losses, 1.0, SETTINGS, device)
        resumable.save_checkpoint(folder / "step-00000002", shared, own, 2)

    def read(self, folder):
        restore = partial(lesson09.restore, parts(), torch.device("cpu"))
        return resumable.resume(folder, SETTINGS, restore)

    def is_whole(self, found):
        assert found is None or type(found[0]["seconds"]) in (int, float)


class WithoutChecksums(Checkpoint):
    """The same where the damage was there before the checksums were computed."""

    def read(self, folder):
        place, checksums = folder / "step-00000002", {}
        for path in place.glob("*.pt"):
            if path.is_file():
                checksums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest = place / "manifest.json"
        if manifest.is_file():  # or it is what was damaged
            manifest.write_text(json.dumps(checksums))
        return super().read(folder)


class Arguments:
    sharding, shape, epochs, resume = "ddp", "small", 9, True

    def __init__(self, folder):
        self.out = folder


class ShardedCheckpoint:
    """Lesson 12's."""

    def make(self, folder):
        made = stepped()
        sharded_checkpoints.save(Arguments(folder), *made.values(), 1, 8)

    def read(self, folder):
        return sharded_checkpoints.begin(Arguments(folder), *parts().values())

    def is_whole(self, found):
        assert [type(number) for number in found] == [int, int]


class Trace:
    def make(self, folder):
        event = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 5.0, "dur": 2.0}
        step = event | {"name": STEP, "cat": "user_annotation", "dur": 9.5}
        other = event | {"name": "gloo:all_reduce", "cat": "user_annotation"}
        content = {"traceEvents": [step, event, other], "baseTimeNanoseconds": 1}
        (folder / "trace.json").write_text(json.dumps(content))

    def read(self, folder):
        return time_use(**read_trace(folder / "trace.json"))

    def is_whole(self, use):
        assert all(0 <= value < float("inf") for value in use.values())


class Report:
    def make(self, folder):
        result = {"answer": "a", "status": "passed", "details": {"where": "x"}}
        content = {"seed": 1, "submissions": {"a": {"03": {"traffic": result}}}}
        (folder / "report.json").write_text(json.dumps(content))

    def read(self, folder):
        return run.report_in(folder / "report.json")

    def is_whole(self, report):
        int(report.get("seed", 0))


class Weights:
    def make(self, folder):
        (folder / "weights.json").write_text('{"03 traffic": 2.5}')

    def read(self, folder):
        return rules.weights_in(folder / "weights.json")

    def is_whole(self, weights):
        assert all(0 <= weight < float("inf") for weight in weights.values())


class Notebook:
    def make(self, folder):
        cell = {"cell_type": "code", "source": ["a = 1\n"], "metadata": {}, "id": "a"}
        content = {"cells": [cell, cell], "metadata": {}, "nbformat": 4}
        (folder / "03.ipynb").write_text(json.dumps(content))

    def read(self, folder):
        return handed_in.read(folder / "03.ipynb")

    def is_whole(self, cells):
        assert all(isinstance(cell.source, str) for cell in cells)


class Configuration:
    """Lesson 13's --deepspeed_config."""

    def make(self, folder):
        content = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
        (folder / "ds.json").write_text(json.dumps(content))

    def read(self, folder):
        return check_batch(read_configuration(folder / "ds.json"), 2)

    def is_whole(self, sizes):
        assert all(size >= 1 for size in sizes)


class Tokens:
    """Lesson 10's folder of tokens."""

    def make(self, folder):
        files = [folder / "a.txt", folder / "b.txt"]
        for path, content in zip(files, ["def" * 9, "abc" * 99]):
            path.write_text(content)
        shards.write_tokens(folder, text.Documents(files), text.Bytes(), 64)
        for path in [*files, folder / shards.PROGRESS]:  # which nobody reads any more
            path.unlink()

    def read(self, folder):
        train, validation, *_ = shards.read_tokens(folder)
        return train[:5], validation[:5]

    def is_whole(self, found):
        assert all(len(part) <= 5 for part in found)


class Progress:
    """What `ddp-course status` shows."""

    def make(self, folder):
        (folder / "runs").mkdir(exist_ok=True)
        content = {"03 traffic": {"status": "passed", "passed": True, "hints": 1}}
        (folder / "runs" / "progress.json").write_text(json.dumps(content))

    def read(self, folder):
        progress.learner_folder = lambda: folder
        return progress.load()

    def is_whole(self, done):
        assert all(isinstance(entry["hints"], int) for entry in done.values())


class Copies:
    """What `ddp-course start` knows about a course folder."""

    def make(self, folder):
        content = {"copies": {"lessons/01.ipynb": "0" * 64}}
        (folder / start.COURSE_FILE).write_text(json.dumps(content))

    def read(self, folder):
        return start.read_copies(folder)

    def is_whole(self, copies):
        assert all(isinstance(name, str) for name in copies)


class Tokenizer:
    """Lesson 10's --tokenizer."""

    def make(self, folder):
        BPE.train(["def f(x): return x"] * 9, 270, folder / "tokenizer.json")

    def read(self, folder):
        return BPE(folder / "tokenizer.json").encode(b"return")

    def is_whole(self, tokens):
        assert tokens.ndim == 1


class TrainerCheckpoint:
    """Lessons 8 and 11: what is damaged is not what Trainer gets."""

    def make(self, folder):
        place = folder / "checkpoint-5"
        place.mkdir()
        state = {"epoch": 1.0, "global_step": 5, "max_steps": 9, "log_history": []}
        (place / "trainer_state.json").write_text(json.dumps(state))
        torch.save(stepped()["optimizer"].state_dict(), place / "optimizer.pt")
        torch.save({"last_epoch": 5}, place / "scheduler.pt")
        save_file({"weight": torch.ones(3)}, place / "model.safetensors")

    def read(self, folder):
        return of_trainer.newest_usable(str(folder))

    def is_whole(self, place):
        assert place is None or place.name == "checkpoint-5"


class DeepSpeedCheckpoint:
    """Lesson 13's, before DeepSpeed reads it."""

    def make(self, folder):
        (folder / "epoch-1").mkdir()
        (folder / "latest").write_text("epoch-1")
        (folder / "settings.json").write_text('{"ranks": 2, "seed": 0}')
        scaler = LossScaler(1.0)
        torch.save({"loss_scaler": scaler}, folder / "epoch-1" / "zero_optim_states.pt")
        torch.save(
            {"module": {"a": torch.ones(2)}}, folder / "epoch-1" / "mp_states.pt"
        )

    def read(self, folder):
        return settings_in(folder, universal=False)

    def is_whole(self, settings):
        assert isinstance(settings, dict)


SUBJECTS = [
    subject()
    for subject in (
        OneFileCheckpoint, Checkpoint, WithoutChecksums, ShardedCheckpoint, Trace, Report,
        Weights, Notebook, Configuration, Tokens, Tokenizer, Progress, Copies,
        TrainerCheckpoint, DeepSpeedCheckpoint,
    )
]  # fmt: skip


# ---- the tests ----


@pytest.fixture(scope="module", autouse=True)
def group():
    """The process group of one rank: checkpoints are read by all ranks together."""
    before = progress.learner_folder
    with process_group():
        yield
    progress.learner_folder = before


@contextmanager
def at_most(seconds):
    """A read that takes longer hangs."""

    def too_late(*_):
        raise AssertionError(f"it hangs: more than {seconds} s")

    earlier = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def read_damaged(subject, folder, draw, kind=None):
    """Make the files of a subject, damage one of them, and read them: what was damaged,
    and how.
    """
    damages.empty(folder)
    subject.make(folder)
    there = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(there)
    case = f"{type(subject).__name__}, {path.relative_to(folder)}: "
    case += damages.damage(path, draw, kind)
    try:
        with at_most(20):
            found = subject.read(folder)
        subject.is_whole(found)
    except (UsageError, Unusable) as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 600, case
    except BaseException as error:
        error.add_note(case)
        raise
    assert damages.CANARY not in os.environ, f"{case}: its code has run"
    return case


def name_of(subject):
    return type(subject).__name__


@pytest.mark.parametrize("subject", SUBJECTS, ids=name_of)
def test_what_is_whole_is_read(subject, tmp_path):
    subject.make(tmp_path)
    subject.is_whole(subject.read(tmp_path))


@pytest.mark.parametrize("subject", SUBJECTS, ids=name_of)
def test_a_damaged_file_is_refused_in_one_line_and_nothing_in_it_runs(
    subject, tmp_path
):
    for number, kind in enumerate(damages.KINDS):
        draw = random.Random(f"{SEED} {number}")
        read_damaged(subject, tmp_path, draw, kind)


@pytest.mark.skipif(not THOROUGH, reason="ten thousand damaged files: make thorough")
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_damaged_files(part, tmp_path):
    """A case that fails is repeated with DDP_COURSE_SEED, part and number."""
    for number in range(ROUNDS // 10):
        draw = random.Random(f"{SEED} {part} {number}")
        subject = draw.choice(SUBJECTS)
        try:
            read_damaged(subject, tmp_path, draw)
        except BaseException as error:
            error.add_note(f"DDP_COURSE_SEED={SEED}, part {part}, number {number}")
            raise


def test_a_part_of_the_tokens_without_a_file_is_refused_in_one_line(tmp_path):
    subject = Tokens()
    subject.make(tmp_path)
    [path] = tmp_path.rglob(shards.MANIFEST)
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"validation": {}}))
    with pytest.raises(UsageError, match="is damaged: write it again"):
        subject.read(tmp_path)


def test_the_canary_sings_where_code_runs(tmp_path, monkeypatch):
    """The damages do harm, if a program lets them."""
    monkeypatch.setattr(torch, "load", partial(torch.load, weights_only=False))
    path = tmp_path / "file.pt"
    for kind in ("code in torch's file", "code in an archive"):
        path.write_bytes(b"x")
        damages.damage(path, random.Random(0), kind)
        try:
            torch.load(path, weights_only=False)
        except Exception:
            pass
        assert os.environ.pop(damages.CANARY) == "1", kind


def test_what_is_alike():
    like = {"losses": [0.0], "epoch": 0, "name": "", "of": {}, "pair": (1, 2)}
    good = {"losses": [1, 2.5], "epoch": 3, "name": "x", "of": {"a": 1}, "pair": [3, 4]}
    check_alike(good, like)
    for name, bad in [
        ("losses", [[1]]), ("losses", ["1"]), ("losses", [float("nan")]), ("losses", None),
        ("epoch", 1.0), ("epoch", True), ("epoch", 10**400), ("name", 3), ("of", []),
        ("pair", [1]), ("pair", (1, None)),
    ]:  # fmt: skip
        with pytest.raises(Unusable, match="is of another kind"):
            check_alike(good | {name: bad}, like)
    with pytest.raises(Unusable):
        check_alike({"losses": [1.0]}, like)


def test_a_checkpoint_that_is_none_is_not_overwritten_without_a_word(tmp_path):
    """--resume starts anew only where there is nothing."""
    path = Path(tmp_path, "checkpoint.pt")
    assert one_file.resume(path, parts(), SETTINGS) is None
    for kind in (
        "nothing, saved",
        "a pipe",
        "a link to itself",
        "without end",
        "a folder",
    ):
        damages.empty(tmp_path)
        path.write_bytes(b"x")
        damages.damage(path, random.Random(0), kind)
        with pytest.raises(UsageError, match="cannot be used because"):
            one_file.resume(path, parts(), SETTINGS)
    assert dist.is_initialized()


def test_a_value_of_a_sharded_checkpoint_is_no_code(tmp_path):
    """torch's reader keeps to tensors only for tensors: for other values, it unpickles."""
    hostile = Arguments(tmp_path)
    hostile.shape = damages.Code()
    sharded_checkpoints.save(hostile, *stepped().values(), 1)
    with pytest.raises(UsageError, match="holds more than tensors and numbers"):
        sharded_checkpoints.begin(Arguments(tmp_path), *parts().values())
    assert damages.CANARY not in os.environ


class ByGetattr:
    """Pickled as Python 3.11.2 pickles a member of an Enum."""

    def __init__(self, kind, name):
        self.pair = kind, name

    def __reduce__(self):
        return getattr, self.pair


def test_a_checkpoint_of_an_older_python_is_read_and_getattr_finds_nothing_else():
    formats = sharded_checkpoints.metadata._MEM_FORMAT_ENCODING
    read = lambda value: sharded_checkpoints.MetadataUnpickler(
        io.BytesIO(pickle.dumps(value))
    ).load()
    kind = formats.TORCH_CONTIGUOUS_FORMAT
    assert read(ByGetattr(formats, kind.name)) is kind
    for other in ("__class__", "mro", "__reduce__"):
        with pytest.raises(pickle.UnpicklingError, match="it names builtins.getattr"):
            read(ByGetattr(formats, other))
    with pytest.raises(pickle.UnpicklingError, match="it names builtins.getattr"):
        read(ByGetattr(torch.Size, "index"))


def test_deepspeeds_own_classes_are_all_that_its_files_may_hold(tmp_path):
    subject = DeepSpeedCheckpoint()
    subject.make(tmp_path)
    (tmp_path / "epoch-1" / "zero").mkdir()
    torch.save({"a": damages.Code()}, tmp_path / "epoch-1" / "zero" / "weight.pt")
    with pytest.raises(UsageError, match="weight.pt holds more than tensors"):
        subject.read(tmp_path)
    (tmp_path / "latest").write_text("../../etc")
    with pytest.raises(
        UsageError, match="latest names '../../etc', which is no folder"
    ):
        subject.read(tmp_path)
    assert damages.CANARY not in os.environ


@pytest.mark.parametrize("name", ["epoch-[1]", "epoch-1\n", "epoch\r1", "*", "..", ""])
def test_a_name_that_deepspeed_would_read_in_another_way_is_refused(name, tmp_path):
    """It takes `latest` for a pattern, and may find another folder than we looked at."""
    DeepSpeedCheckpoint().make(tmp_path)
    (tmp_path / "latest").write_text(name)
    if name.strip("."):
        (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="which is no folder there|holds more"):
        DeepSpeedCheckpoint().read(tmp_path)


def test_a_link_within_a_checkpoint_is_refused(tmp_path):
    """DeepSpeed would follow it."""
    DeepSpeedCheckpoint().make(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "epoch-1" / "zero").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="zero is no file and no folder"):
        DeepSpeedCheckpoint().read(tmp_path)


def metadata_changed(folder, change):
    """A sharded checkpoint whose .metadata a function has changed."""
    ShardedCheckpoint().make(folder)
    [path] = folder.glob("checkpoints/*/.metadata")
    found = pickle.loads(path.read_bytes())
    path.write_bytes(change(found))


def test_a_pickle_that_changes_a_class_is_refused(tmp_path):
    """Of the classes that belong there, too: PosixPath.rename, for one."""
    state = b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00renamecpathlib\nPosixPath\ns\x86b."
    metadata_changed(tmp_path, lambda _: state)
    before = Path.rename
    with pytest.raises(UsageError, match="it changes a class or a function"):
        ShardedCheckpoint().read(tmp_path)
    assert Path.rename is before and type(tmp_path).rename is before


def test_a_checkpoint_with_a_part_missing_is_refused(tmp_path):
    """torch would leave the parameters as they are, without a word."""

    def without_chunks(found):
        for form in found.state_dict_metadata.values():
            if hasattr(form, "chunks"):
                form.chunks = []
        return pickle.dumps(found)

    metadata_changed(tmp_path, without_chunks)
    with pytest.raises(UsageError, match="a part of a tensor is missing"):
        ShardedCheckpoint().read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"amsgrad": True}, {"capturable": True}, {"betas": (2, 5)}, {"maximize": True},
        {"lr": "fast"}, {"weight_decay": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_optimizer_with_other_settings_is_refused(change, tmp_path):
    OneFileCheckpoint().make(tmp_path)
    path = tmp_path / "checkpoint.pt"
    content = torch.load(path)
    content["states"]["optimizer"]["param_groups"][0] |= change
    torch.save(content, path)
    with pytest.raises(UsageError, match="is of another kind|settings were others"):
        OneFileCheckpoint().read(tmp_path)


def test_a_file_that_is_too_large_to_be_read_whole_is_refused(tmp_path):
    """A sparse one takes no room on the disk, and all memory where it is read."""
    for subject, name in [(Report(), "report.json"), (Weights(), "weights.json")]:
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(UsageError):
            subject.read(tmp_path)


def test_a_setting_without_end_is_not_printed(tmp_path):
    laughs = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    with (
        at_most(20),
        pytest.raises(UsageError, match=r"seed \[\[\[\[\.\.\.\], .*, not 0"),
    ):
        checkpoints.check_settings({"seed": laughs}, {"seed": 0}, tmp_path)
