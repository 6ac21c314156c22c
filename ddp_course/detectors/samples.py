"""Ranks that read the same batches, or others than the sampler has promised."""

from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from math import sqrt
from zlib import crc32

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError


class SampleDetector:
    """Tells whether the ranks see different samples, in the shares that were promised.

    Call `look(batch, labels)` in each step, before the forward pass, and `end_epoch()`
    after each epoch, on all ranks. A batch is a tensor, a list of the samples' indices,
    or a list or dict of these. Raises UsageError on all ranks if
    - two ranks have had the same batch in more than half of an epoch's steps;
    - an epoch has more samples than the data (`samples`, if you give it);
    - the share of a label is not what the sampler has promised, in an epoch (`shares`,
      one per label, if you give them, and `look` the labels);
    - an epoch is like the one before (give `shuffled=False` if this is on purpose);
    - the model's buffers differ between ranks (`model`, if you give it). They are read
      at the start of its forward pass: afterwards BatchNorm's averages differ, because
      each rank has seen its own batch, until DDP broadcasts those of rank 0.

    Cost: a hash of the batch and of the buffers per step, and one all-gather per
    `every` steps and per epoch: 40 + 8 * len(shares) + 16 * every bytes per rank. On a
    CPU, the hash takes some milliseconds per megabyte: where that is too much, give the
    indices of the samples.
    A rank that runs out of batches early calls `end_epoch()`, which waits for the
    others. With `Join`, give `every=None`, and call `end_epoch()` after Join: then the
    ranks compare nothing before. `group`: a gloo group of the data-parallel ranks,
    where others, as those of tensor parallelism, must have the same batch.
    """

    def __init__(self, model=None, samples=None, shares=None, shuffled=True, every=10,
                 group=None, timeout=60):  # fmt: skip
        self.model, self.samples, self.shuffled = model, samples, shuffled
        self.shares = torch.as_tensor([] if shares is None else shares).double()
        # of its own: collectives in one group are not confused with those in another
        limit = timedelta(seconds=timeout)
        self.group = group or dist.new_group(backend="gloo", timeout=limit)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.every, self.chunk = every, every or 64
        self.epoch, self.before = 0, None
        if model is not None:
            wrapped = isinstance(model, DistributedDataParallel)
            inner = model.module if wrapped else model
            inner.register_forward_pre_hook(self.look_at_buffers)
        self.start_epoch()

    def start_epoch(self):
        self.epoch, self.step, self.rows, self.digests = self.epoch + 1, 0, [], []
        self.seen, self.largest, self.buffers = 0, 0, {}
        self.counts = torch.zeros(len(self.shares), dtype=torch.int64)
        self.same = torch.zeros(2, len(self.ranks), len(self.ranks))

    def look_at_buffers(self, layer, inputs):
        # in no_sync(), DDP does not broadcast the buffers
        if layer.training and getattr(self.model, "require_forward_param_sync", True):
            named = layer.named_buffers()
            self.buffers = {name: digest(buffer) for name, buffer in named}

    def look(self, batch, labels=None):
        both = [digest(batch), digest(list(self.buffers.values()))]
        self.rows.append(both)
        self.digests.append(both[0])
        size = length(batch)
        self.seen, self.largest = self.seen + size, max(self.largest, size)
        if len(self.shares):
            labels = labels.detach().flatten().cpu()
            self.counts += torch.bincount(labels, minlength=len(self.shares))
        if len(self.rows) == self.every:
            self.exchange()

    def end_epoch(self):
        """Compare what is left; wait for ranks with more steps. All ranks call it."""
        order = digest([value.cpu() for value in self.digests]).item()
        again = self.shuffled and len(self.digests) > 1 and order == self.before
        self.before = order
        numbers = self.exchange(True, again)
        while not numbers[:, 0].all():
            numbers = self.exchange(True, again)
        if numbers[:, 1].all():
            self.stop("the batches are those of the epoch before, in the same order")
        self.check_numbers(numbers[:, 2].sum().item(), numbers[:, 3], numbers[:, 5:])
        self.start_epoch()

    def check_numbers(self, seen, largest, counts):
        """Whether an epoch has as many samples, and of each label, as was promised."""
        spare = len(self.ranks) * int(largest.max())  # samplers fill up batches
        if self.samples and seen > self.samples + spare:
            there = f"and there are {self.samples}"
            self.stop(f"the ranks have read {seen} samples, {there}")
        for label, share in enumerate(self.shares.tolist()):
            total, count = counts.sum().item(), counts[:, label].sum().item()
            error = sqrt(share * (1 - share) * total)
            if abs(count - share * total) > 5 * error + 1:  # not by chance
                got = f"{count / total:.1%} of the samples have the label {label}"
                self.stop(f"{got}, and {share:.1%} were promised")

    def exchange(self, ended=False, again=False):
        """One all-gather of the next steps; raises on all ranks if these are alike.

        Returns the other numbers of the ranks, int64 (ranks, 5 + labels).
        """
        now, self.rows = self.rows[: self.chunk], self.rows[self.chunk :]
        steps = torch.zeros(self.chunk, 2, dtype=torch.int64)
        if now:
            both = [[value.item() for value in row] for row in now]
            steps[: len(now)] = torch.tensor(both)
        head = [int(ended and not self.rows), int(again), self.seen, self.largest]
        mine = torch.tensor([*head, len(now), *self.counts])
        rows = [torch.empty(len(mine) + 2 * self.chunk).long() for _ in self.ranks]
        dist.all_gather(rows, torch.cat([mine, steps.flatten()]), self.group)
        numbers, steps = torch.stack(rows).split([len(mine), 2 * self.chunk], 1)
        self.compare(numbers[:, 4], steps.view(-1, self.chunk, 2))
        return numbers

    def compare(self, counts, steps):
        there = torch.arange(self.chunk) < counts[:, None]
        for row, present in enumerate(there.T):
            self.step += int(present.any())
            both = present[:, None] & present
            batches, buffers = steps[:, row].T
            self.same += torch.stack([both, both & (batches[:, None] == batches)])
            if (both & (buffers[:, None] != buffers)).any():
                self.stop(self.different_buffers())
        compared, same = self.same
        same = (2 * same > compared).fill_diagonal_(False)
        if same.any():
            first = same.any(1).nonzero()[0].item()
            alike = [first, *same[first].nonzero().flatten().tolist()]
            number = self.same[:, alike[0], alike[1]].int().tolist()
            text = "the same batch in {1} of {0} steps".format(*number)
            who = ", ".join(str(self.ranks[place]) for place in alike)
            self.stop(f"ranks {who} have {text}: is there a DistributedSampler?")

    def different_buffers(self):
        """Which differ in the latest forward pass. All ranks call it together."""
        everyone = [None] * len(self.ranks)
        mine = {name: value.item() for name, value in self.buffers.items()}
        dist.all_gather_object(everyone, mine, self.group)
        first, *others = everyone
        names = [
            name
            for name in first
            if any(other.get(name) != first[name] for other in others)
        ]
        return f"buffers differ between the ranks: {', '.join(names[:3])}"

    def stop(self, what):
        raise UsageError(f"samples in epoch {self.epoch}, step {self.step}: {what}")


