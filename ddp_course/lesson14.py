"""Training that goes on with as many machines as there are, over a slow network.

torchrun --nproc_per_node 2 ddp_course/lesson14.py --epochs 1 --save-every 5
torchrun --nproc_per_node 3 ddp_course/lesson14.py --epochs 2 --resume
torchrun --nproc_per_node 2 ddp_course/lesson14.py --epochs 1 --compress bf16
python ddp_course/lesson14.py --epochs 1 --global-batch 64
"""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course import UsageError, runs
from ddp_course.checkpoints.one_file import resume, save_checkpoint
from ddp_course.data.images import load_images
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson06 import summed_loss
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group
from ddp_course.ranks.restarts import goes_on, job

# ---- the same batches for any number of ranks ----


class DealtBatches:
    """A batch sampler that deals each global batch over the ranks that there are.

    However many ranks deal it, together they take the same samples. Yields this rank's
    indices for each update from `start` on. Samples at the end of an epoch that do not
    fill a global batch are left out. Each epoch has its own shuffle, so different ones
    are left out each time.
    """

    start = 0

    def __init__(self, samples, global_batch, epochs, seed):
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.per_epoch = samples // global_batch
        self.updates = epochs * self.per_epoch

    def __iter__(self):
        for update in range(self.start, self.updates):
            epoch, number = divmod(update, self.per_epoch)
            shuffle = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=shuffle)
            batch = order.split(self.global_batch)[number]
            yield batch[dist.get_rank() :: dist.get_world_size()].tolist()


def update(model, images, labels, optimizer, args):
    """Do one update; return this rank's part of the mean loss over the global batch.

    A rank with a larger part, because there are fewer ranks, takes more micro-batches.
    The size of the global batch is known, so no message is needed to count it.
    """
    optimizer.zero_grad()
    mean = 0.0
    parts = list(zip(images.split(args.batch_size), labels.split(args.batch_size)))
    for number, (inputs, targets) in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else model.no_sync():
            loss = summed_loss(model(inputs), targets) / args.global_batch
            # DDP will divide the gradients by the number of ranks
            (loss * dist.get_world_size()).backward()
        mean = mean + loss.detach()
    optimizer.step()
    return mean


# ---- fewer bytes per update ----


def compress(model, how):
    """Let DDP send its buckets in another form: 'bf16', half of the bytes, or
    'powersgd', two thin matrices in place of each gradient.

    T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019.
    """
    if how == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    elif how == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)


# ---- the program ----


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch, at most")
    flag, count = parser.add_argument, runs.count
    together = "samples per update, on all ranks together (%(default)s)"
    flag("--global-batch", type=count, default=128, help=together)
    ways = ["none", "bf16", "powersgd"]
    flag("--compress", choices=ways, default="none", help="of the gradients (none)")
    flag("--save-every", type=count, default=10, help="updates per checkpoint (10)")
    resume_help = "go on from the checkpoint, if any; dropout draws anew"
    flag("--resume", action="store_true", help=resume_help)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def prepare(args, rank, world_size, device):
    """What `train` needs: data, model, and where an earlier run has ended."""
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    if not world_size <= args.global_batch <= len(train_set):
        limits = f"from {world_size}, the ranks, to {len(train_set)}, the samples"
        raise UsageError(f"--global-batch {args.global_batch} is impossible: {limits}")
    batches = DealtBatches(len(train_set), args.global_batch, args.epochs, args.seed)
    loader = DataLoader(train_set, batch_sampler=batches)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, test_set=test_set,
        batches=batches, loader=loader, optimizer=optimizer,
        parts={"model": model, "optimizer": optimizer}, path=args.out / "checkpoint.pt",
        progress={"losses": [], "seconds": 0.0, "began": time.time()},
    )  # fmt: skip
    go_on(run)

    gpu = [device] if device.type == "cuda" else None
    # PowerSGD sends several messages per bucket, whose order among buckets may differ
    # from rank to rank: with one bucket there is only one order
    megabytes = 100 if args.compress == "powersgd" else None
    run.model = DistributedDataParallel(model, device_ids=gpu, bucket_cap_mb=megabytes)
    compress(run.model, args.compress)
    torch.manual_seed(args.seed + batches.start * world_size + rank)  # for dropout
    return run


def go_on(run):
    """Go on where the run in this folder has ended, if asked to, or after a restart."""
    args, batches = run.args, run.batches
    settings = {"seed": args.seed, "global-batch": args.global_batch}
    settings |= {"data": run.train_set.name, "train-samples": len(run.train_set)}
    settings |= {"batch-size": args.batch_size, "compress": args.compress}
    if args.resume or goes_on(args.out):
        if found := resume(run.path, run.parts, settings):
            run.progress = found
            run.log.info(f"resuming after update {len(found['losses'])}")
    run.progress["settings"] = settings
    if dist.get_rank() == 0:
        runs.write_atomically(args.out / "job", job())
    ranks = dist.get_world_size()
    of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    run.log.info(f"{of_ranks}, {args.global_batch} samples per update")
    batches.start = len(run.progress["losses"])
    if batches.start > batches.updates:
        problem = f"the checkpoint is {batches.start} updates into its run"
        raise UsageError(f"{problem}; --epochs {args.epochs} has {batches.updates}")


def train(run):
    args, batches, progress = run.args, run.batches, run.progress
    recent, begin = [], time.perf_counter()
    for images, labels in run.loader:
        run.model.train()
        images, labels = images.to(run.device), labels.to(run.device)
        recent.append(update(run.model, images, labels, run.optimizer, args))
        done = len(progress["losses"]) + len(recent)
        if done % args.save_every and done % batches.per_epoch:
            continue
        losses = torch.stack(recent)
        runs.check_finite(losses)
        dist.all_reduce(losses)
        progress["seconds"] += time.perf_counter() - begin
        progress["losses"] = progress["losses"] + losses.tolist()
        save_checkpoint(run.path, run.parts, progress)
        run.log.info(f"update {done} of {batches.updates}: loss {losses[-1]:.3f}")
        recent, begin = [], time.perf_counter()


def report(run):
    model, progress, path = run.model, run.progress, run.args.out / "model.pt"
    goodput = progress["seconds"] / (time.time() - progress["began"])
    took = "of the time since the run began went into updates that count"
    run.log.info(f"goodput: {goodput:.0%} {took}")
    correct, seen = evaluate(model, run.test_set, run.device)
    save(model, path)
    load(model, path, run.device)  # what is reported is what was saved
    trained = model.module, run.train_set, progress["losses"], progress["seconds"]
    return runs.finish(run.args, run.device, *trained, correct / seen, seen)


if __name__ == "__main__":
    runs.start(main)
