"""Where a step's time goes, the switches that shorten it, and a model that predicts it.

torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --trace 4
torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --fused --channels-last
torchrun --nproc_per_node 2 ddp_course/lesson16.py --epochs 1 --bucket-mb 1
python ddp_course/lesson16.py --epochs 1 --precision bf16 --workers 1
"""

import itertools
import os
import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, lesson02, runs
from ddp_course.data.images import load_images
from ddp_course.detectors.traces import events_of, is_whole
from ddp_course.lesson04 import evaluate, load, save
from ddp_course.lesson14 import compress
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import backend_for, choose_device, process_group

# ---- where a step's time goes ----

STEP = "the step"  # the range in a trace that holds the whole step
TRANSFERS = ("gloo:", "nccl", "pretend:")  # what moves data
STARTS = ("autograd::engine", "c10d::", "record_param_comms")  # what may only wait


def record_trace(step, path):
    """Run `step()`, one training step, under torch's profiler; write its trace.

    The file is for https://ui.perfetto.dev, and for `read_trace`. Raises UsageError if
    it cannot be written.
    """
    # otherwise the profiler's library reports each start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what earlier steps have queued is not this step's
    with profile() as profiler, record_function(STEP):
        step()
    profiler.export_chrome_trace(str(path))
    if not is_whole(path):
        raise UsageError(f"cannot write a whole trace to {path}: is the disk full?")


def read_trace(path):
    """The spans of one step: {"communication", "computing": [(begin, end), ...]} and
    {"step": (begin, end)}, in milliseconds from the step's begin.

    On a GPU, its kernels compute; without one, torch's operators do.
    """
    events = events_of(path, STEP)
    [whole] = [e for e in events if (e["name"], e["cat"]) == (STEP, "user_annotation")]
    device = "kernel" if any(e["cat"] == "kernel" for e in events) else "cpu_op"
    spans = {"communication": [], "computing": []}
    for event in events:
        begin = (event["ts"] - whole["ts"]) / 1e3
        span = begin, begin + event["dur"] / 1e3
        moves_data = event["name"].startswith(TRANSFERS)
        if moves_data and (device == "cpu_op" or event["cat"] == "kernel"):
            spans["communication"].append(span)
        elif event["cat"] == device and not event["name"].startswith(STARTS):
            spans["computing"].append(span)
    ends = [end for of in spans.values() for _, end in of] if device == "kernel" else []
    return spans | {"step": (0.0, max([whole["dur"] / 1e3, *ends]))}


def time_use(communication, computing, step):
    """How long a step computes, exposes or hides its communication, and is idle.

    All are spans (begin, end), in any order; they may overlap, and be one inside the
    other. computing + exposed + idle is the length of the step.
    """
    edges = [(edge, 0, 0) for edge in step]
    for kind, spans in enumerate((communication, computing)):
        for begin, end in spans:
            begin, end = max(begin, step[0]), min(end, step[1])
            if begin < end:
                edges += [(begin, kind, 1), (end, kind, -1)]
    edges.sort()
    running, spent = [0, 0], {}  # spent: {(communicates, computes): time}
    for (begin, kind, change), (end, *_) in itertools.pairwise(edges):
        running[kind] += change
        state = running[0] > 0, running[1] > 0
        spent[state] = spent.get(state, 0.0) + end - begin
    hidden = spent.get((True, True), 0.0)
    return {
        "computing": spent.get((False, True), 0.0) + hidden,
        "exposed": spent.get((True, False), 0.0),
        "idle": spent.get((False, False), 0.0),
        "hidden": hidden,  # a part of computing
    }


# ---- which of two programs is faster ----


