"""Lesson 08: lesson 04's program in Trainer: the same losses and parameters, exact
counts, exact resuming.
"""

import json
import os
import shutil

import pytest
import torch
import transformers
from conftest import THOROUGH, python, seeing_the_scale
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ddp_course import lesson04, lesson07, lesson08, lesson11
from ddp_course.checkpoints.of_trainer import newest_usable
from ddp_course.ranks.launch import RankError, launch, start_server

DIGITS = ["--data", "digits", "--train-samples", "288", "--epochs", "2"]


@pytest.fixture(scope="module", autouse=True)
def server():
    """Ranks that have imported Trainer: the program does it where it first uses it."""
    start_server("transformers.trainer", "datasets", "deepspeed")


def run(lesson, out, nproc, *options):
    """Run a lesson's program on ranks; the results and the losses."""
    flags = [*DIGITS, *options, "--out", str(out)]
    results = launch(seeing_the_scale, lesson.main, flags, nproc=nproc)
    return results, [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def saved(out):
    """The parameters of the only checkpoint, by the names that they have in lesson
    04.
    """
    [checkpoint] = (out / "checkpoints").iterdir()
    values = load_file(checkpoint / "model.safetensors")
    return {name.removeprefix("network."): value for name, value in values.items()}


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    out = tmp_path_factory.mktemp("by-hand")
    results, losses = run(lesson04, out, 2, "--batch-size", "24", "--no-dropout")
    return results, losses, torch.load(out / "model.pt", weights_only=True)


def assert_same_training(losses, parameters, by_hand):
    torch.testing.assert_close(losses, by_hand[1], rtol=2e-3, atol=2e-3)
    assert parameters.keys() == by_hand[2].keys()
    for name, expected in by_hand[2].items():
        assert (parameters[name] - expected).norm() < 0.01 * expected.norm() + 1e-4, (
            name
        )


@pytest.mark.parametrize(
    "nproc, batch_size, accumulate", [(1, 48, 1), (2, 24, 1), (3, 8, 2)]
)
def test_it_trains_as_lesson_04_with_the_same_batch_of_all(
    nproc, batch_size, accumulate, by_hand, tmp_path
):
    options = [
        "--batch-size",
        str(batch_size),
        "--accumulate",
        str(accumulate),
        "--no-dropout",
    ]
    results, losses = run(lesson08, tmp_path, nproc, *options)
    assert_same_training(losses, saved(tmp_path), by_hand)
    assert len({result["params_sha256"] for result in results}) == 1
    assert [result["world_size"] for result in results] == [nproc] * nproc
    assert results[0]["test_samples"] == 360 and results[0]["lesson"] == "08"
    assert abs(results[0]["test_accuracy"] - by_hand[0][0]["test_accuracy"]) < 0.01


def test_trainer_and_accelerate_train_to_the_same_bits(tmp_path):
    fingerprints = [
        run(lesson, tmp_path / lesson.__name__, 2, "--batch-size", "24")[0][0][
            "params_sha256"
        ]
        for lesson in (lesson07, lesson08)
    ]
    assert len(set(fingerprints)) == 1


def run_with_fault(fault, options):
    """Lesson 08 with one thing done wrong, on a rank."""
    original = lesson08.training_arguments
    if fault == "another shuffle":

        def training_arguments(args, device):
            settings = original(args, device)
            settings.data_seed = 5
            return settings

        lesson08.training_arguments = training_arguments
    elif fault == "mean of the batch":
        lesson08.mean_loss = lambda outputs, labels, num_items_in_batch: F.nll_loss(
            outputs["logits"], labels
        )
    elif fault == "clipped":

        def training_arguments(args, device):
            settings = original(args, device)
            settings.max_grad_norm = 0.1
            return settings

        lesson08.training_arguments = training_arguments
    return seeing_the_scale(lesson08.main, options)


@pytest.mark.parametrize("fault", ["another shuffle", "mean of the batch", "clipped"])
def test_the_comparison_finds_planted_faults(fault, by_hand, tmp_path):
    options = [*DIGITS, "--no-dropout", "--batch-size", "24", "--out", str(tmp_path)]
    launch(run_with_fault, fault, options)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    with pytest.raises(AssertionError):
        assert_same_training(losses, saved(tmp_path), by_hand)


def test_training_arguments_that_leave_the_processes_alone_are_refused(tmp_path):
    def forget_cpu(options):
        original = lesson08.transformers.TrainingArguments
        lesson08.transformers.TrainingArguments = lambda use_cpu, **others: original(
            **others
        )
        lesson08.main(options)

    with pytest.raises(RankError, match="UsageError: each process would train alone"):
        launch(forget_cpu, [*DIGITS, "--out", str(tmp_path)])
    assert not (tmp_path / "result.json").exists()


def test_notebook_launcher_accepts_a_kernel_that_has_imported_it():
    """Until Trainer is used: accelerate does not fork a process with bitsandbytes."""
    program = """if True:
        import sys, transformers, ddp_course.lesson08
        print("bitsandbytes" in sys.modules)
        transformers.Trainer  # what the lesson must not do when it is imported
        print("bitsandbytes" in sys.modules)
        """
    assert python("-c", program).stdout.split() == ["False", "True"]


# ---- the loss, with labels that do not all count ----


def train_on_sequences(lengths, batch_size, accumulate):
    """A small model on sequences of these lengths through Trainer, with lesson 08's
    loss: its weights after one update.
    """
    import contextlib
    import io
    import os
    import tempfile

    os.environ["OMP_NUM_THREADS"] = "1"
    draw = torch.Generator().manual_seed(0)
    rows = [
        {
            "x": torch.randn(length, 5, generator=draw),
            "labels": torch.randint(3, (length,), generator=draw),
        }
        for length in lengths
    ]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 3)

        def forward(self, x):
            return {"logits": F.log_softmax(self.layer(x), dim=-1).transpose(1, 2)}

    def collate(examples):
        x = pad_sequence([example["x"] for example in examples], batch_first=True)
        labels = pad_sequence(
            [example["labels"] for example in examples],
            batch_first=True,
            padding_value=-100,
        )
        return {"x": x, "labels": labels}

    torch.manual_seed(0)
    model = Model()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        settings = transformers.TrainingArguments(
            folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
            remove_unused_columns=False, lr_scheduler_type="constant", num_train_epochs=1, ddp_find_unused_parameters=False,
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        transformers.Trainer(
            model, settings, train_dataset=rows, data_collator=collate, compute_loss_func=lesson08.mean_loss,
            optimizers=(optimizer, None),
        ).train()  # fmt: skip
        torch.distributed.barrier()
    return model.layer.weight.detach()


def test_its_loss_weighs_every_item_alike_on_ranks_and_in_windows():
    lengths = [9, 1, 2, 7, 5, 1, 1, 8]
    [expected] = launch(train_on_sequences, lengths, 8, 1, nproc=1)
    for nproc, batch_size, accumulate in [(1, 2, 4), (2, 2, 2), (2, 4, 1), (2, 1, 4)]:
        for weights in launch(
            train_on_sequences, lengths, batch_size, accumulate, nproc=nproc
        ):
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


# ---- resuming ----


def stop_after_one_epoch(options):
    """The program, stopped after its first epoch as if by a power cut between two
    epochs.
    """

    class Stop(transformers.TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            control.should_training_stop = True

    class Stopped(transformers.Trainer):
        def __init__(self, *arguments, **others):
            super().__init__(*arguments, **others)
            self.add_callback(Stop())

    lesson08.transformers.Trainer = Stopped
    seeing_the_scale(lesson08.main, options)


def main_that_counts_batches(flags):
    """The program; (its result, how many batches this rank has trained on)."""
    batches = []

    class Counts(transformers.Trainer):
        def training_step(self, *args, **options):
            batches.append(1)
            return super().training_step(*args, **options)

    lesson08.transformers.Trainer = Counts
    return seeing_the_scale(lesson08.main, flags), len(batches)


@pytest.mark.parametrize("nproc", [1, 2] if THOROUGH else [2])
def test_a_run_that_was_stopped_and_resumed_ends_bit_for_bit_as_one_that_was_not(
    nproc, tmp_path
):
    """With dropout: the random states of all ranks come back, too."""
    options = ["--batch-size", "24", "--epochs", "3"]
    whole, losses = run(lesson08, tmp_path / "whole", nproc, *options)
    launch(
        stop_after_one_epoch,
        [*DIGITS, *options, "--out", str(tmp_path / "part")],
        nproc=nproc,
    )
    flags = [*DIGITS, *options, "--resume", "--out", str(tmp_path / "part")]
    resumed, batches = launch(main_that_counts_batches, flags, nproc=nproc)[0]
    resumed_losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()
    ]
    assert resumed["params_sha256"] == whole[0]["params_sha256"]
    assert (
        resumed_losses == losses
        and resumed["test_accuracy"] == whole[0]["test_accuracy"]
    )
    assert (
        batches == len(losses) * 2 // 3
    )  # of two epochs: to begin anew would end alike, too


def test_a_missing_random_state_is_told_in_the_log(tmp_path):
    """Trainer itself goes on silently, to other parameters."""
    run(lesson08, tmp_path, 2, "--epochs", "1")
    [state] = tmp_path.rglob("rng_state_1.pth")
    state.unlink()
    run(lesson08, tmp_path, 2, "--epochs", "2", "--resume")
    said = (tmp_path / "train.log").read_text()
    assert "without rng_state_1.pth, this is not the run that was stopped" in said
    assert "rng_state_0.pth" not in said


@pytest.mark.parametrize("lesson", [lesson08, lesson11])
def test_one_process_takes_one_of_several_gpus(lesson, monkeypatch):
    """Trainer would use DataParallel, silently, and double each batch."""
    settings = transformers.TrainingArguments("nothing", use_cpu=True)
    settings._n_gpu = 2
    assert settings.train_batch_size == 2 * settings.per_device_train_batch_size
    monkeypatch.setattr(lesson, "training_arguments", lambda *_: settings)
    for step in ("prepare", "train", "report"):
        monkeypatch.setattr(lesson, step, lambda args, settings: settings)
    monkeypatch.setattr(lesson11, "small_llama", lambda: None)
    settings = lesson.main(["--device", "cpu"])
    assert settings.n_gpu == 1
    assert settings.train_batch_size == settings.per_device_train_batch_size


def test_there_must_be_something_to_resume_from_and_a_new_run_begins_anew(tmp_path):
    short = ["--epochs", "1", "--batch-size", "96"]
    with pytest.raises(
        RankError,
        match="UsageError: there is no checkpoint in .*: run without --resume",
    ):
        launch(lesson08.main, [*DIGITS, "--resume", "--out", str(tmp_path)], nproc=1)
    run(lesson08, tmp_path, 1, *short)
    shutil.copytree(
        tmp_path / "checkpoints" / "checkpoint-3",
        tmp_path / "checkpoints" / "checkpoint-999",
    )
    run(lesson08, tmp_path, 1, *short)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        "checkpoint-3"
    ]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "no optimizer": lambda folder: (folder / "optimizer.pt").unlink(),
    "no state": lambda folder: (folder / "trainer_state.json").unlink(),
    "a list for a state": lambda folder: (folder / "trainer_state.json").write_text(
        "[]"
    ),
} | {
    f"{name} cut off": lambda folder, name=name: cut(folder / name)
    for name in (
        "trainer_state.json",
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_1.pth",
    )
}
DAMAGES["a bit of optimizer.pt"] = lambda folder: flip_a_bit(folder / "optimizer.pt")
DAMAGES["code in optimizer.pt"] = lambda folder: torch.save(
    {"state": os.getcwd}, folder / "optimizer.pt"
)


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    """A run of one epoch on two ranks; its folder has checkpoint-3."""
    out = tmp_path_factory.mktemp("one-epoch")
    options = ["--epochs", "1", "--batch-size", "48"]
    launch(lesson08.main, [*DIGITS, *options, "--out", str(out)])
    return out


