"""Training that watches itself: it names the rank, the step and what went wrong there.

torchrun --nproc_per_node 2 ddp_course/lesson15.py
torchrun --nproc_per_node 2 ddp_course/lesson15.py --epochs 1 --check-every 5
torchrun --nproc_per_node 3 ddp_course/lesson15.py --epochs 1 --watch desync nan
python ddp_course/lesson15.py --epochs 1 --watch
"""

import faulthandler
import pickle
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, runs
from ddp_course.lesson04 import evaluate, load, save, train_one_epoch
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    torchrun_environment,
)
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet

# ---- the flight recorder: what each rank has called ----


def flight_record(collectives=True, stacks=False):
    """This rank's latest collectives, as torch's flight recorder keeps them: a dict.

    collectives: with the collectives, or only how many there were. stacks: with the
    lines of code that called them. torch keeps 2000, or TORCH_FR_BUFFER_SIZE.
    """
    if dist.get_backend() == "nccl":  # it has a recorder of its own
        dump = _distributed_c10d._dump_nccl_trace
    else:
        dump = _distributed_c10d._dump_fr_trace
    return pickle.loads(dump(collectives, stacks, False))


def write_flight_record(folder):
    """Write this rank's flight record for torchfrtrace, which compares all ranks'.

    With gloo, torch 2.15 does not name the group in pg_config as it does in the
    entries, and torchfrtrace ends with KeyError: ('0', 0). So we name it here.
    """
    record = flight_record(stacks=True)
    ranks_of = {
        name: dist.get_process_group_ranks(group)
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    groups = {tuple(entry["process_group"]) for entry in record["entries"]}
    for name, description in groups | {("0", "default_pg")}:
        group = {
            "name": name,
            "desc": description,
            "ranks": str(ranks_of.get(name, ranks_of["0"])),
        }
        record["pg_config"].setdefault(name, group)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"fr_{dist.get_rank()}").write_bytes(pickle.dumps(record))


@contextmanager
def flight_recorded(folder, after=None):
    """Write this rank's flight record if the block fails, or takes too long.

    after: seconds. Then a thread writes the stacks of all threads to stack_RANK.txt,
    and the record. Like every Python thread it needs the GIL: for a rank that hangs
    without giving it up, faulthandler.dump_traceback_later writes the stacks. Files of
    an earlier run are removed.
    """
    rank, _, world_size, _ = torchrun_environment()
    for path in [*folder.glob("fr_*"), *folder.glob("stack_*.txt")]:
        number = path.stem.rpartition("_")[2]
        # a file of this rank, or of a rank that no longer exists
        if number.isdecimal() and int(number) % world_size == rank:
            try:
                path.unlink()
            except OSError as error:
                raise runs.cannot_write(path, error) from None

    def write():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"stack_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        if dist.is_initialized():
            write_flight_record(folder)

    timer = threading.Timer(after or 0, write)
    timer.daemon = True
    if after:
        timer.start()
    try:
        yield
    except RuntimeError:  # of a collective: a peer has not come, or has gone
        if dist.is_initialized():
            write_flight_record(folder)
        raise
    finally:
        timer.cancel()


# ---- what the tools share ----