def take_turns(steps, rounds, warm_up=3):
    """Time training steps in turn: {name: seconds of each round}.

    Other work on the machine then slows all of them alike. All ranks call it together;
    a round of a step counts as long as the slowest rank took.
    """
    times = {name: [] for name in steps}
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for number in range(warm_up + rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            taken = torch.tensor([time.perf_counter() - begin], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= warm_up:
                times[name].append(taken.item())
    return times


def times_as_fast(times, name, base):
    """How many times as fast `name` is as `base`: (quartile, median, quartile).

    Each round gives one ratio, of two steps of the same round: next to each other if
    there are only two.
    """
    ratios = [slow / fast for slow, fast in zip(times[base], times[name])]
    return tuple(statistics.quantiles(ratios, n=4))


# ---- a model that predicts ----


class StepProfile(NamedTuple):
    """One step of one rank without communication. All times in seconds."""

    compute: float  # the whole step
    backward: float  # its backward pass
    gradients: list  # of each parameter: (when it is ready, bytes), in this order
    update: float = 0.0  # the optimizer's update, after backward


def profile_step(forward, parameters, update, rounds=7):
    """Take the StepProfile of a step: the round of median length.

    forward() returns the loss, update() is what follows backward. Give it a model that
    does not communicate: not wrapped, or inside `no_sync()`.
    """
    ready, found = [], []

    def now():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def note(parameter):
        ready.append((now(), parameter.grad.nbytes))

    hooks = [p.register_post_accumulate_grad_hook(note) for p in parameters]
    for _ in range(rounds):
        ready.clear()
        begin = now()
        loss = forward()
        middle = now()
        loss.backward()
        end = now()
        update()
        done = now()
        gradients = [(when - middle, size) for when, size in ready]
        found.append(StepProfile(done - begin, end - middle, gradients, done - end))
    for hook in hooks:
        hook.remove()
    return sorted(found)[rounds // 2]


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
        free = begin + lesson02.ring_seconds(size, ranks, alpha, beta)
        spans.append((begin, free))
    return spans


def exposed_seconds(step, cap, ranks, alpha, beta):
    """Predict the exposed communication of DDP: what is not hidden behind backward."""
    _, end = transfers(step, cap, ranks, alpha, beta)[-1]
    return max(0.0, end - step.backward)


def amdahl(n, serial):
    """The speed-up of a fixed amount of work of which a share cannot be divided.

    G. Amdahl, "Validity of the single processor approach to achieving large scale
    computing capabilities", 1967.
    """
    return 1 / (serial + (1 - serial) / n)


def gustafson(n, serial):
    """The speed-up if the part that can be divided grows with n, as weak scaling does.

    serial: the share of the time on n ranks. J. Gustafson, "Reevaluating Amdahl's law",
    1988.
    """
    return serial + (1 - serial) * n


def noise_scale(small, large, small_batch, large_batch):
    """The gradient noise scale, in samples: about the critical batch size.

    small, large: the mean squared norm of gradients over batches of these two sizes. S.
    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1.
    """
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    return noise / signal


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
        return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
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

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        model.train()
        for images, labels in train_loader:
            step = partial(
                training_step, model, images, labels, optimizer, device, args
            )
            if len(losses) + 1 == args.trace:
                losses.append(traced(step, rank, args.out, log))
            else:
                losses.append(step())
        means = torch.stack(losses)
        runs.check_finite(means[-len(train_loader) :])
        dist.all_reduce(means, dist.ReduceOp.AVG)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        log.info(
            f"epoch {epoch + 1}: loss {means[-1]:.3f}, accuracy {correct / seen:.1%}"
        )

    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    result = args, device, model.module, train_set, means.tolist(), seconds
    return runs.finish(*result, correct / seen, seen)


def traced(step, rank, folder, log):
    """Do a step under the profiler; log where its time went, of all ranks."""
    losses, path = [], folder / f"trace-rank{rank}.json"
    record_trace(lambda: losses.append(step()), path)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, time_use(**read_trace(path)))
    for number, used in enumerate(of_ranks):
        told = ", ".join(f"{what} {ms:.1f} ms" for what, ms in used.items())
        log.info(f"the traced step of rank {number}: {told}")
    return losses[0]


if __name__ == "__main__":
    runs.start(main)
