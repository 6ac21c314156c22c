"""Lesson 07: lesson 04's program in Accelerate: the same losses and parameters, exact
counts, and one model on all ranks.
"""

import json
import os
import sys

import pytest
import torch
from conftest import python, seeing_the_scale
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler

from ddp_course import lesson04, lesson07
from ddp_course.ranks.launch import RankError, launch

DIGITS = ["--data", "digits", "--train-samples", "288", "--epochs", "2", "--no-dropout"]


def run(lesson, out, nproc, *options):
    """Run a lesson's program on ranks; the results, the losses, and the final
    parameters by name.
    """
    flags = [*DIGITS, *options, "--out", str(out)]
    results = launch(seeing_the_scale, lesson.main, flags, nproc=nproc)
    losses = [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    if lesson is lesson04:
        return results, losses, torch.load(out / "model.pt", weights_only=True)
    return results, losses, load_file(out / "state" / "model.safetensors")


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    return run(lesson04, tmp_path_factory.mktemp("by-hand"), 2, "--batch-size", "24")


def assert_same_losses(losses, by_hand):
    torch.testing.assert_close(losses, by_hand[1], rtol=2e-3, atol=2e-3)


def assert_same_training(losses, parameters, by_hand):
    assert_same_losses(losses, by_hand)
    assert parameters.keys() == by_hand[2].keys()
    for name, expected in by_hand[2].items():
        assert (parameters[name] - expected).norm() < 0.01 * expected.norm() + 1e-4, (
            name
        )


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_it_trains_as_lesson_04_with_the_same_batch_of_all(nproc, by_hand, tmp_path):
    results, losses, parameters = run(
        lesson07, tmp_path, nproc, "--batch-size", str(48 // nproc)
    )
    assert_same_training(losses, parameters, by_hand)
    assert len({result["params_sha256"] for result in results}) == 1
    assert [result["world_size"] for result in results] == [nproc] * nproc
    names = ["test_samples", "train_samples", "backend", "device", "batch_size"]
    expected = {name: by_hand[0][0][name] for name in names} | {
        "batch_size": 48 // nproc
    }
    assert {name: results[0][name] for name in names} == expected
    assert abs(results[0]["test_accuracy"] - by_hand[0][0]["test_accuracy"]) < 0.01


def run_with_fault(fault, options):
    """Lesson 07 with one thing left out, on a rank."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    if fault == "another shuffle":
        lesson07.DataLoaderConfiguration = lambda **_: DataLoaderConfiguration()
    elif fault == "the model is not wrapped":
        Accelerator.prepare_model = lambda self, model, **_: model
    elif fault == "gradients are added up":
        backward = Accelerator.backward
        Accelerator.backward = lambda self, loss: backward(self, 2 * loss)
    elif fault == "zero_grad does nothing":
        torch.optim.AdamW.zero_grad = lambda self, set_to_none=True: None
    return seeing_the_scale(lesson07.main, options)


@pytest.mark.parametrize(
    "fault",
    [
        "another shuffle",
        "the model is not wrapped",
        "gradients are added up",
        "zero_grad does nothing",
    ],
)
def test_the_comparison_finds_planted_faults(fault, by_hand, tmp_path):
    options = [*DIGITS, "--batch-size", "24", "--out", str(tmp_path)]
    launch(run_with_fault, fault, options)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    with pytest.raises(AssertionError):
        assert_same_losses(losses, by_hand)


def test_an_accelerator_that_leaves_the_processes_alone_is_refused(tmp_path):
    def forget_cpu(options):
        from accelerate import Accelerator

        lesson07.Accelerator = lambda cpu, **others: Accelerator(**others)
        lesson07.main(options)

    with pytest.raises(RankError, match="UsageError: each process would train alone"):
        launch(forget_cpu, [*DIGITS, "--out", str(tmp_path)])
    assert not (tmp_path / "result.json").exists()


def test_a_pipe_in_the_place_of_a_file_of_the_state_is_not_waited_for(tmp_path):
    (tmp_path / "state").mkdir()
    for name in ("random_states_0.pkl", "model.safetensors", "optimizer.bin"):
        os.mkfifo(tmp_path / "state" / name)
    launch(lesson07.main, [*DIGITS, "--out", str(tmp_path)], timeout=600)
    assert (tmp_path / "state" / "optimizer.bin").is_file()


def nan_on_rank_one(options):
    """The program; on rank 1 the loss of the second batch is NaN."""
    original, calls = lesson07.F.nll_loss, []

    def nll_loss(*batch):
        calls.append(1)
        wrong = len(calls) == 2 and torch.distributed.get_rank() == 1
        return original(*batch) * (float("nan") if wrong else 1.0)

    lesson07.F.nll_loss = nll_loss
    lesson07.main(options)


def test_a_loss_that_is_no_number_ends_the_run_with_its_step_and_rank(tmp_path):
    said = "UsageError: the loss is not a number in step 2 of the epoch, on rank 1"
    with pytest.raises(RankError, match=said):
        launch(nan_on_rank_one, [*DIGITS, "--out", str(tmp_path)])
    assert not (tmp_path / "result.json").exists()


def test_accumulating_two_micro_batches_is_one_batch_of_both(by_hand, tmp_path):
    """Micro-batches are dealt to the ranks in turn, so two of 12 on each rank are the
    same 48 samples.
    """
    _, losses, parameters = run(
        lesson07, tmp_path, 2, "--batch-size", "12", "--accumulate", "2"
    )
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2])]
    assert_same_training(means, parameters, by_hand)


def test_its_shuffle_is_that_of_distributed_sampler():
    def shuffles(samples):
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration
        from torch.utils.data import DataLoader

        configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
        loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(
            DataLoader(torch.arange(samples), batch_size=1, shuffle=True)
        )
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append([index for batch in loader for index in batch.tolist()])
        return epochs

    ranks = launch(shuffles, 12)
    for epoch in range(2):
        for rank in range(2):
            sampler = DistributedSampler(range(12), 2, rank, seed=3)
            sampler.set_epoch(epoch)
            assert ranks[rank][epoch] == list(sampler)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_every_test_sample_is_counted_once(nproc, tmp_path):
    def count(samples):
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, Subset

        from ddp_course.data.images import load_images
        from ddp_course.models.convnets import MLP

        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        loader = DataLoader(
            Subset(load_images("digits")[1], range(samples)), batch_size=10
        )
        model, loader = accelerator.prepare(MLP(width=16), loader)
        return lesson07.evaluate(model, loader, accelerator)

    for samples in (1, 10, 101):
        [alone] = launch(count, samples, nproc=1)
        assert alone[1] == samples
        assert launch(count, samples, nproc=nproc) == [alone] * nproc


def test_accelerate_launch_starts_it_with_a_configuration_file(workplace):
    (workplace / "two.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nmachine_rank: 0\n"
        "num_processes: 2\nmain_process_ip: 127.0.0.1\nmain_process_port: 0\nrdzv_backend: c10d\n"
        "same_network: true\nmixed_precision: 'no'\nuse_cpu: false\n"
    )
    options = [*DIGITS, "--train-samples", "64", "--epochs", "1", "--batch-size", "16"]
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "two.yaml",
        "ddp_course/lesson07.py",
    ]
    done = python(*command, *options, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((workplace / "runs/lesson07/result.json").read_text())["world_size"]
        == 2
    )


def test_notebook_launcher_starts_it_in_a_fresh_kernel(workplace):
    from ddp_course.notebook import fresh_kernel

    options = [
        *DIGITS,
        "--train-samples",
        "64",
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--out",
        str(workplace),
    ]
    fresh_kernel(
        f"import sys; sys.path[:0] = {sys.path!r}",
        "from accelerate import notebook_launcher\nfrom ddp_course import lesson07",
        "import torch; torch.set_num_threads(1)",
        f"notebook_launcher(lesson07.main, ({options!r},), num_processes=2, "
        "rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0')",
        timeout=600,
    )
    assert json.loads((workplace / "result.json").read_text())["world_size"] == 2