def unwrapped(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def side_group(timeout):
    """A group of all ranks for the tools alone, with gloo also where training has nccl.

    Collectives in one group cannot be confused with those in another.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def exchange(thing, group):
    """What each rank brings, as a list in rank order, on all ranks."""
    things = [None] * dist.get_world_size(group)
    dist.all_gather_object(things, thing, group=group)
    return things


# ---- desync ----


class DesyncDetector:
    """Compares the ranks' parameters and the order of their collectives, step by step.

    Each rank hashes its parameters in each step; every `every` steps the ranks exchange
    the hashes, and the names and shapes of the collectives that the flight recorder has
    kept; call `check()` for the steps since then. It is for DDP, where all ranks have
    the same parameters, and not for shards. Raises UsageError on all ranks, with one
    line: the first step, the rank and the parameter or collective that differ from
    those of rank 0. Collectives that the flight recorder no longer has are counted, but
    not compared. Memory: random numbers as long as each parameter, once for all
    parameters of one length (see `digest`).
    """

    def __init__(self, model, optimizer, every=10, timeout=60):
        self.model, self.every, self.steps = unwrapped(model), every, []
        self.group = side_group(timeout)
        self.step, self.calls = 0, how_many_calls()
        self.seen = last(flight_record()["entries"])
        optimizer.register_step_post_hook(self.after_step)

    def after_step(self, *_):
        self.step += 1
        hashes = {name: digest(p) for name, p in self.model.named_parameters()}
        self.steps.append((self.step, how_many_calls(), hashes))
        if self.step % self.every == 0:
            self.check()

    def check(self):
        """Compare the steps since the last check. All ranks call it together."""
        dist.monitored_barrier(self.group, wait_all_ranks=True)  # names who is missing
        entries = flight_record()["entries"]  # takes longer than all else here
        mine, called = [], calls_since(self.seen, entries)
        for step, calls, hashes in self.steps:
            numbers = range(self.calls + 1, calls + 1)
            of_step = {
                place: called[number]
                for place, number in enumerate(numbers, 1)
                if number in called
            }
            numbered = {name: value.item() for name, value in hashes.items()}
            mine.append((step, len(numbers), of_step, numbered))
            self.calls = calls
        self.steps, self.seen = [], last(entries)
        for first, *others in zip(*exchange(mine, self.group)):
            for rank, other in enumerate(others, 1):
                if problem := difference(first, other, rank):
                    raise UsageError(f"desync in step {first[0]}: {problem}")


def digest(tensor):
    """A hash of a tensor's bits, an int64 tensor on its device.

    The bits, as integers of 64 bits, are multiplied by random odd numbers and added up
    modulo 2**64. So no change within one of these integers goes unnoticed; changes of
    several cancel out by rare chance only.
    """
    raw = tensor.detach().flatten().view(torch.uint8)
    words = torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)
    words = words * 0x5851F42D4C957F2D  # these two lines spread each bit over others
    words = words ^ (words >> 32 & 0xFFFFFFFF)
    return (words * odd_numbers(len(words), tensor.device)).sum()


@cache
def odd_numbers(count, device):
    """Random odd numbers, int64 (count,), the same on all ranks."""
    numbers = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(0))
    return (2 * numbers + 1).to(device)


def difference(first, other, rank):
    """What differs between a step of rank 0 and of another rank, as a text, or None.

    A step is (its number, how many collectives it has, {collective: text}, {parameter:
    hash}).
    """
    (_, count, calls, ours), (_, their_count, their_calls, theirs) = first, other
    for number in sorted(calls.keys() & their_calls.keys()):
        if calls[number] != their_calls[number]:
            place = f"collective {number} of rank {rank} is {their_calls[number]}"
            return f"{place}, and that of rank 0 is {calls[number]}"
    if count != their_count:
        return f"rank {rank} has called {their_count} collectives, and rank 0 {count}"
    if list(ours) != list(theirs):
        return f"rank {rank} has other parameters than rank 0"
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        more = f", and {len(different) - 1} more" if different[1:] else ""
        return f"{different[0]} of rank {rank} differs from that of rank 0{more}"
    return None


def how_many_calls():
    """How many collectives this rank has called in the default group."""
    status = flight_record(collectives=False)["pg_status"].get("0", {})
    return max(0, status.get("last_enqueued_collective", 0))


def last(entries):
    return entries[-1]["record_id"] if entries else -1


# whose sizes must be the same on all ranks; those of gather and scatter need not be
ALIKE = {"all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter"}


def calls_since(entry, entries):
    """The collectives in the default group after this entry: {number: text}.

    The text is what must be the same on all ranks, such as "all_reduce [[5]] Float".
    """
    called = {}
    for call in entries:
        group, _ = call["process_group"]
        if call["record_id"] > entry and group == "0" and not call["is_p2p"]:
            text = call["profiling_name"].partition(":")[2]
            if text in ALIKE:
                text += f" {call['input_sizes']} {'/'.join(call['input_dtypes'])}"
            called[call["collective_seq_id"]] = text
    return called


# ---- stragglers ----


class StragglerDetector:
    """Names a rank that keeps the others waiting.

    A rank's own time begins where a step ends, and ends with its last gradient; then it
    waits in backward() for the others. Anything may delay a single step, but a
    straggler is slow in all of them: the fastest of its last `every` steps takes at
    least `factor` times the median of the other ranks' steps, and at least a
    millisecond more, and it waits less than half as long as the rank that waits most.
    Time in which other programs have the CPU does not count, or a busy machine would
    give alarms. If the ranks communicate before the last gradient is there, as DDP does
    for BatchNorm's buffers, the others wait there, and the detector counts this as
    their own time: it may miss a straggler. If more than half of the ranks are slow, it
    names none.
    report: is called with a line about the slowest rank, on all ranks.
    """

    def __init__(self, model, optimizer, report, every=9, factor=1.5, timeout=60):
        self.report, self.every, self.factor = report, every, factor
        self.group = side_group(timeout)
        self.device = next(model.parameters()).device
        self.step, self.begin, self.ready, self.times = 0, None, None, []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_there)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def gradient_is_there(self, parameter):
        self.ready = moment(self.device)

    def before_step(self, *_):
        warm = self.begin is not None  # the first step is longer
        if warm and self.ready is not None:  # a step without gradients has no time
            self.times.append((self.begin, self.ready, moment(self.device)))

    def after_step(self, *_):
        self.step += 1
        if len(self.times) == self.every:
            own = [seconds(begin, ready) for begin, ready, _ in self.times]
            waits = median(seconds(ready, end) for _, ready, end in self.times)
            self.times = []
            if line := slowest(exchange((own, waits), self.group), self.factor):
                self.report(f"straggler in step {self.step}: {line}")
        self.begin, self.ready = moment(self.device), None


def slowest(rows, factor):
    """A line about the straggler among the ranks, or None.

    rows: for each rank its own time in each step, and how long it waits.
    """
    best, waits = zip(*((min(own), waits) for own, waits in rows))
    rank = best.index(max(best))
    others = [
        taken for other, (own, _) in enumerate(rows) if other != rank for taken in own
    ]
    if not others or waits[rank] > max(waits) / 2:
        return None
    if best[rank] < max(factor * median(others), median(others) + 1e-3):
        return None
    line = f"rank {rank} needs {best[rank]:.3f} s and waits {waits[rank]:.3f} s"
    return f"{line}, the others need {median(others):.3f} s"


def moment(device):
    """Now: on a GPU an event on its stream, elsewhere the seconds on a clock that stops
    while other programs have the CPU.
    """
    if device.type != "cuda":
        return time.perf_counter() - waited_for_the_cpu()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def waited_for_the_cpu():
    """How long this thread has been ready to run without a CPU, in seconds.

    As Linux counts it, see its documentation of schedstat; 0 on other systems.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def seconds(begin, end):
    """The seconds between two moments."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# ---- NaN ----


class NanGuard:
    """Stops all ranks in the same step if one has a NaN or an infinite gradient.

    It looks at the output of each layer, and at the gradient of each parameter before
    the ranks average it, because then all ranks have it. An infinite output alone does
    not stop them: attention masks are made of -inf. Raises UsageError before the
    optimizer's step, with the rank and what went wrong first there; layers whose output
    has been infinite before are not taken for the cause. Not for fp16 with a
    GradScaler, which makes infinite gradients on purpose, and skips those steps.
    """

    def __init__(self, model, optimizer, timeout=60):
        self.group, self.step = side_group(timeout), 0
        self.names, self.infinite, self.bad = [], [], []
        self.often_infinite = set()
        model = unwrapped(model)
        for name, layer in model.named_modules():
            if not list(layer.children()):
                layer.register_forward_hook(partial(self.look_at_output, name))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.look_at_gradient, name))
        optimizer.register_step_pre_hook(self.before_step)

    def look_at_output(self, name, layer, inputs, output):
        if torch.is_grad_enabled():
            for part in output if isinstance(output, tuple) else [output]:
                if isinstance(part, torch.Tensor):
                    nan, infinite = part.isnan().any(), part.isinf().any()
                    self.note(f"output of {name}", infinite, bad=nan)

    def look_at_gradient(self, name, gradient):
        bad = ~gradient.isfinite().all()
        self.note(f"gradient of {name}", bad, bad)

    def note(self, name, infinite, bad):
        self.names.append(name)
        self.infinite.append(infinite)
        self.bad.append(bad)

    def before_step(self, *_):
        self.step += 1
        first = self.first_fault() if self.names else None
        self.names, self.infinite, self.bad = [], [], []
        found = enumerate(exchange(first, self.group))
        places = [f"in the {name} on rank {rank}" for rank, name in found if name]
        if places:
            first = ", and ".join(places)
            raise UsageError(f"NaN or infinity in step {self.step}, first {first}")

    def first_fault(self):
        """What went wrong first on this rank, or None."""
        infinite, bad = torch.stack([*self.infinite, *self.bad]).view(2, -1).tolist()
        unusual = [
            name
            for name, is_infinite, is_bad in zip(self.names, infinite, bad)
            if is_bad or is_infinite and name not in self.often_infinite
        ]
        if any(bad):
            return unusual[0]
        self.often_infinite.update(unusual)


# ---- the program ----

TOOLS = ["nan", "desync", "straggler"]


def watch(model, optimizer, report, args):
    """Attach the tools to training with this optimizer. The loop stays as it is.

    report: is called with a line about a straggler. Returns the desync detector, which
    has a `check()` for the end, or None.
    """
    if "nan" in args.watch:
        NanGuard(model, optimizer, args.timeout)
    if "straggler" in args.watch:
        StragglerDetector(model, optimizer, report, timeout=args.timeout)
    if "desync" in args.watch:
        return DesyncDetector(model, optimizer, args.check_every, args.timeout)


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag = parser.add_argument
    attached = "which tools to attach (all; without a name: none)"
    flag("--watch", nargs="*", choices=TOOLS, default=TOOLS, help=attached)
    compared = "steps per comparison of the ranks (10)"
    flag("--check-every", type=runs.count, default=10, help=compared)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    with process_group(backend_for(device), args.timeout) as (rank, world_size):
        with flight_recorded(args.out / "flight"):
            return train(args, rank, world_size, device)


def train(args, rank, world_size, device):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    gpu = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout
    desync = watch(model, optimizer, log.info, args)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different shuffle per epoch, the same on all ranks
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_set, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    if desync:
        desync.check()  # the steps since the last comparison
    save(model, args.out / "model.pt")
    load(model, args.out / "model.pt", device)  # what is reported is what was saved
    network = model.module
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


if __name__ == "__main__":
    runs.start(main)
