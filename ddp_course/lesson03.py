"""DistributedDataParallel by hand: average after backward, during it, in buckets.

torchrun --nproc_per_node 2 ddp_course/lesson03.py
torchrun --nproc_per_node 3 ddp_course/lesson03.py --average overlapped --epochs 1
torchrun ddp_course/lesson03.py --average after --epochs 1
python -m ddp_course.lesson03 --bucket-size-mb 1 --epochs 1
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import runs
from ddp_course.data.images import load_images
from ddp_course.lesson01 import evaluate
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group


def broadcast_from_rank_zero(module):
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(module):
    """Average each gradient over the ranks. Every rank calls it, after backward."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class OverlappedDDP(nn.Module):
    """Averages each gradient as soon as it is complete, while backward continues."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.in_flight = {}  # by parameter, the all-reduce of its gradient
        broadcast_from_rank_zero(module)
        for parameter in module.parameters():  # tied parameters come once
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def gradient_is_ready(self, parameter):
        if parameter in self.in_flight:  # it would be added to while it is being sent
            raise RuntimeError("a second backward before the first one was finished")
        parameter.grad /= dist.get_world_size()
        self.in_flight[parameter] = dist.all_reduce(parameter.grad, async_op=True)

    def finish_gradient_synchronization(self):
        """Wait until every gradient is the mean over the ranks.

        Call it after each backward, before `optimizer.step()`.
        """
        for work in self.in_flight.values():
            work.wait()
        self.in_flight.clear()


ONE_GRADIENT = (
    "each parameter must get one gradient per step: "
    "freeze those that are not used, and finish after each backward"
)


class BucketedDDP(OverlappedDDP):
    """Averages gradients in buckets of `bucket_size_mb` MiB, in few large messages.

    A bucket is full once it has reached its size. Backward computes gradients roughly
    from the last layer to the first, so the buckets are filled in reverse order.
    """

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__(module)
        self.buckets, self.bucket_of = [], {}
        self.sent = []  # (all-reduce, gradients, bucket) of each bucket in flight
        room = 0  # bytes until the bucket is full
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in reversed(trained):
            if room <= 0 or parameter.dtype != self.buckets[-1][0].dtype:
                self.buckets.append([])
                room = bucket_size_mb * 2**20
            self.buckets[-1].append(parameter)
            self.bucket_of[parameter] = len(self.buckets) - 1
            room -= parameter.nbytes
        self.missing = [set(bucket) for bucket in self.buckets]

    def gradient_is_ready(self, parameter):
        index = self.bucket_of[parameter]
        if parameter not in self.missing[index]:
            raise RuntimeError(ONE_GRADIENT)
        self.missing[index].remove(parameter)
        if not self.missing[index]:
            bucket = self.buckets[index]
            gradients = torch.cat([member.grad.flatten() for member in bucket])
            gradients /= dist.get_world_size()
            work = dist.all_reduce(gradients, async_op=True)
            self.sent.append((work, gradients, bucket))

    def finish_gradient_synchronization(self):
        """Wait until every gradient is the mean over the ranks.

        Raises RuntimeError if a parameter got no gradient since the last call: its
        bucket was not sent. (A second gradient raises it in backward.)
        """
        if any(self.missing):
            raise RuntimeError(ONE_GRADIENT)
        for work, gradients, bucket in self.sent:
            work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, mean in zip(bucket, gradients.split(sizes)):
                parameter.grad = mean.view_as(parameter)
        self.sent.clear()
        self.missing = [set(bucket) for bucket in self.buckets]


def distributed(network, average="bucketed", bucket_size_mb=25.0):
    """Make a network data-parallel: return the model to call, and what to call after
    each backward.
    """
    if average == "after":
        broadcast_from_rank_zero(network)
        return network, partial(average_gradients, network)
    if average == "overlapped":
        model = OverlappedDDP(network)
    else:
        model = BucketedDDP(network, bucket_size_mb)
    return model, model.finish_gradient_synchronization


def train_one_epoch(model, loader, optimizer, device, finish):
    """Lesson 1's loop; `finish()` makes the gradients equal on all ranks.

    Return the loss of each step, averaged over the ranks: a list of floats.
    """
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    runs.check_finite(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def share_of(samples, epoch, rank, world_size, seed=0):
    """The indices that this rank trains on in this epoch: every n-th of a shuffle.

    The shuffle is the same on all ranks. What is left over when all ranks have equally
    many is left out: a rank with one batch more would wait forever.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    shuffled = torch.randperm(samples, generator=generator).tolist()
    return shuffled[: samples // world_size * world_size][rank::world_size]


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag, when = parser.add_argument, ["after", "overlapped", "bucketed"]
    how = "how gradients are averaged (bucketed)"
    flag("--average", choices=when, default="bucketed", help=how)
    size = "MiB per bucket (25)"
    flag("--bucket-size-mb", type=runs.megabytes, default=25.0, help=size)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        log = runs.open_folder(args.out)
        train_set, test_set = load_images(args.data, args.train_samples, device)
        runs.check_batch_size(args.batch_size, len(train_set), world_size)

        torch.manual_seed(args.seed)
        network = ConvNet(dropout=not args.no_dropout).to(device)
        model, finish = distributed(network, args.average, args.bucket_size_mb)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(args.seed + rank)  # each rank draws its own dropout

        losses, seconds = [], 0.0
        for epoch in range(args.epochs):
            begin = time.perf_counter()
            share = share_of(len(train_set), epoch, rank, world_size, args.seed)
            loader = DataLoader(train_set, args.batch_size, sampler=share)
            losses += train_one_epoch(model, loader, optimizer, device, finish)
            seconds += time.perf_counter() - begin
            log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")

        # every rank evaluates all of the test set; lesson 4 shares this work
        correct, seen = evaluate(network, DataLoader(test_set, batch_size=250), device)
        accuracy = correct / seen
        return runs.finish(
            args, device, network, train_set, losses, seconds, accuracy, seen
        )


if __name__ == "__main__":
    runs.start(main)