def length(batch):
    """How many samples a batch has."""
    while isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    if isinstance(batch, list | tuple) and isinstance(batch[0], torch.Tensor):
        return len(batch[0])
    return len(batch)


def digest(batch):
    """A hash of what a batch contains, int64, the same on a CPU and on a GPU.

    The bits, as integers of 64 bits, are multiplied by an odd number for their place,
    and added up modulo 2**64. So a change in one of these integers never goes unnoticed.
    """
    if isinstance(batch, Mapping):
        batch = [part for name in sorted(batch) for part in (name, batch[name])]
    if isinstance(batch, list | tuple) and not all(type(part) is int for part in batch):
        parts = [digest(part) for part in batch]
        return digest(torch.stack([part.to(parts[0].device) for part in parts]))
    if not isinstance(batch, torch.Tensor):
        is_list = isinstance(batch, list | tuple)
        batch = torch.tensor(batch if is_list else [crc32(str(batch).encode())])
    raw = batch.detach().contiguous().flatten().view(torch.uint8)
    words = torch.cat([raw, raw.new_zeros(-len(raw) % 8)]).view(torch.int64)
    kind = crc32(f"{tuple(batch.shape)} {batch.dtype}".encode())
    return mixed(words).mul_(odd_numbers(len(words), words.device)).sum() + kind


@lru_cache(maxsize=8)
def odd_numbers(count, device):
    """An odd number per place, int64 (count,), the same on all ranks."""
    return mixed(torch.arange(count, device=device)).bitwise_or_(1)


def mixed(words):
    """Each word's bits, spread over the others of that word, modulo 2**64."""
    words = (words + 0x2545F4914F6CDD1D).mul_(0x5851F42D4C957F2D)
    return words.bitwise_xor_((words >> 32).bitwise_and_(0xFFFFFFFF))
