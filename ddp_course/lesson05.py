"""SyncBatchNorm: BatchNorm over the joined batch of all ranks, on a CPU too.

torchrun --nproc_per_node 2 ddp_course/lesson05.py --batch-size 2 --train-samples 288
torchrun --nproc_per_node 2 ddp_course/lesson05.py --no-sync --batch-size 2 --train-samples 288
python -m ddp_course.lesson05 --epochs 1
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import runs
from ddp_course.data.images import load_images
from ddp_course.lesson04 import evaluate, load, save, train_one_epoch
from ddp_course.models.convnets import NormNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group


class NormalizeOverRanks(torch.autograd.Function):
    """Give each channel mean 0 and variance 1 over the joined batch of all ranks.

    x: this rank's part of the joined batch, (batch, channels, ...); it may be empty.
    Returns the normalised x, in 32 bits or more, and three values of the joined batch:
    the mean and the biased variance of each channel, float64 (channels,), and the
    number of values per channel, float64 (1,). Raises ValueError on all ranks if that
    number is less than two.

    The formulas are those of S. Ioffe and C. Szegedy, "Batch Normalization", 2015,
    section 3, with each sum taken over all ranks.
    """

    @staticmethod
    def forward(ctx, x, eps):
        wide = x.double()  # mean(x²) - mean(x)² is a small difference of large numbers
        count = wide.new_tensor([x.numel() // x.shape[1]])
        sums = torch.cat([sum_by_channel(wide), sum_by_channel(wide.square()), count])
        dist.all_reduce(sums)
        total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
        if count < 2:
            got = f"got {int(count)} on all ranks"
            text = f"Expected more than 1 value per channel when training, {got}"
            raise ValueError(text)
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt()
        normalized = (wide - along_channels(mean, x)) * along_channels(scale, x)
        normalized = normalized.to(torch.promote_types(x.dtype, torch.float32))
        ctx.dtype = x.dtype
        ctx.save_for_backward(normalized, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *_):
        normalized, scale, count = ctx.saved_tensors
        wide, normal = gradient.double(), normalized.double()
        sums = torch.cat([sum_by_channel(wide), sum_by_channel(wide * normal)])
        dist.all_reduce(sums)
        mean, slope = (along_channels(part, wide) for part in (sums / count).chunk(2))
        result = (wide - mean - normal * slope) * along_channels(scale, wide)
        return result.to(ctx.dtype), None


def sum_by_channel(x):
    """Sum over all dimensions but the second: (batch, channels, ...) to (channels,)."""
    return x.sum(dim=[0, *range(2, x.dim())])


def along_channels(vector, x):
    """View a (channels,) vector so that it broadcasts over x (batch, channels, ...)."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d in one, with the statistics of the joined batch.

    It runs on any backend. It takes a float tensor (batch, channels, ...) and returns
    the same shape and type. In train mode, all ranks must call it equally often. In
    eval mode, and without a process group, it is an ordinary BatchNorm and does not
    communicate. Its options, state and names are those of `nn.BatchNorm1d`. Raises
    ValueError if the shape does not fit, or if a channel has fewer than two values on
    all ranks together.
    """

    def _check_input_dim(self, x):
        if x.dim() < 2 or x.shape[1] != self.num_features:
            expected = f"expected (batch, {self.num_features}, ...)"
            raise ValueError(f"{expected}, got {tuple(x.shape)}")

    def forward(self, x):
        self._check_input_dim(x)
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        output, mean, variance, count = NormalizeOverRanks.apply(x, self.eps)
        if self.track_running_stats:
            self.update_running_statistics(mean, variance, count)
        if self.weight is None:
            output = output.clone()  # backward needs it; a ReLU may work in place
        else:
            output = output * along_channels(self.weight, x)
        if self.bias is not None:
            output = output + along_channels(self.bias, x)
        return output.to(x.dtype)

    @torch.no_grad()
    def update_running_statistics(self, mean, variance, count):
        self.num_batches_tracked += 1
        part = self.momentum
        if part is None:  # then the mean of all batches so far
            part = 1 / self.num_batches_tracked
        unbiased = variance * count / (count - 1)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running += part * (new.to(running.dtype) - running)


def convert_sync_batchnorm(module):
    """Turn every BatchNorm in a module into a SyncBatchNorm; return the module.

    Call it after the model has moved to its device and before DDP wraps it. On CUDA it
    makes torch's own layers, which are faster there. Parameters and buffers stay the
    same objects. (On CUDA, a module that is itself a BatchNorm is replaced.)
    """
    if any(tensor.is_cuda for tensor in [*module.parameters(), *module.buffers()]):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for part in module.modules():
        is_synchronised = isinstance(part, SyncBatchNorm | nn.SyncBatchNorm)
        if isinstance(part, _BatchNorm) and not is_synchronised:
            part.__class__ = SyncBatchNorm  # keeps its state, wherever it is used
    return module


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    switch = argparse.BooleanOptionalAction
    sync_help = "statistics over all ranks, or not (yes)"
    parser.add_argument("--sync", action=switch, default=True, help=sync_help)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True
    )

    torch.manual_seed(args.seed)
    model = NormNet().to(device)
    if args.sync:
        model = convert_sync_batchnorm(model)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        for buffer in model.module.buffers():  # without --sync they differ by now
            dist.broadcast(buffer, 0)
        correct, seen = evaluate(model, test_set, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
