"""Lesson 03: three versions of DDP, each equal to one process after every step."""

import pytest
import torch
import torch.distributed as dist
from conftest import THOROUGH
from torch import nn
from torch.nn import functional as F

from ddp_course import lesson03
from ddp_course.lesson03 import (
    BucketedDDP,
    OverlappedDDP,
    average_gradients,
    broadcast_from_rank_zero,
)
from ddp_course.models.convnets import MLP, ConvNet
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

STEPS = 6


class Tied(nn.Module):
    """One weight used in two places, a part that is frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(784, 24)
        self.middle = nn.Linear(24, 24, bias=False)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.out = nn.Linear(24, 24, bias=False)
        self.out.weight = self.middle.weight
        self.norm = nn.BatchNorm1d(24, affine=False)

    def forward(self, x):
        x = F.relu(self.into(x.flatten(1)))
        x = F.relu(self.middle(x)) + self.frozen(x)
        return F.log_softmax(self.out(x)[:, :10], dim=1)


class MixedTypes(nn.Module):
    """Parameters of two types, which cannot lie in one bucket."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(784, 16)
        self.second = nn.Linear(16, 10)

    def forward(self, x):
        return F.log_softmax(
            self.second(F.relu(self.first(x.flatten(1))).float()).double(), dim=1
        )

    def double(self):
        self.first.double()
        return self


MODELS = {
    "ConvNet": lambda: ConvNet(dropout=False),
    "MLP": lambda: MLP(width=32),
    "tied and frozen": Tied,
    "two types": MixedTypes,
}


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        images = torch.randn(12, 1, 28, 28, dtype=torch.float64, generator=generator)
        yield images, torch.randint(10, (12,), generator=generator)


def train(model, finish=lambda: None, rank=0, world_size=1):
    """Take a step for this rank's part of each batch; return all parameters after each
    step.
    """
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    history = []
    for images, labels in batches():
        optimizer.zero_grad()
        F.nll_loss(
            model(images.chunk(world_size)[rank]), labels.chunk(world_size)[rank]
        ).backward()
        finish()
        optimizer.step()
        history.append(
            torch.cat([p.detach().double().flatten() for p in model.parameters()])
        )
    return history


def train_rank(name, wrap, *options):
    """Train on this rank. Each rank starts from its own model, which DDP puts right."""
    with process_group() as (rank, world_size):
        torch.manual_seed(rank)
        model = MODELS[name]().double()
        if wrap == "after":
            broadcast_from_rank_zero(model)
            return train(model, lambda: average_gradients(model), rank, world_size)
        model = wrap(model, *options)
        return train(model, model.finish_gradient_synchronization, rank, world_size)


def assert_same_as_one_process(name, wrap, *options, nproc=2):
    torch.manual_seed(0)
    alone = train(MODELS[name]().double())
    for rank, history in enumerate(
        launch(train_rank, name, wrap, *options, nproc=nproc)
    ):
        assert len(history) == STEPS
        for step, (ours, expected) in enumerate(zip(history, alone)):
            tolerance = (
                1e-4 if name == "two types" else 1e-9
            )  # one of the two is float32
            difference = (ours - expected).abs().max().item()
            assert difference < tolerance, (
                f"rank {rank}, step {step}: off by {difference}"
            )


VERSIONS = {
    "after": ("after",),
    "overlapped": (OverlappedDDP,),
    "one bucket": (BucketedDDP, 25.0),
    "many buckets": (BucketedDDP, 0.001),
}


@pytest.mark.parametrize("nproc", [2, 3] if THOROUGH else [3])
@pytest.mark.parametrize(
    "version", VERSIONS if THOROUGH else ["overlapped", "many buckets"]
)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one_process_after_every_step(name, version, nproc):
    assert_same_as_one_process(name, *VERSIONS[version], nproc=nproc)


# ---- planted faults: the assertion above must find each ----


class NoBroadcast(BucketedDDP):
    def __init__(self, module):
        original, lesson03.broadcast_from_rank_zero = (
            lesson03.broadcast_from_rank_zero,
            lambda module: None,
        )
        try:
            super().__init__(module)
        finally:
            lesson03.broadcast_from_rank_zero = original


class SumForMean(OverlappedDDP):
    def gradient_is_ready(self, parameter):
        self.in_flight[parameter] = dist.all_reduce(parameter.grad, async_op=True)


class NeverWaits(OverlappedDDP):
    """Averages, but steps with what is there when it is not yet there."""

    def gradient_is_ready(self, parameter):
        received = parameter.grad / dist.get_world_size()
        self.in_flight[parameter] = dist.all_reduce(received, async_op=True)


class AveragesParameters(OverlappedDDP):
    """A fault of a published from-scratch DDP: the hook reduces the parameter and not
    its gradient.
    """

    def gradient_is_ready(self, parameter):
        parameter.data /= dist.get_world_size()
        self.in_flight[parameter] = dist.all_reduce(parameter.data, async_op=True)


class ForgetsTheLast(BucketedDDP):
    """The bucket that is filled last is never sent."""

    def gradient_is_ready(self, parameter):
        if self.bucket_of[parameter] != len(self.buckets) - 1:
            super().gradient_is_ready(parameter)

    def finish_gradient_synchronization(self):
        self.missing = [0] * len(self.buckets)
        super().finish_gradient_synchronization()


