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
    kept; call `check()` for the steps since then. Parameters are compared in `group`,
    collectives in each group that has called some. Raises UsageError on all ranks, with
    one line: the first step, the rank and the parameter or collective that differ from
    those of the first rank of that group. Collectives that the flight recorder no
    longer has are counted, but not compared. Memory: random numbers as long as each
    parameter, once for all parameters of one length (see `digest`).

    group: the ranks with the same parameters, as DDP's, which are all ranks; on a mesh,
    those of its data dimension. A second detector, with the group of tensor ranks, is
    for the layers that these have alike, such as norms. Of a DTensor, this rank's part
    counts.
    """

    def __init__(self, model, optimizer, every=10, timeout=60, group=None):
        self.every, self.steps = every, []
        wrapped = isinstance(model, DistributedDataParallel)
        self.model = model.module if wrapped else model
        self.replicas = dist.get_process_group_ranks(group)
        # of its own: collectives in one group are not confused with those in another
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.step, self.calls = 0, how_many_calls()
        entries = flight_record()["entries"]
        self.seen, self.groups = last(entries), groups_of(entries)
        optimizer.register_step_post_hook(self.after_step)

    def after_step(self, *_):
        self.step += 1
        hashes = {name: digest(local(p)) for name, p in self.model.named_parameters()}
        self.steps.append((self.step, how_many_calls(), hashes))
        if self.step % self.every == 0:
            self.check()

    def check(self):
        """Compare the steps since the last check. All ranks call it together."""
        dist.monitored_barrier(self.group, wait_all_ranks=True)  # names who is missing
        entries = flight_record()["entries"]  # takes longer than all else here
        mine, called = [], calls_since(self.seen, entries)
        before, self.groups = self.groups, groups_of(entries)
        for step, calls, hashes in self.steps:
            groups = {}
            for name, (ranks, number, ahead) in self.groups.items():
                if name in before and before[name][2] != ahead:
                    continue  # its calls have not all been recorded
                begin, end = (
                    of.get(number, ahead) - ahead for of in (self.calls, calls)
                )
                of_step = {
                    place - begin: called[number, place]
                    for place in range(begin + 1, end + 1)
                    if (number, place) in called
                }
                groups[name] = ranks, end - begin, of_step
            numbered = {name: value.item() for name, value in hashes.items()}
            mine.append((step, groups, numbered))
            self.calls = calls
        self.steps, self.seen = [], last(entries)
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (self.replicas, mine), self.group)
        replicas, steps = zip(*of_ranks)
        for of_step in zip(*steps):
            if problem := difference(of_step, replicas):
                raise UsageError(f"desync in step {of_step[0][0]}: {problem}")


def local(tensor):
    """The part of a DTensor that is on this rank; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


def difference(of_ranks, replicas):
    """What differs between the ranks in a step, as a text, or None.

    of_ranks: for each rank (the step's number, {group: (its ranks, how many
    collectives, {place: text})}, {parameter: hash}). replicas: for each rank, those
    with the same parameters.
    """
    for rank, (_, groups, hashes) in enumerate(of_ranks):
        for name, (ranks, *own) in groups.items():
            _, firsts, _ = of_ranks[ranks[0]]
            if name in firsts:
                who = ranks[0], rank, "" if name == "0" else f" in the group {ranks}"
                if problem := difference_of_calls(firsts[name][1:], own, *who):
                    return problem
        first = replicas[rank][0]
        *_, theirs = of_ranks[first]
        if list(hashes) != list(theirs):
            return f"rank {rank} has other parameters than rank {first}"
        different = [name for name in hashes if hashes[name] != theirs[name]]
        if different:
            more = f", and {len(different) - 1} more" if different[1:] else ""
            place = f"{different[0]} of rank {rank}"
            return f"{place} differs from that of rank {first}{more}"
    return None


def difference_of_calls(firsts, own, first, rank, where):
    """What differs between two ranks' collectives in one group, as a text, or None."""
    (count, calls), (own_count, own_calls) = firsts, own
    for number in sorted(calls.keys() & own_calls.keys()):
        if calls[number] != own_calls[number]:
            place = f"collective {number} of rank {rank}{where} is {own_calls[number]}"
            return f"{place}, and that of rank {first} is {calls[number]}"
    if count != own_count:
        place = f"rank {rank} has called {own_count} collectives{where}"
        return f"{place}, and rank {first} {count}"
    return None


def how_many_calls():
    """How many collectives this rank has called in each group: {its number: count}."""
    groups = flight_record(collectives=False)["pg_status"].items()
    counts = {
        int(key): group.get("last_enqueued_collective", 0) for key, group in groups
    }
    return {number: max(0, count) for number, count in counts.items()}


def groups_of(entries):
    """The groups of these collectives: {name: (ranks, number, ahead)}. Ranks know a
    group by its name; each has its own number for it. ahead: how many calls have been counted
    and not recorded, as rank 0's of monitored_barrier. If no entry was lost, groups
    without a call are there, too.
    """
    world, counts = dist.distributed_c10d._world.pg_names, how_many_calls()
    ranks = {name: dist.get_process_group_ranks(group) for group, name in world.items()}
    complete = bool(entries) and entries[0]["record_id"] == 0
    found = {name: (of, -1, 0) for name, of in ranks.items()} if complete else {}
    for call in entries:
        name, _ = call["process_group"]
        if name in ranks and not call["is_p2p"]:
            ahead = counts.get(call["pg_id"], 0) - call["collective_seq_id"]
            found[name] = ranks[name], call["pg_id"], ahead
    return found


def last(entries):
    return entries[-1]["record_id"] if entries else -1


# whose sizes must be the same on all ranks; those of gather and scatter need not be
ALIKE = {"all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter"}


def calls_since(entry, entries):
    """The collectives after this entry: {(number of the group, place in it): text}.

    The text is what must be the same on all ranks, such as "all_reduce [[5]] Float".
    """
    called = {}
    for call in entries:
        if call["record_id"] > entry and not call["is_p2p"]:
            text = call["profiling_name"].partition(":")[2]
            if text in ALIKE:
                text += f" {call['input_sizes']} {'/'.join(call['input_dtypes'])}"
            called[call["pg_id"], call["collective_seq_id"]] = text
    return called
