"""Where a step's time goes, the switches that shorten it, and a model that predicts it.

torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --trace 4
torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --fused --channels-last
torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --bucket-mb 1
python ddp_course/lesson16.py --epochs 1 --precision bf16 --workers 1
"""

import math
import statistics
import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.data.images import load_images
from ddp_course.detectors.step_profile import StepProfile as StepProfile
from ddp_course.detectors.traces import read_trace, record_trace, time_use
from ddp_course.estimates.traffic import ring_seconds
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson14 import compress
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group

# ---- which of two programs is faster ----


def take_turns(steps, rounds, warm_up=3):
    """Time training steps in turn: {name: seconds of each round}.

    Other work on the machine then slows all of them alike. Every other round goes
    backwards, as a step may be slower after a certain one. All ranks call it together;
    a round of a step counts as long as the slowest rank took.
    """
    times = {name: [] for name in steps}
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for number in range(warm_up + rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            taken = torch.tensor([time.perf_counter() - begin], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= warm_up:
                times[name].append(taken.item())
    return times


def times_as_fast(times, name, base):
    """How many times as fast `name` is as `base`: (low, median, high).

    Each round gives one ratio, of two steps of the same round. If there is no
    difference, 1 is outside of low to high in at most 5 of 100 comparisons: this is the
    sign test (W. Dixon and A. Mood, "The statistical sign test", 1946). It takes six
    rounds at least. Raises ValueError if there are fewer.
    """
    ratios = sorted(slow / fast for slow, fast in zip(times[base], times[name]))
    n, outside, chance = len(ratios), 0, 2 / 2 ** len(ratios)
    if chance > 0.05:
        raise ValueError(f"{n} rounds cannot say anything: take six or more")
    while chance + 2 * math.comb(n, outside + 1) / 2**n <= 0.05:
        outside += 1
        chance += 2 * math.comb(n, outside) / 2**n
    return ratios[outside], statistics.median(ratios), ratios[-1 - outside]


# ---- a model that predicts ----


def buckets(gradients, cap):
    """Fill buckets as DDP does: [(when the bucket is ready, bytes), ...].

    gradients: as in StepProfile. cap: a bucket with this many bytes is full.
    """
    full, size = [], 0
    for when, added in gradients:
        size += added
        if size >= cap:
            full.append((when, size))
            size = 0
    return full + [(gradients[-1][0], size)] * (size > 0)


def transfers(step, cap, ranks, alpha, beta):
    """Predict when DDP's buckets travel, one after the other: [(begin, end), ...], in
    seconds since backward began.

    step: a StepProfile. alpha: seconds per message, beta: seconds per byte, as in
    lesson 2.
    """
    free, spans = 0.0, []  # free: when the network is free again
    for ready, size in buckets(step.gradients, cap):
        begin = max(free, ready)
        free = begin + ring_seconds(size, ranks, alpha, beta)
        spans.append((begin, free))
    return spans


def exposed_seconds(step, cap, ranks, alpha, beta):
    """Predict the exposed communication of DDP: what is not hidden behind backward."""
    _, end = transfers(step, cap, ranks, alpha, beta)[-1]
    return max(0.0, end - step.backward)


# ---- the program: lesson 4's, with switches ----


def training_step(model, images, labels, optimizer, device, args):
    """Do one update; return the loss of this rank."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    images = images.to(device, memory_format=layout, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        output = model(images)
    loss = F.nll_loss(output.float(), labels.to(device, non_blocking=True))
    loss.backward()
    optimizer.step()
    return loss.detach()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag, count, switch = parser.add_argument, runs.count, {"action": "store_true"}
    flag("--workers", type=runs.whole, default=0, help="processes that read data (0)")
    flag("--channels-last", **switch, help="images as (rows, columns, channels)")
    precisions, ways = ["fp32", "bf16"], ["none", "bf16", "powersgd"]
    flag("--precision", choices=precisions, default="fp32", help="of autocast (fp32)")
    flag("--fused", **switch, help="AdamW in one pass over all parameters")
    flag("--compile", **switch, help="compile the model: pays in long runs")
    flag("--static-graph", **switch, help="promise DDP that all steps are alike")
    size = "of DDP's buckets (25, the first 1)"
    flag("--bucket-mb", type=runs.megabytes, help=size)
    flag("--compress", choices=ways, default="none", help="of the gradients (none)")
    flag("--trace", type=count, metavar="STEP", help="record this step's trace")
    args = parser.parse_args(argv)
    if args.bucket_mb == 0:
        parser.error(f"--bucket-mb {args.bucket_mb} is not a size")
    if args.bucket_mb and args.compress == "powersgd":  # see lesson 14
        parser.error("--compress powersgd needs one bucket: leave out --bucket-mb")
    if args.compile and (args.bucket_mb or 1) < 1:
        parser.error("--compile needs buckets of 1 MiB or more: see --bucket-mb")
    return args


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        run = prepare(args, rank, world_size, device)
        train(run)
        return report(run)


def prepare(args, rank, world_size, device):
    """What `train` needs: data and model."""
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    train_set = train_set.to("cpu")  # as data that does not fit on a GPU
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, num_workers=args.workers,
        persistent_workers=args.workers > 0, pin_memory=device.type == "cuda",
    )  # fmt: skip
    if args.trace and args.trace > args.epochs * len(train_loader):
        steps = f"the run has {args.epochs * len(train_loader)} steps"
        raise UsageError(f"--trace {args.trace} is not reached: {steps}")

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    gpu = [device] if device.type == "cuda" else None
    one_bucket = 100 if args.compress == "powersgd" else None
    model = DistributedDataParallel(
        model, device_ids=gpu, gradient_as_bucket_view=True,
        static_graph=args.static_graph, bucket_cap_mb=args.bucket_mb or one_bucket,
    )  # fmt: skip
    compress(model, args.compress)
    if args.compile:
        model.compile()  # after wrapping; in place, so names of parameters stay
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused)
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout
    return SimpleNamespace(
        args=args, log=log, device=device, train_set=train_set, test_set=test_set,
        loader=train_loader, model=model, optimizer=optimizer, seconds=0.0,
    )  # fmt: skip


def train(run):
    args, model, losses = run.args, run.model, []
    for epoch in range(args.epochs):
        # a different shuffle per epoch, the same on all ranks
        run.loader.sampler.set_epoch(epoch)
        begin = time.perf_counter()
        model.train()
        for images, labels in run.loader:
            inputs = images, labels, run.optimizer, run.device, args
            step = partial(training_step, model, *inputs)
            if len(losses) + 1 == args.trace:
                losses.append(traced(step, args.out, run.log))
            else:
                losses.append(step())
        means = torch.stack(losses)
        runs.check_finite(means[-len(run.loader) :])
        dist.all_reduce(means, dist.ReduceOp.AVG)
        run.seconds += time.perf_counter() - begin
        correct, run.seen = evaluate(model, run.test_set, run.device)
        run.losses, run.accuracy = means.tolist(), correct / run.seen
        run.log.info(
            f"epoch {epoch + 1}: loss {means[-1]:.3f}, accuracy {run.accuracy:.1%}"
        )


def report(run):
    model, path = run.model, run.args.out / "model.pt"
    save(model, path)
    load(model, path, run.device)  # what is reported is what was saved
    trained = model.module, run.train_set, run.losses, run.seconds
    return runs.finish(run.args, run.device, *trained, run.accuracy, run.seen)


def traced(step, folder, log):
    """Do a step under the profiler; log where its time went, of all ranks."""
    losses, path = [], folder / f"trace-rank{dist.get_rank()}.json"
    record_trace(lambda: losses.append(step()), path)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, time_use(**read_trace(path)))
    for number, used in enumerate(of_ranks):
        parts = ", ".join(f"{what} {ms:.1f} ms" for what, ms in used.items())
        log.info(f"the traced step of rank {number}: {parts}")
    return losses[0]


if __name__ == "__main__":
    runs.start(main)
