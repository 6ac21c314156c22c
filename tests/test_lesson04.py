"""Lesson 04: the whole DDP program, equal to lesson 03's and to one process, exact in
evaluation, careful with files.
"""

import json
import logging
import os

import pytest
import torch
import torch.distributed as dist
from conftest import THOROUGH
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import lesson01, lesson03, lesson04, runs
from ddp_course.data.images import load_images
from ddp_course.models.convnets import MLP, ConvNet
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

DIGITS = ["--data", "digits", "--train-samples", "288", "--epochs", "2", "--no-dropout"]
CPU = torch.device("cpu")


def run(lesson, out, nproc, *options):
    """Run a lesson's program on ranks; return the result of each, the loss of each
    step.
    """
    results = launch(lesson.main, [*DIGITS, *options, "--out", str(out)], nproc=nproc)
    return results, [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def parameters(out):
    return torch.cat(
        [
            tensor.flatten()
            for tensor in torch.load(out / "model.pt", weights_only=True).values()
        ]
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with batches of 48: its losses and parameters."""
    out = tmp_path_factory.mktemp("alone")
    _, losses = run(lesson04, out, 1, "--batch-size", "48")
    return losses, parameters(out)


def assert_same_training(losses, vector, alone):
    expected_losses, expected = alone
    torch.testing.assert_close(losses, expected_losses, rtol=2e-3, atol=2e-3)
    assert (vector - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("nproc", [2, 3])
def test_ranks_train_as_one_process_with_the_same_batch_of_all(nproc, alone, tmp_path):
    results, losses = run(lesson04, tmp_path, nproc, "--batch-size", str(48 // nproc))
    assert len(losses) == 12
    assert_same_training(losses, parameters(tmp_path), alone)
    assert len({result["params_sha256"] for result in results}) == 1


@pytest.mark.parametrize("nproc", [2, 3] if THOROUGH else [3])
def test_lesson_03_trains_the_same(nproc, alone, tmp_path):
    for when in ("after", "overlapped", "bucketed"):
        _, losses = run(
            lesson03,
            tmp_path / when,
            nproc,
            "--batch-size",
            str(48 // nproc),
            "--average",
            when,
        )
        torch.testing.assert_close(losses, alone[0], rtol=2e-3, atol=2e-3)


def run_with_fault(fault, options):
    """Lesson 04 with one thing done wrong, on a rank."""
    if fault == "no sampler":
        lesson04.DistributedSampler = lambda data, world_size, rank, **options: (
            DistributedSampler(data, 1, 0, **options)
        )
    elif fault == "no set_epoch":
        DistributedSampler.set_epoch = lambda self, epoch: None
    elif fault == "another shuffle on each rank":
        original = DistributedSampler.set_epoch
        DistributedSampler.set_epoch = lambda self, epoch: original(
            self, epoch + 10 * self.rank
        )
    elif fault == "no averaging":
        lesson04.DistributedDataParallel = lambda model, **options: Wrapper(model)
    return lesson04.main(options)


class Wrapper(torch.nn.Module):
    """Planted: looks like DDP and averages nothing."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize(
    "fault",
    ["no sampler", "no set_epoch", "another shuffle on each rank", "no averaging"],
)
def test_the_comparison_with_one_process_finds_planted_faults(fault, alone, tmp_path):
    launch(
        run_with_fault, fault, [*DIGITS, "--batch-size", "24", "--out", str(tmp_path)]
    )
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    with pytest.raises(AssertionError):
        assert_same_training(losses, parameters(tmp_path), alone)


def test_in_64_bits_ddp_equals_one_process_to_ten_digits():
    train_set, _ = load_images("digits", 96)
    batches = list(DataLoader(train_set, batch_size=24))

    def train():
        with process_group() as (rank, world_size):
            torch.manual_seed(rank)
            model = DistributedDataParallel(
                ConvNet(dropout=False).double(), gradient_as_bucket_view=True
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for images, labels in batches:
                optimizer.zero_grad()
                log_probabilities = model(images.double().chunk(world_size)[rank])
                torch.nn.functional.nll_loss(
                    log_probabilities, labels.chunk(world_size)[rank]
                ).backward()
                optimizer.step()
            return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    [alone] = launch(train, nproc=1)
    for nproc in (2, 3):
        for vector in launch(train, nproc=nproc):
            torch.testing.assert_close(vector, alone, rtol=1e-10, atol=1e-11)


# ---- evaluation ----


def evaluate_on_ranks(samples):
    with process_group():
        torch.manual_seed(0)
        model = DistributedDataParallel(MLP(width=16))
        _, test_set = load_images("digits")
        return lesson04.evaluate(model, Subset(test_set, range(samples)), CPU)


@pytest.mark.parametrize("samples", [0, 1, 2, 5, 101, 360])
def test_every_sample_is_counted_once_whatever_the_number_of_ranks(samples):
    [alone] = launch(evaluate_on_ranks, samples, nproc=1)
    assert alone[1] == samples
    for nproc in (2, 3):
        assert launch(evaluate_on_ranks, samples, nproc=nproc) == [alone] * nproc


def test_padding_would_have_been_found():
    def padded(samples):
        with process_group() as (rank, world_size):
            _, test_set = load_images("digits")
            sampler = DistributedSampler(
                range(samples), world_size, rank, shuffle=False
            )
            counts = torch.tensor(
                lesson01.evaluate(
                    MLP(width=16), DataLoader(Subset(test_set, list(sampler)), 100), CPU
                )
            )
            dist.all_reduce(counts)
            return counts[1].item()

    assert launch(padded, 101, nproc=2) == [102, 102]


@pytest.mark.parametrize("nproc", [2, 3] if THOROUGH else [3])
def test_all_of_mnists_test_set_is_counted_once(nproc, mnist, tmp_path):
    options = [
        "--data",
        "mnist",
        "--train-samples",
        "192",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
    ]
    results = launch(lesson04.main, options, nproc=nproc, timeout=600)
    assert [result["test_samples"] for result in results] == [10_000] * nproc
    assert json.loads((tmp_path / "result.json").read_text()) == results[0]


# ---- seeds ----


def test_all_ranks_begin_alike_and_drop_differently(tmp_path):
    def seeds_seen(options):
        seeds = []
        original = torch.manual_seed
        torch.manual_seed = lambda seed: seeds.append(seed) or original(seed)
        lesson04.main(options)
        return seeds

    options = [*DIGITS, "--epochs", "1", "--seed", "7", "--out", str(tmp_path)]
    assert launch(seeds_seen, options, nproc=3) == [[7, 7], [7, 8], [7, 9]]


# ---- files ----


def test_the_result_has_all_that_the_contract_names(tmp_path):
    [result, _], losses = run(lesson04, tmp_path, 2, "--batch-size", "32")
    names = "lesson, world_size, backend, device, data, train_samples, test_samples, epochs, batch_size, test_accuracy, "
    names += "train_loss, seconds, samples_per_second, params_sha256"
    assert list(result) == names.split(", ")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (
        result["lesson"],
        result["world_size"],
        result["backend"],
        result["device"],
    ) == (
        "04",
        2,
        "gloo",
        "cpu",
    )
    assert (result["train_samples"], result["test_samples"], len(losses)) == (
        288,
        360,
        2 * 5,
    )
    assert result["train_loss"] == pytest.approx(sum(losses[5:]) / 5, abs=1e-4)


def test_the_fingerprint_is_that_of_the_saved_parameters(tmp_path):
    [result, _], _ = run(lesson04, tmp_path, 2)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in state)
    model = ConvNet()
    model.load_state_dict(state)  # strict
    assert runs.params_sha256(model) == result["params_sha256"]


def test_load_brings_back_what_save_wrote_on_every_rank(tmp_path):
    def save_and_load():
        with process_group() as (rank, _):
            torch.manual_seed(0)
            model = DistributedDataParallel(MLP(width=16))
            before = runs.params_sha256(model.module)
            lesson04.save(model, tmp_path / "model.pt")
            assert (
                tmp_path / "model.pt"
            ).exists()  # for every rank, as soon as save returns
            for parameter in model.parameters():
                parameter.data.zero_()
            lesson04.load(model, tmp_path / "model.pt", CPU)
            return before == runs.params_sha256(model.module)

    assert launch(save_and_load, nproc=3) == [True] * 3


def test_a_damaged_model_is_refused(tmp_path):
    def load_damaged():
        with process_group():
            lesson04.load(
                DistributedDataParallel(MLP(width=16)), tmp_path / "model.pt", CPU
            )

    (tmp_path / "model.pt").write_bytes(b"not a model")
    with pytest.raises(RankError):
        launch(load_damaged)


def test_the_log_is_rank_zeros_unless_another_rank_warns(tmp_path):
    def talk():
        log = runs.open_folder(tmp_path)
        log.info(f"info of {os.environ['RANK']}")
        log.warning(f"warning of {os.environ['RANK']}")
        logging.shutdown()

    launch(talk, nproc=3)
    lines = sorted(
        line.split(" ", 2)[2]
        for line in (tmp_path / "train.log").read_text().splitlines()
    )
    assert lines == [
        "rank 0 INFO info of 0",
        "rank 0 WARNING warning of 0",
        "rank 1 WARNING warning of 1",
        "rank 2 WARNING warning of 2",
    ]
