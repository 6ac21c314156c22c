"""Ranks whose parameters, or whose collectives, are no longer the same."""

from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError
from ddp_course.detectors.flight_record import flight_record


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
        self.every, self.steps = every, []
        wrapped = isinstance(model, DistributedDataParallel)
        self.model = model.module if wrapped else model
        # of its own: collectives in one group are not confused with those in another
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
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
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine, self.group)
        for first, *others in zip(*of_ranks):
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
