"""SyncBatchNorm: BatchNorm that sees the batch of all ranks, on a CPU too.

torchrun --nproc_per_node 2 ddp_course/lesson05.py --batch-size 2 --train-samples 288
torchrun --nproc_per_node 2 ddp_course/lesson05.py --no-sync --train-samples 288
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
from ddp_course.lesson04 import evaluate, load, save, train_one_epoch
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import NormNet


class NormalizeOverRanks(torch.autograd.Function):
    """Give each channel mean 0 and variance 1 over the batches of all ranks together.

    x: (batch, channels, ...), on each rank its own part, which may be empty. Returns
    the normalised x, and of the joined batch: the mean and the (biased) variance of
    each channel, float64 (channels,), and how many values each channel has, float64
    (1,). Raises ValueError, on all ranks, where that is less than two.

    The formulas: S. Ioffe, C. Szegedy, Batch Normalization, 2015, section 3, with sums
    over all ranks.
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
            raise ValueError(
                f"Expected more than 1 value per channel when training, {got}"
            )
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt()
        normalized = (wide - along_channels(mean, x)) * along_channels(scale, x)
        normalized = normalized.to(x.dtype)
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
        return result.to(gradient.dtype), None


def sum_by_channel(x):
    """Sum over all dimensions but the second: (batch, channels, ...) becomes
    (channels,).
    """
    return x.sum(dim=[0, *range(2, x.dim())])


def along_channels(vector, x):
    """Shape (channels,) so that it meets x, (batch, channels, ...), channel by
    channel.
    """
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d in one, with the statistics of all ranks' batches, on any
    backend.

    Takes (batch, channels, ...), float, and returns the same shape. While it trains,
    all ranks must call it equally often; in eval mode, and outside of a process group,
    it is an ordinary BatchNorm, and communicates with nobody. Options, state and names
    are those of `nn.BatchNorm1d`.
    Raises ValueError where the shape does not fit, or where a channel has less than two
    values on all ranks together.
    """

    def _check_input_dim(self, x):
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"expected (batch, {self.num_features}, ...), got {tuple(x.shape)}"
            )

    def forward(self, x):
        self._check_input_dim(x)
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        x, mean, variance, count = NormalizeOverRanks.apply(x, self.eps)
        if self.track_running_stats:
            self.update_running_statistics(mean, variance, count)
        output = x
        if self.weight is not None:
            output = output * along_channels(self.weight, x)
        if self.bias is not None:
            output = output + along_channels(self.bias, x)
        return output.to(x.dtype)

    @torch.no_grad()
    def update_running_statistics(self, mean, variance, count):
        self.num_batches_tracked += 1
        part = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running += part * (new.to(running.dtype) - running)


def convert_sync_batchnorm(module):
    """Replace every BatchNorm in `module` by a SyncBatchNorm with its parameters,
    buffers and mode.

    On CUDA that is torch's own, which is faster; elsewhere ours. Returns the module, or
    what has taken its place. To be called before the model is wrapped in DDP.
    """
    if any(tensor.is_cuda for tensor in [*module.parameters(), *module.buffers()]):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm) and not isinstance(
        module, SyncBatchNorm | nn.SyncBatchNorm
    ):
        converted = SyncBatchNorm(module.num_features)
        converted.__dict__.update(
            module.__dict__
        )  # the very same Parameters, buffers and options
        return converted
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    return module


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, world_size):
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, shuffle=True, seed=args.seed
    )
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True
    )

    torch.manual_seed(args.seed)
    model = NormNet().to(device)
    if args.sync:
        model = convert_sync_batchnorm(model)
    model = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        # .grad lies in the bucket: one copy less, and less memory
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another shuffle in each epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        log.info(
            f"epoch {epoch + 1}: loss {losses[-1]:.3f}, test accuracy {correct / seen:.1%}"
        )

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)
    return runs.finish(
        args, device, model.module, train_set, losses, seconds, correct / seen, seen
    )


if __name__ == "__main__":
    runs.start(main)
