"""Lesson 06: the micro-batches of one update equal one large batch, whatever counts in
them, and take one all-reduce of gradients.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import lesson06
from ddp_course.models.convnets import MLP
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch
from ddp_course.ranks.watch import count_collectives

CPU = torch.device("cpu")
OFF = torch.amp.GradScaler("cpu", enabled=False)
DIGITS = ["--data", "digits", "--train-samples", "300", "--epochs", "2", "--no-dropout"]


def micro_batches(lengths, ranks=6, size=4):
    """[update][part][micro-batch] of images and labels; in some micro-batches all items
    count, in others none.
    """
    draw = torch.Generator().manual_seed(5)
    made = []
    for length in lengths:
        images = torch.randn(
            ranks, length, size, 784, generator=draw, dtype=torch.float64
        )
        labels = torch.randint(10, (ranks, length, size), generator=draw)
        counts = torch.randint(size + 1, (ranks, length, 1), generator=draw)
        labels[torch.arange(size) >= counts] = lesson06.IGNORED
        made.append([list(zip(images[rank], labels[rank])) for rank in range(ranks)])
    return made


def train(made, accumulate):
    """Do some updates; return the parameters afterwards, and the losses. Each rank takes
    every n-th of six parts.
    """
    with process_group() as (rank, world_size):
        torch.manual_seed(rank)
        model = DistributedDataParallel(MLP(width=16).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for of_parts in made:
            pieces = [batch for part in of_parts[rank::world_size] for batch in part]
            if not accumulate:
                pieces = [tuple(torch.cat(parts) for parts in zip(*pieces))]
            optimizer.zero_grad()
            losses.append(lesson06.accumulate(model, pieces, CPU, OFF, torch.float32))
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), torch.stack(
            losses
        )


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_uneven_micro_batches_train_as_one_large_batch(nproc):
    made = micro_batches([3, 3, 1])
    [(expected, mean_losses)] = launch(train, made, False, nproc=1)
    apart = launch(train, made, True, nproc=nproc)
    for parameters, _ in apart:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sum(losses for _, losses in apart), mean_losses)


def test_the_reference_is_what_torch_makes_of_the_whole_batch():
    """The large batch above goes through our own function; here it is compared with the
    mean of torch's loss.
    """
    made = micro_batches([3])
    [(expected, [loss])] = launch(train, made, False, nproc=1)

    def plain():
        torch.manual_seed(0)
        model = MLP(width=16).double()
        images, labels = (
            torch.cat(parts)
            for parts in zip(*(batch for part in made[0] for batch in part))
        )
        loss = nn.functional.nll_loss(model(images), labels, ignore_index=-100)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), loss.detach()

    [(parameters, plain_loss)] = launch(plain, nproc=1)
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, plain_loss)


def mean_of_means(model, pieces, *_):
    """Planted: each micro-batch divides by its own number of items."""
    for images, labels in pieces:
        loss = nn.functional.nll_loss(model(images), labels, ignore_index=-100) / len(
            pieces
        )
        torch.nan_to_num(loss).backward()
    return loss.detach()


def without_world_size(model, pieces, *_):
    """Planted: divides by all items, and lets DDP divide once more."""
    items = lesson06.count_items(pieces, CPU)
    for images, labels in pieces:
        (
            nn.functional.nll_loss(
                model(images), labels, ignore_index=-100, reduction="sum"
            )
            / items
        ).backward()
    return items


@pytest.mark.parametrize("fault", [mean_of_means, without_world_size])
def test_the_comparison_finds_planted_faults(fault):
    def train_with(fault, made):
        lesson06.accumulate = fault
        return train(made, True)

    made = micro_batches([3, 3, 1])
    [(expected, _)] = launch(train, made, False, nproc=1)
    for parameters, _ in launch(train_with, fault, made):
        assert not torch.allclose(parameters, expected, rtol=1e-3, atol=1e-4)


def test_an_update_in_which_nothing_counts_changes_nothing():
    def nothing_counts():
        with process_group():
            model = DistributedDataParallel(MLP(width=16))
            pieces = [(torch.randn(4, 784), torch.full((4,), lesson06.IGNORED))] * 2
            loss = lesson06.accumulate(model, pieces, CPU, OFF, torch.float32)
            return loss.item(), max(
                parameter.grad.abs().max().item() for parameter in model.parameters()
            )

    assert launch(nothing_counts) == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_gradients_are_sent_once_per_update(micro):
    def collectives(micro):
        with process_group():
            model = DistributedDataParallel(MLP(width=16))
            pieces = [(torch.randn(4, 784), torch.randint(10, (4,)))] * micro
            return count_collectives(
                lambda: lesson06.accumulate(model, pieces, CPU, OFF, torch.float32)
            )

    assert (
        launch(collectives, micro) == [{"allreduce": 2}] * 2
    )  # of the number of items, and of the one bucket


@pytest.mark.parametrize("scale, skipped", [(1024.0, 0), (2.0**20, 3)])
def test_where_the_scaler_skips_a_step_the_scheduler_skips_it_too(scale, skipped):
    def rates(scale, updates=5):
        with process_group() as (rank, _):
            torch.manual_seed(rank)
            layers = nn.Sequential(nn.Linear(8, 4), nn.LogSoftmax(dim=1))
            model = DistributedDataParallel(layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR
            scheduler = schedule(optimizer, lambda update: 1 - update / updates)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            args = SimpleNamespace(precision="fp16", max_norm=1.0)
            batch = torch.randn(16, 8), torch.randint(4, (16,))
            rest = optimizer, scheduler, scaler, CPU, args
            used = []
            for _ in range(updates):
                used.append(round(scheduler.get_last_lr()[0], 1))
                lesson06.update(model, [batch], *rest)
            return used

    expected = [1.0] * skipped + [1.0, 0.8, 0.6, 0.4, 0.2]
    assert launch(rates, scale) == [expected[:5]] * 2


def test_groups_hold_all_batches_in_order():
    assert list(lesson06.grouped(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(lesson06.grouped(range(6), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(lesson06.grouped([], 3)) == []


# ---- the program ----


def run(out, nproc, *options):
    results = launch(lesson06.main, [*DIGITS, *options, "--out", str(out)], nproc=nproc)
    losses = [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return results, losses, torch.load(out / "model.pt", weights_only=True)


def test_the_program_trains_the_same_however_the_batch_is_cut(tmp_path):
    """300 samples in batches of 96: three updates, and one of 12 samples, in each of
    two epochs.
    """
    _, expected, final = run(
        tmp_path / "1", 1, "--batch-size", "96", "--accumulate", "1"
    )
    assert len(expected) == 8
    for nproc, batch_size, accumulate in [(1, 24, 4), (2, 12, 4), (3, 16, 2)]:
        out = tmp_path / f"{nproc}-{batch_size}"
        results, losses, state = run(
            out, nproc, "--batch-size", str(batch_size), "--accumulate", str(accumulate)
        )
        torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)
        for name in final:
            assert (state[name] - final[name]).norm() < 0.01 * final[name].norm() + 1e-4
        assert len({result["params_sha256"] for result in results}) == 1


def test_a_loss_that_is_nan_on_one_rank_ends_the_run_with_one_line(tmp_path):
    def train(options):
        original, losses = lesson06.summed_loss, []

        def planted(output, labels):
            losses.append(original(output, labels))
            wrong = torch.distributed.get_rank() == 1 and len(losses) == 3
            return losses[-1] * (float("nan") if wrong else 1.0)

        lesson06.summed_loss = planted
        lesson06.main(options)

    options = [*DIGITS, "--batch-size", "16", "--accumulate", "2"]
    with pytest.raises(RankError, match="step 2.* on rank 1"):
        launch(train, [*options, "--out", str(tmp_path)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_16_bits(precision, tmp_path):
    # few: some CPUs have no fast backward pass for convolutions in fp16
    options = [
        "--train-samples",
        "32",
        "--epochs",
        "2",
        "--batch-size",
        "4",
        "--accumulate",
        "2",
    ]
    results, losses, state = run(tmp_path, 2, *options, "--precision", precision)
    assert losses[-1] < losses[0] - 0.2
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert len({result["params_sha256"] for result in results}) == 1


class Order:
    """Notes in which order things are called."""

    def __init__(self):
        self.calls = []

    def note(self, owner, name):
        original = getattr(owner, name)
        setattr(
            owner,
            name,
            lambda *args, **kw: (self.calls.append(name), original(*args, **kw))[1],
        )


def test_each_update_unscales_clips_steps_and_schedules_once_in_this_order(tmp_path):
    def calls(options):
        order = Order()
        order.note(torch.Tensor, "backward")
        order.note(torch.amp.GradScaler, "unscale_")
        order.note(nn.utils, "clip_grad_norm_")
        order.note(torch.amp.GradScaler, "step")
        order.note(torch.amp.GradScaler, "update")
        original = torch.optim.lr_scheduler.LambdaLR.step
        started = []

        def schedule(self):
            started and order.calls.append(
                "schedule"
            )  # the first call is the scheduler's own, when it is made
            started.append(True)
            original(self)

        torch.optim.lr_scheduler.LambdaLR.step = schedule
        lesson06.main(options)
        return order.calls

    options = [
        *DIGITS,
        "--train-samples",
        "80",
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--out",
        str(tmp_path),
    ]
    update = ["unscale_", "clip_grad_norm_", "step", "update", "schedule"]
    expected = ["backward"] * 3 + update + ["backward"] * 2 + update
    assert launch(calls, [*options, "--accumulate", "3"], nproc=1) == [expected]