@pytest.fixture
def with_a_newer_one(one_epoch, tmp_path):
    """The folder of checkpoints, with another one, checkpoint-9999."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(one_epoch / "checkpoints", folder)
    shutil.copytree(folder / "checkpoint-3", folder / "checkpoint-9999")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside(damage, with_a_newer_one):
    assert newest_usable(with_a_newer_one).name == "checkpoint-9999"
    DAMAGES[damage](with_a_newer_one / "checkpoint-9999")
    assert newest_usable(with_a_newer_one).name == "checkpoint-3"
    assert {path.name for path in with_a_newer_one.iterdir()} == {
        "checkpoint-3",
        "damaged-checkpoint-9999",
    }


def test_resuming_passes_over_a_damaged_checkpoint(
    one_epoch, with_a_newer_one, tmp_path
):
    options = [*DIGITS, "--batch-size", "48", "--resume", "--out"]
    DAMAGES["scheduler.pt cut off"](with_a_newer_one / "checkpoint-9999")
    untouched = tmp_path / "untouched"
    shutil.copytree(one_epoch, untouched)
    expected = launch(lesson08.main, [*options, str(untouched)])
    assert (
        launch(lesson08.main, [*options, str(tmp_path)])[0]["params_sha256"]
        == (expected[0]["params_sha256"])
    )
    told = (tmp_path / "train.log").read_text()
    aside = "checkpoint-9999 is now damaged-checkpoint-9999, since scheduler.pt is "
    assert f"rank 0 WARNING {aside}damaged" in told
    assert "rank 1 WARNING" not in told


def test_where_all_checkpoints_are_damaged_one_line_says_so(with_a_newer_one):
    for checkpoint in with_a_newer_one.iterdir():
        DAMAGES["trainer_state.json cut off"](checkpoint)
    flags = [*DIGITS, "--resume", "--out", str(with_a_newer_one.parent)]
    said = "UsageError: there is no checkpoint in .*: run without --resume"
    with pytest.raises(RankError, match=said):
        launch(lesson08.main, flags)


# ---- a loss that is not a number ----


def nan_on_rank_one(flags):
    """The program; on rank 1 the loss of the second micro-batch is NaN."""
    original, calls = lesson08.mean_loss, []

    def mean_loss(*batch, **items):
        calls.append(1)
        wrong = len(calls) == 2 and torch.distributed.get_rank() == 1
        return original(*batch, **items) * (float("nan") if wrong else 1.0)

    lesson08.mean_loss = mean_loss
    lesson08.main(flags)


def test_a_loss_that_is_no_number_ends_the_run_with_its_step_and_rank(tmp_path):
    said = "UsageError: the loss is not a number in step 2 of the epoch, on rank 1"
    with pytest.raises(RankError, match=said):
        launch(nan_on_rank_one, [*DIGITS, "--out", str(tmp_path)])
    assert not (tmp_path / "result.json").exists()