class PutsGradientsBackInTheWrongOrder(BucketedDDP):
    def finish_gradient_synchronization(self):
        for _, gradients, _ in self.sent:
            gradients.copy_(gradients.flip(0))
        super().finish_gradient_synchronization()


@pytest.mark.parametrize(
    "fault, options",
    [
        (NoBroadcast, ()),
        (SumForMean, ()),
        (NeverWaits, ()),
        (AveragesParameters, ()),
        (ForgetsTheLast, (0.001,)),
    ]
    + [(PutsGradientsBackInTheWrongOrder, (25.0,))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_proof_finds_planted_faults(fault, options):
    with pytest.raises(AssertionError, match="rank . step|rank 0, step|rank 1, step"):
        assert_same_as_one_process("MLP", fault, *options)


def test_the_proof_finds_uneven_parts():
    """12 samples on 5 ranks: parts of 3, 3, 3, 3 and none would not even run; on 7, a
    mean of unequal means.
    """
    with pytest.raises((AssertionError, RankError)):
        assert_same_as_one_process("MLP", "after", nproc=5)


# ---- how they do it ----


def test_buffers_too_come_from_rank_zero():
    def running_means():
        with process_group() as (rank, _):
            model = Tied()
            model.norm.running_mean.fill_(rank + 1.0)
            OverlappedDDP(model)
            return model.norm.running_mean[0].item()

    assert launch(running_means, nproc=3) == [1.0, 1.0, 1.0]


def collectives_of(wrap, *options):
    with process_group():
        model = wrap(ConvNet(dropout=False), *options)

        def step():
            F.nll_loss(
                model(torch.randn(4, 1, 28, 28)), torch.zeros(4, dtype=torch.long)
            ).backward()
            model.finish_gradient_synchronization()

        step()
        model.zero_grad()
        return watch.count_collectives(step)["allreduce"], [
            len(bucket) for bucket in getattr(model, "buckets", [])
        ]


def test_all_reduces_are_as_many_as_parameters_or_buckets():
    """ConvNet's last layers first: fc2 (5 kB) and fc1 (4.7 MB), then the convolutions
    (75 kB).
    """
    assert launch(collectives_of, OverlappedDDP)[0][0] == 8
    assert launch(collectives_of, BucketedDDP, 25.0)[0] == (1, [8])
    assert launch(collectives_of, BucketedDDP, 1.0)[0] == (2, [4, 4])
    assert launch(collectives_of, BucketedDDP, 0.0)[0] == (8, [1] * 8)


def test_communication_begins_before_backward_ends():
    def in_flight_when_the_first_layer_is_done(wrap, *options):
        with process_group():
            module = MLP(width=16)
            seen = []
            module[1].weight.register_post_accumulate_grad_hook(
                lambda _: seen.append(
                    len(model.in_flight) + len(getattr(model, "sent", []))
                )
            )
            model = wrap(module, *options)
            model(torch.randn(4, 784)).sum().backward()
            model.finish_gradient_synchronization()
            return seen[0]

    assert launch(in_flight_when_the_first_layer_is_done, OverlappedDDP)[0] >= 6
    assert launch(in_flight_when_the_first_layer_is_done, BucketedDDP, 0.001)[0] >= 2


def test_buckets_are_filled_from_the_last_layer_to_the_first():
    def first_and_last():
        with process_group():
            module = MLP(width=16)
            model = BucketedDDP(module, 0.0001)
            return model.buckets[0][0] is module[-2].bias, model.buckets[-1][
                -1
            ] is module[1].weight

    assert launch(first_and_last) == [(True, True)] * 2


class HalfUsed(nn.Module):
    """Two layers; the outputs depend on one of them."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images):
        return self.used(images)


@pytest.mark.parametrize("backwards, network", [(0, MLP), (2, MLP), (2, HalfUsed)])
def test_a_gradient_too_few_or_too_many_is_refused(backwards, network):
    def step():
        with process_group():
            model = BucketedDDP(network())
            for _ in range(backwards):
                model(torch.randn(4, 784)).sum().backward()
            model.finish_gradient_synchronization()

    with pytest.raises(
        RankError, match="each parameter must get one gradient per step"
    ):
        launch(step)


def test_a_second_backward_before_the_first_is_finished_is_refused():
    """It would add to gradients while they are being sent, and nobody would notice."""

    def step():
        with process_group():
            model = OverlappedDDP(MLP(width=8))
            for _ in range(2):
                model(torch.randn(4, 784)).sum().backward()

    with pytest.raises(RankError, match="second backward before the first one"):
        launch(step)


@pytest.mark.parametrize(
    "samples, world_size", [(10, 2), (11, 2), (11, 3), (1437, 3), (2, 3)]
)
def test_shares_are_disjoint_equal_and_nearly_complete(samples, world_size):
    shares = [
        lesson03.share_of(samples, 0, rank, world_size) for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {samples // world_size}
    seen = [index for share in shares for index in share]
    assert len(set(seen)) == len(seen) == samples - samples % world_size


def test_shares_differ_from_epoch_to_epoch_and_with_the_seed():
    shares = [
        lesson03.share_of(50, epoch, 0, 2, seed)
        for epoch in range(3)
        for seed in (0, 100)
    ]
    assert len({tuple(share) for share in shares}) == 6
