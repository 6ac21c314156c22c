"""Exercise 04: DistributedDataParallel."""

import itertools
import math
import random
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from ddp_course import lesson01, lesson03, lesson04
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from mutants import right, wrong

# ---- epoch_plan ----


def plan(share, batch_size, world_size, samples):
    steps = -(-share // batch_size)
    return steps, share - (steps - 1) * batch_size, share * world_size - samples


@right("epoch_plan")
def rounds_up_twice(samples, batch_size, world_size):
    return plan(-(-samples // world_size), batch_size, world_size, samples)


@right("epoch_plan")
def asks_sampler_and_loader(samples, batch_size, world_size):
    sampler = DistributedSampler(range(samples), world_size, rank=0)
    loader = DataLoader(range(samples), batch_size, sampler=sampler)
    *_, last = loader
    return [len(loader), len(last), len(sampler) * world_size - samples]


@right("epoch_plan")
def with_numpy_and_floats(samples, batch_size, world_size):
    share = numpy.ceil(samples / world_size)
    steps = numpy.ceil(share / batch_size)
    return numpy.array([steps, (share - 1) % batch_size + 1, -samples % world_size])


@wrong("epoch_plan", "steps of one process")
def as_one_process(samples, batch_size, world_size):
    return plan(samples, batch_size, 1, samples)


@wrong("epoch_plan", "drops it only with")
def last_batch_forgotten(samples, batch_size, world_size):
    _, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return -(-samples // world_size) // batch_size, last, twice


@wrong("epoch_plan", "round up")
def parts_of_a_step(samples, batch_size, world_size):
    _, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return samples / world_size / batch_size, last, twice


@wrong("epoch_plan", "one step too many")
def always_one_more(samples, batch_size, world_size):
    _, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return -(-samples // world_size) // batch_size + 1, last, twice


@wrong("epoch_plan", "rounds the length of a share up")
def shares_rounded_down(samples, batch_size, world_size):
    return plan(samples // world_size, batch_size, world_size, samples)


@wrong("epoch_plan", "the last batch is a full one")
def rest_of_the_division(samples, batch_size, world_size):
    steps, _, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, -(-samples // world_size) % batch_size, twice


@wrong("epoch_plan", "what is left for one process")
def rest_of_one_process(samples, batch_size, world_size):
    steps, _, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, samples % batch_size, twice


@wrong("epoch_plan", "what is left of a rank's share")
def all_batches_are_full(samples, batch_size, world_size):
    steps, _, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, batch_size, twice


@wrong("epoch_plan", "samples of all ranks")
def last_step_of_all_ranks(samples, batch_size, world_size):
    steps, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, last * world_size, twice


@wrong("epoch_plan", "how many are missing")
def left_over(samples, batch_size, world_size):
    steps, last, _ = rounds_up_twice(samples, batch_size, world_size)
    return steps, last, samples % world_size


@wrong("epoch_plan", "the sampler repeats some")
def none_is_used_twice(samples, batch_size, world_size):
    return *rounds_up_twice(samples, batch_size, world_size)[:2], 0


@wrong("epoch_plan", "return three numbers")
def only_the_steps(samples, batch_size, world_size):
    return rounds_up_twice(samples, batch_size, world_size)[0]


@wrong("epoch_plan", "return three numbers")
def hands_in_torchs_sampler(samples, batch_size, world_size):
    return DistributedSampler(range(samples), world_size, rank=0)


@wrong("epoch_plan", "has no len", status="your code raised")
def hands_in_the_lessons_evaluation(samples, batch_size, world_size):
    return lesson04.evaluate(samples, batch_size, world_size)


@right("epoch_plan")
def deals_out_and_counts(samples, batch_size, world_size):
    dealt = list(range(0, samples, world_size))  # the share of rank 0, the longest
    batches = [dealt[begin : begin + batch_size] for begin in range(0, len(dealt), batch_size)]
    return len(batches), len(batches[-1]), len(dealt) * world_size - samples


@right("epoch_plan")
def with_tensors(samples, batch_size, world_size):
    share = torch.tensor(samples / world_size).ceil()
    steps = (share / batch_size).ceil()
    return torch.stack([steps, share - (steps - 1) * batch_size, share * world_size - samples])


@right("epoch_plan")
def with_divmod(samples, batch_size, world_size):
    share, rest = divmod(samples, world_size)
    twice = world_size - rest if rest else 0
    steps, last = divmod(share + bool(rest), batch_size)
    return (steps + 1, last, twice) if last else (steps, batch_size, twice)


@wrong("epoch_plan", "rounds the length of a share up")
def shares_without_the_tail(samples, batch_size, world_size):
    steps, last, _ = plan(samples // world_size, batch_size, world_size, samples)
    return steps, last, 0


@wrong("epoch_plan", "drops it only with")
def whole_global_batches(samples, batch_size, world_size):
    _, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return samples // (batch_size * world_size), last, twice


@wrong("epoch_plan", "all shares together have more samples than the data set")
def all_batches_are_filled(samples, batch_size, world_size):
    steps, last, _ = rounds_up_twice(samples, batch_size, world_size)
    return steps, last, steps * batch_size * world_size - samples


@wrong("epoch_plan", "what is left of a rank's share after the full batches|the last batch is a full one")
def another_order(samples, batch_size, world_size):
    steps, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, twice, last


@wrong("epoch_plan", "a full one")
def full_only_where_all_divides(samples, batch_size, world_size):
    """Wrong with one sample too few: the sampler fills the shares up."""
    steps, last, twice = rounds_up_twice(samples, batch_size, world_size)
    divides = samples % (batch_size * world_size) == 0
    return steps, batch_size if divides else last % batch_size, twice


@wrong("epoch_plan", "both round up")
def counts_whole_steps_before_padding(samples, batch_size, world_size):
    _, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return samples // (batch_size * world_size) + (last < batch_size), last, twice


@wrong("epoch_plan", "what is left of a rank's share")
def full_in_the_first_step(samples, batch_size, world_size):
    """Takes it for granted that there is a full batch."""
    steps, last, twice = rounds_up_twice(samples, batch_size, world_size)
    return steps, batch_size if steps == 1 else last, twice


@wrong("epoch_plan", "drops it only with|rounds the length")
def rounds_to_the_nearest(samples, batch_size, world_size):
    return plan(round(samples / world_size), batch_size, world_size, samples)


@wrong("epoch_plan", "return three numbers")
def prints_them(samples, batch_size, world_size):
    print(rounds_up_twice(samples, batch_size, world_size))


# ---- sharded_sampler ----


@right("sharded_sampler")
class Interleaved:
    """As in the solution; the parts of the wrong ones below."""

    def __init__(self, samples, num_replicas, rank, shuffle=True, seed=0, drop_last=False):
        self.samples, self.num_replicas, self.rank = samples, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.done = 0

    def set_epoch(self, epoch, done=0):
        self.epoch, self.done = epoch, done

    def __len__(self):
        part = (self.samples - self.done) / self.num_replicas
        return math.floor(part) if self.drop_last else math.ceil(part)

    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def order(self):
        if not self.shuffle:
            return list(range(self.samples))
        return torch.randperm(self.samples, generator=self.generator()).tolist()

    def resized(self, order):
        total = len(self) * self.num_replicas
        return (order * math.ceil(total / max(1, len(order))))[:total]

    def __iter__(self):
        left = self.order()[self.done :]
        return iter(self.resized(left)[self.rank :: self.num_replicas])


@right("sharded_sampler")
class OneByOne(Interleaved):
    """Python's own generator; the indices come one by one, and are repeated from the
    front.
    """

    def order(self):
        order = list(range(self.samples))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        return order

    def __iter__(self):
        print("sharing out ...")
        left = self.order()[self.done :]
        for turn in range(len(self)):
            yield left[(turn * self.num_replicas + self.rank) % len(left)]


@wrong("sharded_sampler", "deal the order out one by one")
class Blocks(Interleaved):
    """Each rank a block of a shuffle by Python's own generator; the indices come one by
    one.
    """

    def order(self):
        order = list(range(self.samples))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        return order

    def __iter__(self):
        print("sharing out ...")
        order = self.order()
        for position in range(self.rank * len(self), (self.rank + 1) * len(self)):
            yield order[position % self.samples]


@right("sharded_sampler")
class ShuffledAhead(Interleaved):
    """The shuffle is made in set_epoch, with numpy, whose integers are not Python's."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.set_epoch(0)

    def set_epoch(self, epoch, done=0):
        order = numpy.random.default_rng([self.seed, epoch]).permutation(self.samples)
        self.done = numpy.int64(done)
        self.mine = numpy.resize(
            order[done:] if self.shuffle else numpy.arange(done, self.samples), len(self) * self.num_replicas
        )

    def __iter__(self):
        return iter(self.mine.reshape(-1, self.num_replicas)[:, self.rank])


@wrong("sharded_sampler", "positional arguments", status="your code raised")
class Torchs(DistributedSampler):
    def __init__(self, samples, num_replicas, rank, **options):
        super().__init__(range(samples), num_replicas, rank, **options)


class TorchsWithDone(Torchs):
    done = 0

    def set_epoch(self, epoch, done=0):
        super().set_epoch(epoch)
        self.done = done

    def __len__(self):
        return super().__len__() - self.skipped()


@wrong("sharded_sampler", "take these off the order of all|rounded as without done")
class TorchsThatSkipsItsPart(TorchsWithDone):
    """Right where the number of ranks stays the same."""

    def skipped(self):
        return self.done // self.num_replicas

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skipped(), None)


@wrong("sharded_sampler", "all ranks together have done that many")
class TorchsThatSkipsTooMuch(TorchsThatSkipsItsPart):
    def skipped(self):
        return min(self.done, Torchs.__len__(self))


@wrong("sharded_sampler", "done has no effect")
class IgnoresDone(Interleaved):
    def set_epoch(self, epoch, done=0):
        self.epoch = epoch


@wrong("sharded_sampler", "forgotten in the next")
class KeepsDone(Interleaved):
    def set_epoch(self, epoch, done=None):
        self.epoch = epoch
        self.done = self.done if done is None else done


@wrong("sharded_sampler", "samples that still come in this epoch")
class SaysTheWholeLength(Interleaved):
    def __len__(self):
        part = self.samples / self.num_replicas
        return math.floor(part) if self.drop_last else math.ceil(part)

    def resized(self, order):
        part = len(order) / self.num_replicas
        part = math.floor(part) if self.drop_last else math.ceil(part)
        total = part * self.num_replicas
        return (order * math.ceil(total / max(1, len(order))))[:total]


@wrong("sharded_sampler", "must keep its order|come again")
class ShufflesTheRestAnew(Interleaved):
    def __iter__(self):
        left = self.order()[self.done :]
        if self.done and self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        return iter(self.resized(left)[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "that were done come again")
class RepeatsFromWhatIsDone(Interleaved):
    """Pads with the front of the order, which is done."""

    def __iter__(self):
        order = self.order()
        left, total = order[self.done :], len(self) * self.num_replicas
        left = (left + order * self.num_replicas)[:total]
        return iter(left[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "take these off the order of all")
class TakesOffTheLast(Interleaved):
    def __iter__(self):
        order = self.order()
        left = order[: len(order) - self.done]
        return iter(self.resized(left)[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "different lengths: a rank with one more batch would wait")
class DoesNotPad(Interleaved):
    def __iter__(self):
        return iter(self.order()[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "repeat the samples more than once")
class PadsOnce(Interleaved):
    def resized(self, order):
        total = len(self) * self.num_replicas
        return (order + order[: max(0, total - len(order))])[:total]


@wrong("sharded_sampler", "samples are left out, though drop_last is False")
class AlwaysDrops(Interleaved):
    def __len__(self):
        return self.samples // self.num_replicas


@wrong("sharded_sampler", "drop_last is ignored")
class IgnoresDropLast(Interleaved):
    def __len__(self):
        return math.ceil(self.samples / self.num_replicas)


@wrong("sharded_sampler", "for this rank's share, not for all samples")
class SaysHowManyThereAre(Interleaved):
    def __len__(self):
        return self.samples

    def __iter__(self):
        part = self.samples / self.num_replicas
        total = self.num_replicas * (math.floor(part) if self.drop_last else math.ceil(part))
        order = self.order() * self.num_replicas
        return iter(order[self.rank : total : self.num_replicas])


@wrong("sharded_sampler", "without gaps or overlaps")
class BlocksThatOverlap(Interleaved):
    def __iter__(self):
        begin = self.rank * (self.samples // self.num_replicas)
        return iter(self.order()[begin : begin + len(self)])


@wrong("sharded_sampler", "all ranks get the same samples")
class ForgetsTheRank(Interleaved):
    def __iter__(self):
        return iter(self.resized(self.order())[:: self.num_replicas])


@wrong("sharded_sampler", "every rank gets all samples")
class DoesNotShare(Interleaved):
    def __iter__(self):
        return iter(self.order())


@wrong("sharded_sampler", "do not add the rank to the seed")
class SeedsWithTheRank(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch + self.rank)


@wrong("sharded_sampler", "the process's own random numbers")
class TakesAnyRandomNumbers(Interleaved):
    def generator(self):
        return None


@wrong("sharded_sampler", "the process's own random numbers")
class ShufflesWithPython(Interleaved):
    def order(self):
        order = list(range(self.samples))
        if self.shuffle:
            random.shuffle(order)
        return order


@wrong("sharded_sampler", "is it a permutation")
class DrawsWithReplacement(Interleaved):
    def order(self):
        if not self.shuffle:
            return super().order()
        return torch.randint(self.samples, (self.samples,), generator=self.generator()).tolist()


@wrong("sharded_sampler", "set_epoch has no effect")
class IgnoresTheEpoch(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(self.seed)


@wrong("sharded_sampler", "the order depends on earlier epochs")
class KeepsOneGenerator(Interleaved):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.kept = torch.Generator().manual_seed(self.seed)

    def generator(self):
        return self.kept


@wrong("sharded_sampler", "nothing is shuffled, though")
class NeverShuffles(Interleaved):
    def order(self):
        return list(range(self.samples))


@wrong("sharded_sampler", "though shuffle is False")
class AlwaysShuffles(Interleaved):
    def order(self):
        return torch.randperm(self.samples, generator=self.generator()).tolist()


@wrong("sharded_sampler", "each rank shuffles only its own share")
class ShufflesItsOwnShare(Interleaved):
    def __iter__(self):
        mine = self.resized(list(range(self.samples)))[self.rank :: self.num_replicas]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(mine)
        return iter(mine)


@wrong("sharded_sampler", "the seed has no effect")
class IgnoresTheSeed(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(self.epoch)


@wrong("sharded_sampler", "integers from 0")
class CountsFromOne(Interleaved):
    def __iter__(self):
        return iter([index + 1 for index in super().__iter__()])


@wrong(
    "sharded_sampler",
    r"RuntimeError[^$]*\(in ShardedSampler\(\d, \d, \d, [^$]*drop_last=True\)\)",
    status="your code raised",
)
class CannotBeEmpty(Interleaved):
    def __iter__(self):
        order = torch.tensor(self.resized(self.order()))
        return iter(order[torch.arange(self.rank, len(self) * self.num_replicas, self.num_replicas)].tolist())


@wrong("sharded_sampler", "set_epoch has no effect")
class MultipliesSeedAndEpoch(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(self.seed * self.epoch)


@wrong("sharded_sampler", "the same samples are left out in every epoch")
class DropsBeforeItShuffles(Interleaved):
    def __iter__(self):
        total = len(self) * self.num_replicas
        order = self.resized(list(range(self.samples)) if self.drop_last else self.order())
        if self.drop_last and self.shuffle:
            order = [order[place] for place in torch.randperm(total, generator=self.generator()).tolist()]
        return iter(order[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "the same samples are repeated in every epoch")
class RepeatsBeforeItShuffles(Interleaved):
    def __iter__(self):
        order = self.order() if self.drop_last else list(range(self.samples))
        order = self.resized(order)
        if self.shuffle and not self.drop_last:
            order = [order[place] for place in torch.randperm(len(order), generator=self.generator()).tolist()]
        return iter(order[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "use your own torch.Generator")
class SeedsTheProcess(Interleaved):
    def generator(self):
        return torch.manual_seed(self.seed + self.epoch)


@wrong("sharded_sampler", "repeat different ones in turn")
class RepeatsTheLast(Interleaved):
    def resized(self, order):
        total = len(self) * self.num_replicas
        return (order + order[-1:] * total)[:total] if total < 3 * len(order) else super().resized(order)


@wrong("sharded_sampler", "a loop does not end", status="timed out")
class NeverEnds(Interleaved):
    def __iter__(self):
        while True:
            yield from super().__iter__()


@wrong("sharded_sampler", "for a list, return iter", status="your code raised")
class ReturnsAList(Interleaved):
    def __iter__(self):
        return list(super().__iter__())


@wrong("sharded_sampler", r"hash\(\) of a text")
class SeedsWithAHash(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(hash(f"{self.seed} {self.epoch}") & 0xFFFFFFFF)


@right("sharded_sampler")
class SeedsWithAHashOfNumbers(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(hash((self.seed, self.epoch)) % 2**31)


@wrong("sharded_sampler", r"AttributeError.*\n.*\(in Sharded", status="your code raised")
class KnowsItsLengthAfterAPass(Interleaved):
    def __len__(self):
        return self.given

    def __iter__(self):
        mine = self.resized(self.order())[self.rank :: self.num_replicas]
        self.given = len(mine)
        return iter(mine)

    def resized(self, order):
        total = math.ceil(self.samples / self.num_replicas) * self.num_replicas
        if self.drop_last:
            total = self.samples // self.num_replicas * self.num_replicas
        return (order * self.num_replicas)[:total]


@wrong("sharded_sampler", "second pass through an epoch differs")
class CountsThePasses(Interleaved):
    """Takes the epoch on by itself at each pass, and set_epoch sets it right again."""

    def __iter__(self):
        given = super().__iter__()
        self.epoch += 1
        return given


@wrong("sharded_sampler", "gone through only once")
class KeepsOneIterator(Interleaved):
    def set_epoch(self, epoch, done=0):
        super().set_epoch(epoch, done)
        self.left = None
        self.left = super().__iter__()

    def __iter__(self):
        return self.left if hasattr(self, "left") else super().__iter__()


@wrong("sharded_sampler", "before the first set_epoch, the epoch is 0")
class BeginsBeforeTheFirstEpoch(Interleaved):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.epoch = 7


@right("sharded_sampler")
class Cycled(Interleaved):
    """What is left, again and again, and every n-th of it."""

    def order(self):
        if not self.shuffle:
            return range(self.samples)
        return random.Random(1000003 * self.seed + self.epoch).sample(range(self.samples), self.samples)

    def __iter__(self):
        left = itertools.cycle(self.order()[self.done :])
        return itertools.islice(left, self.rank, self.rank + len(self) * self.num_replicas, self.num_replicas)


@right("sharded_sampler")
class AsTensors(Interleaved):
    def __iter__(self):
        left = torch.tensor(self.order(), dtype=torch.long)[self.done :]
        places = self.rank + self.num_replicas * torch.arange(len(self))
        yield from left[places % max(1, len(left))].unbind() if len(self) else []


@right("sharded_sampler")
class SortedByRandomNumbers(Interleaved):
    def order(self):
        keys = numpy.random.RandomState((self.seed * 31 + self.epoch) % 2**32).rand(self.samples)
        return sorted(range(self.samples), key=lambda index: keys[index] if self.shuffle else index)


@wrong("sharded_sampler", "left out in each pass over the epoch")
class ForgetsDoneAfterAPass(Interleaved):
    """What was done is over once the rest has come: so it thinks."""

    def __iter__(self):
        yield from list(super().__iter__())
        self.done = 0


@wrong("sharded_sampler", "though shuffle is False")
class BeginsWithTheSecond(Interleaved):
    def order(self):
        order = super().order()
        return order if self.shuffle else order[1:] + order[:1]


@wrong("sharded_sampler", "deal the order out one by one")
class BlocksWithoutAShuffle(Interleaved):
    def __iter__(self):
        order, length = self.resized(self.order()[self.done :]), len(self)
        if self.shuffle:
            return iter(order[self.rank :: self.num_replicas])
        return iter(order[self.rank * length : (self.rank + 1) * length])


@wrong("sharded_sampler", "come from different shuffles")
class TakesASeedOfTheSystem(Interleaved):
    def generator(self):
        generator = torch.Generator()
        generator.seed()
        return generator


@wrong("sharded_sampler", "set_epoch has no effect")
class KeepsTheFirstOrder(Interleaved):
    def order(self):
        if not hasattr(self, "kept"):
            self.kept = super().order()
        return self.kept


@wrong("sharded_sampler", "take these off the order of all|rounded as without done")
class RoundsWhatIsDone(Interleaved):
    def set_epoch(self, epoch, done=0):
        super().set_epoch(epoch, done // self.num_replicas * self.num_replicas)


@wrong("sharded_sampler", "use your own torch.Generator")
class SeedsNumpy(Interleaved):
    def order(self):
        if not self.shuffle:
            return super().order()
        numpy.random.seed((self.seed + self.epoch) % 2**32)
        return numpy.random.permutation(self.samples).tolist()


@wrong("sharded_sampler", "in turn")
class PadsAtRandom(Interleaved):
    def resized(self, order):
        total = len(self) * self.num_replicas
        chosen = random.Random(self.seed)
        return (order + [chosen.choice(order) for _ in range(total - len(order))])[:total] if order else []


@wrong("sharded_sampler", "for all samples|this rank's share|one rank|DataLoader")
class LengthWithoutPadding(Interleaved):
    """Says how many different samples a rank has."""

    def __len__(self):
        return len(range(self.rank, self.samples - self.done, self.num_replicas))

    def resized(self, order):
        part = len(order) / self.num_replicas
        total = (math.floor(part) if self.drop_last else math.ceil(part)) * self.num_replicas
        return (order * math.ceil(total / max(1, len(order))))[:total]


# ---- evaluate ----


def count(network, data_set, sampler=None):
    return lesson01.evaluate(network, DataLoader(data_set, 50, sampler=sampler), torch.device("cpu"))


def my_part(test_set):
    return Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))


def summed(*numbers):
    totals = torch.tensor(numbers)
    dist.all_reduce(totals)
    return totals.tolist()


@torch.no_grad()
def tabulated(network, data_set, classes, sampler=None, batch_size=50, evaluating=True):
    """One process's table of (label, guess)."""
    if evaluating:
        network.eval()
    table = torch.zeros(classes, classes, dtype=torch.long)
    for inputs, labels in DataLoader(data_set, batch_size, sampler=sampler):
        for label, guess in zip(labels, network(inputs).argmax(1)):
            table[label, guess] += 1
    return table


def added(table, op=dist.ReduceOp.SUM):
    dist.all_reduce(table, op)
    return table


@right("evaluate")
def with_bincount(model, test_set, classes, device):
    model.eval()
    counts = torch.zeros(classes**2, dtype=torch.long, device=device)
    with torch.no_grad():
        for inputs, labels in DataLoader(my_part(test_set), batch_size=250):
            guesses = model.module(inputs.to(device)).argmax(dim=1)
            counts += torch.bincount(labels * classes + guesses, minlength=classes**2)
    dist.all_reduce(counts)
    return counts.view(classes, classes)


@right("evaluate")
def blocks_and_objects(model, test_set, classes, device):
    """A block for each rank, batches cut by hand, counts sent as Python objects."""
    rank, n = dist.get_rank(), dist.get_world_size()
    network = model.module.eval()
    counted = {}
    for index in range(rank * len(test_set) // n, (rank + 1) * len(test_set) // n):
        inputs, label = test_set[index]
        pair = int(label), int(network(inputs[None]).argmax())
        counted[pair] = counted.get(pair, 0) + 1
    print(f"{counted}")
    gathered = [None] * n
    dist.all_gather_object(gathered, counted)
    return [
        [sum(part.get((row, column), 0) for part in gathered) for column in range(classes)] for row in range(classes)
    ]


@right("evaluate")
@torch.no_grad()
def padded_but_not_counted(model, test_set, classes, device):
    """Through the wrapper, which is allowed, since padding gives all ranks equally many
    batches; only real samples count. Returns numpy's numbers.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    model.eval()
    positions = list(range(rank, math.ceil(len(test_set) / n) * n, n))
    padded = Subset(test_set, [position % len(test_set) for position in positions])
    table = torch.zeros(classes, classes)
    for number, (inputs, labels) in enumerate(DataLoader(padded, batch_size=32)):
        guesses = model(inputs).argmax(1)
        for place, (label, guess) in enumerate(zip(labels, guesses)):
            table[label, guess] += positions[32 * number + place] < len(test_set)
    return added(table).numpy()


@right("evaluate")
def gathers_all_guesses(model, test_set, classes, device):
    """Every rank gets the guesses for all samples, and counts them itself."""
    guesses = torch.zeros(len(test_set), dtype=torch.long)
    model.eval()
    with torch.inference_mode():
        for index in range(dist.get_rank(), len(test_set), dist.get_world_size()):
            guesses[index] = model.module(test_set[index][0][None]).argmax()
    dist.all_reduce(guesses)
    table = torch.zeros(classes, classes)
    for index, guess in enumerate(guesses.tolist()):
        table[test_set[index][1], guess] += 1
    return table


@wrong("evaluate", "positional argument", status="your code raised")
def as_in_the_lesson(model, test_set, device):
    return lesson04.evaluate(model, test_set, device)


@wrong("evaluate", "return one table")
def the_lessons_totals(model, test_set, classes, device):
    return lesson04.evaluate(model, test_set, device)


@wrong("evaluate", "rows and columns are swapped")
def by_guess(model, test_set, classes, device):
    return added(tabulated(model.module, my_part(test_set), classes)).T


@wrong("evaluate", "these are shares, not counts")
def shares_of_each_class(model, test_set, classes, device):
    table = added(tabulated(model.module, my_part(test_set), classes))
    return table / table.sum(dim=1, keepdim=True).clamp(min=1)


@wrong("evaluate", "in the wrong rows or columns")
def only_right_or_wrong(model, test_set, classes, device):
    """Puts all wrong guesses of a class into one column."""
    table = added(tabulated(model.module, my_part(test_set), classes))
    right = table.diagonal()
    wrong = torch.diag(right)
    wrong[torch.arange(classes), (torch.arange(classes) + 1) % classes] = table.sum(1) - right
    return wrong


@wrong("evaluate", "some wrong ones are missing")
def sums_only_the_diagonal(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes)
    table.diagonal().copy_(added(table.diagonal().clone()))
    return table


@wrong("evaluate", "some samples were counted twice")
def with_distributed_sampler(model, test_set, classes, device):
    sampler = DistributedSampler(test_set, shuffle=False)
    return added(tabulated(model.module, test_set, classes, sampler))


@wrong("evaluate", "some samples were left out")
def drops_the_tail(model, test_set, classes, device):
    sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)
    return added(tabulated(model.module, test_set, classes, sampler))


@wrong("evaluate", "some samples were counted twice|were evaluated more than once")
def shares_that_overlap(model, test_set, classes, device):
    rank, n, size = dist.get_rank(), dist.get_world_size(), len(test_set)
    part = math.ceil(size / n)
    mine = range(max(0, min(rank * part, size) - 1), min((rank + 1) * part, size))
    return added(tabulated(model.module, Subset(test_set, mine), classes))


@wrong("evaluate", "the mean of the ranks' accuracies")
def mean_of_means(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes).double()
    return added(table / table.sum() * len(test_set), dist.ReduceOp.AVG)


@wrong("evaluate", "only rank 0 has the whole table")
def reduces_to_rank_zero(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes)
    dist.reduce(table, dst=0)
    return table


@wrong("evaluate", "only rank 0 has the whole table")
def rank_zero_alone(model, test_set, classes, device):
    mine = test_set if dist.get_rank() == 0 else []
    table = tabulated(model.module, mine, classes)
    dist.barrier()
    return table


@wrong("evaluate", "one rank does all the work")
def rank_zero_tells(model, test_set, classes, device):
    mine = test_set if dist.get_rank() == 0 else []
    return added(tabulated(model.module, mine, classes))


@wrong("evaluate", "every rank does all the work")
def everyone_does_everything(model, test_set, classes, device):
    return tabulated(model.module, test_set, classes)


@wrong("evaluate", "each sample counts once")
def everything_and_summed(model, test_set, classes, device):
    return added(tabulated(model.module, test_set, classes))


@wrong("evaluate", "counts of its own share: sum them")
def does_not_sum(model, test_set, classes, device):
    return tabulated(model.module, my_part(test_set), classes)


@wrong("evaluate", "averaged over the ranks")
def averages_the_counts(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes).double()
    return added(table, dist.ReduceOp.AVG)


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def rank_zero_through_the_wrapper(model, test_set, classes, device):
    mine = test_set if dist.get_rank() == 0 else []
    return added(tabulated(model, mine, classes))


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def rank_zero_through_the_wrapper_then_barrier(model, test_set, classes, device):
    mine = test_set if dist.get_rank() == 0 else []
    table = tabulated(model, mine, classes)
    dist.barrier()
    return table


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def through_the_wrapper(model, test_set, classes, device):
    return added(tabulated(model, my_part(test_set), classes))


@wrong("evaluate", "still in training mode")
def in_training_mode(model, test_set, classes, device):
    mine = my_part(test_set)
    return added(tabulated(model.module, mine, classes, evaluating=False))


@wrong("evaluate", "still in training mode")
def in_training_mode_one_by_one(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes, batch_size=1, evaluating=False)
    return added(table)


@wrong("evaluate", "gradients are still switched off")
def leaves_gradients_off(model, test_set, classes, device):
    torch.set_grad_enabled(False)
    return added(tabulated(model.module, my_part(test_set), classes))


@wrong("evaluate", "return one table")
def three_classes_for_all(model, test_set, classes, device):
    """As many as were seen in a rank's labels; the others disappear."""
    table = added(tabulated(model.module, my_part(test_set), classes))
    present = table.sum(1) > 0
    return table[present][:, present]


@wrong("evaluate", "ZeroDivisionError", status="your code raised")
def cannot_do_without_samples(model, test_set, classes, device):
    table = tabulated(model.module, my_part(test_set), classes)
    print(f"my accuracy is {int(table.trace()) / int(table.sum()):.1%}")
    return added(table)


@right("evaluate")
@torch.no_grad()
def with_one_hot_vectors(model, test_set, classes, device):
    network, table = model.module.eval(), torch.zeros(classes, classes, dtype=torch.long)
    for inputs, labels in DataLoader(my_part(test_set), 64):
        guesses = network(inputs).argmax(1)
        table += F.one_hot(labels, classes).T @ F.one_hot(guesses, classes)
    return added(table)


@right("evaluate")
@torch.no_grad()
def places_are_accumulated(model, test_set, classes, device):
    network, table = model.module.eval(), numpy.zeros((classes, classes))
    for inputs, labels in DataLoader(my_part(test_set), 64):
        numpy.add.at(table, (labels.numpy(), network(inputs).argmax(1).numpy()), 1)
    return added(torch.from_numpy(table).int())


@right("evaluate")
def rank_0_adds_and_tells(model, test_set, classes, device):
    n, mine = dist.get_world_size(), tabulated(model.module, my_part(test_set), classes)
    parts = [torch.zeros_like(mine) for _ in range(n)] if dist.get_rank() == 0 else None
    dist.gather(mine, parts)
    whole = sum(parts) if parts else torch.zeros_like(mine)
    dist.broadcast(whole, 0)
    return whole.tolist()


@torch.no_grad()
def each_place_once(network, data_set, classes, batch_size):
    table = torch.zeros(classes, classes, dtype=torch.long)
    for inputs, labels in DataLoader(data_set, batch_size):
        table[labels, network.eval()(inputs).argmax(1)] += 1
    return table


@wrong("evaluate", "counts once: .* changes each place once")
def equal_pairs_of_a_batch_once(model, test_set, classes, device):
    return added(each_place_once(model.module, my_part(test_set), classes, 16))


@wrong("evaluate", "counts once: .* changes each place once")
def equal_pairs_of_a_share_once(model, test_set, classes, device):
    return added(each_place_once(model.module, my_part(test_set), classes, len(test_set)))


@wrong("evaluate", "counts once: .* changes each place once")
def equal_pairs_of_all_once(model, test_set, classes, device):
    counted = added(tabulated(model.module, my_part(test_set), classes))
    return (counted > 0).long()


@wrong("evaluate", "a mean of means")
@torch.no_grad()
def mean_of_the_batches_means(model, test_set, classes, device):
    mine = my_part(test_set)
    parts = [Subset(mine, range(begin, min(begin + 8, len(mine)))) for begin in range(0, len(mine), 8)]
    tables = [tabulated(model.module, part, classes).double() / len(part) for part in parts]
    mean = sum(tables, torch.zeros(classes, classes).double()) / max(1, len(tables))
    return added(mean * len(test_set), dist.ReduceOp.AVG)


@wrong("evaluate", "some samples were left out")
def drops_the_last_batch(model, test_set, classes, device):
    mine = my_part(test_set)
    whole = Subset(mine, range(len(mine) // 5 * 5))
    return added(tabulated(model.module, whole, classes))


@wrong("evaluate", "same number of dimensions|size of tensor|shape", status="your code raised")
@torch.no_grad()
def counts_as_many_places_as_there_are(model, test_set, classes, device):
    model.eval()
    counts = torch.zeros(classes**2, dtype=torch.long)
    for inputs, labels in DataLoader(my_part(test_set), 16):
        counts += torch.bincount(labels * classes + model.module(inputs).argmax(1))
    return added(counts).view(classes, classes)


@wrong("evaluate", "num_samples should be a positive", status="your code raised")
def shuffles_a_share_that_may_be_empty(model, test_set, classes, device):
    DataLoader(my_part(test_set), 64, shuffle=True)
    return with_bincount(model, test_set, classes, device)


@wrong("evaluate", "sum all counts over all ranks")
def takes_the_largest(model, test_set, classes, device):
    return added(tabulated(model.module, my_part(test_set), classes), dist.ReduceOp.MAX)


@wrong("evaluate", "in the wrong rows or columns")
def second_best_guess(model, test_set, classes, device):
    """Right guesses stay; a wrong one goes to the next column."""
    table = added(tabulated(model.module, my_part(test_set), classes))
    others = table - torch.diag(table.diagonal())
    moved = others.roll(1, dims=1)
    moved += torch.diag(moved.diagonal()).roll(1, dims=1) - torch.diag(moved.diagonal())
    return torch.diag(table.diagonal()) + moved


@wrong("evaluate", "return one table")
def counts_as_one_vector(model, test_set, classes, device):
    return added(tabulated(model.module, my_part(test_set), classes)).flatten()


@wrong("evaluate", "every rank does all the work")
def gathers_the_samples(model, test_set, classes, device):
    """Evaluates its share, and then, to be sure, everything again."""
    tabulated(model.module, my_part(test_set), classes)
    return tabulated(model.module, test_set, classes)


# ---- program ----


GIVEN = """
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

epochs, batch_size = int(sys.argv[1]), int(sys.argv[2])
train_set = TensorDataset(*torch.load("samples.pt"))
loader = DataLoader(train_set, batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
model.load_state_dict(torch.load("start.pt"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(epochs):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
state = model.state_dict()
parameters = {name: tensor.tolist() for name, tensor in state.items()}
result = {"parameters": parameters, "losses": losses}
Path("result.json").write_text(json.dumps(result))
print(f"{len(losses)} steps, the last loss is {losses[-1]:.3f}")
"""
JOIN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
epochs, """
LOADER = """sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size // world_size, sampler=sampler)
"""
RANK_0 = """losses = torch.tensor(losses)
dist.all_reduce(losses)
losses = (losses / world_size).tolist()
state = model.module.state_dict()
"""


def edited(text, *edits):
    """A program with these edits, (old, new), each of which must be possible."""
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


PROGRAM = edited(
    GIVEN,
    ("epochs, ", JOIN),
    ("loader = DataLoader(train_set, batch_size, shuffle=True)\n", LOADER),
    ("optimizer = ", "model = DistributedDataParallel(model)\noptimizer = "),
    ("    for inputs", "    sampler.set_epoch(epoch)\n    for inputs"),
    ("state = model.state_dict()\n", RANK_0),
    ("Path(", "if rank == 0:\n    Path("),
    ("print(", "    print("),
)
LEAVE = "dist.destroy_process_group()\n"
OURS = PROGRAM + LEAVE


@right("program", several=True)
def with_torchs_wrapper_and_sampler():
    return (OURS,)


@right("program", several=True)
def averages_by_hand_in_a_main_function():
    """Without wrapper and sampler; the whole program is a function, and the file is
    renamed once it is complete.
    """
    body = edited(
        OURS,
        ("sampler = DistributedSampler(train_set)\n", ""),
        ("loader = DataLoader(train_set, batch_size // world_size, sampler=sampler)\n", ""),
        ("model = DistributedDataParallel(model)\n", ""),
        ("    sampler.set_epoch(epoch)\n    for inputs, labels in loader:\n", "    for inputs, labels in mine(epoch):\n"),
        ("        optimizer.step()", "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n"
         "            p.grad /= world_size\n        optimizer.step()"),
        ("model.module", "model"),
        ('Path("result.json").write_text(json.dumps(result))', 'Path("new").write_text(json.dumps(result))\n'
         '    Path("new").rename("result.json")'),
        ("losses = []", """
def mine(epoch):
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(train_set), generator=generator)
    for joined in order.split(batch_size):
        yield train_set[joined[rank::world_size]]
losses = []"""),
    )  # fmt: skip
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return (f'def main():\n{lines}\n\n\nif __name__ == "__main__":\n    main()\n',)


@right("program", several=True)
def gathers_the_losses_as_objects():
    old = OURS[OURS.index("losses = torch.tensor") : OURS.index("state = model")]
    new = "every = [None] * world_size\ndist.all_gather_object(every, losses)\n"
    new += "losses = [sum(each) / world_size for each in zip(*every)]\n"
    return (edited(OURS, (old, new)),)


@right("program", several=True)
def leaves_in_a_finally_and_looks_at_the_environment():
    text = edited(
        PROGRAM,
        ("world_size = dist.get_rank(), dist.get_world_size()",
         'world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])'),
        ("import json", "import json\nimport os"),
    )  # fmt: skip
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return (f"import torch.distributed as dist\ntry:\n{lines}\nfinally:\n    {LEAVE}",)


@wrong("program", "all ranks run the whole program", several=True)
def as_it_was_given():
    return (GIVEN,)


@wrong("program", "all ranks run the whole program", several=True)
def all_ranks_write():
    return (edited(OURS, ("if rank == 0:\n    Path(", "Path("), ("    print(", "if rank == 0:\n    print(")),)  # fmt: skip


@wrong("program", "only rank 0 prints", several=True)
def all_ranks_print():
    return (edited(OURS, ("    print(", "print(")),)


@wrong("program", "destroy_process_group", several=True)
def stays_in_the_group():
    return (PROGRAM,)


@wrong("program", "has to join the process group itself", several=True)
def never_joins():
    return (edited(OURS, ('dist.init_process_group("gloo")\n', "")),)


@wrong("program", "that of all ranks together", several=True)
def the_whole_batch_on_each_rank():
    return (edited(OURS, ("batch_size // world_size", "batch_size")),)


@wrong("program", "every rank goes through all samples", several=True)
def without_a_sampler_on_ranks():
    return (
        edited(
            OURS,
            ("sampler=sampler", "shuffle=True"),
            ("sampler = DistributedSampler(train_set)\n", ""),
            ("    sampler.set_epoch(epoch)\n", ""),
        ),
    )


@wrong("program", "tell the sampler which epoch", several=True)
def one_order_in_all_epochs():
    return (edited(OURS, ("    sampler.set_epoch(epoch)\n", "")),)


@wrong("program", "nothing is shuffled", several=True)
def in_the_order_of_the_data_set():
    return (edited(OURS, ("(train_set)", "(train_set, shuffle=False)")),)


@wrong("program", "on its own share alone", several=True)
def loops_over_the_bare_model():
    return (edited(OURS, ("F.cross_entropy(model(", "F.cross_entropy(model.module(")),)


@wrong("program", "on its own share alone", several=True)
def the_same_share_for_all():
    return (edited(OURS, ("(train_set)", "(train_set, world_size, rank=0)")),)


@wrong("program", "too long by a factor", several=True)
def linear_scaling_of_the_rate():
    return (edited(OURS, ("lr=0.1", "lr=0.1 * world_size")),)


@wrong("program", "too short by a factor", several=True)
def divides_the_loss():
    return (edited(OURS, ("loss.backward()", "(loss / world_size).backward()")),)


@wrong("program", "still those of start.pt", several=True)
def optimizer_of_something_else():
    return (edited(OURS, ("SGD(model.", "SGD(nn.Linear(2, 2).")),)


@wrong("program", "with its own seed", several=True)
def a_seed_of_ones_own():
    return (edited(OURS, ("(train_set)", "(train_set, seed=42)")),)


@wrong("program", "names in the wrapper", several=True)
def saves_the_wrapper():
    return (edited(OURS, ("model.module.state_dict", "model.state_dict")),)


@wrong("program", "rank 0's own samples", several=True)
def losses_of_rank_0():
    return (
        edited(OURS, ("dist.all_reduce(losses)\nlosses = (losses / world_size)", "losses = losses")),
    )  # fmt: skip


@wrong("program", "the sum over the ranks", several=True)
def losses_summed():
    return (edited(OURS, ("(losses / world_size)", "losses")),)


@wrong("program", "reads digits.pt", several=True)
def hands_in_the_lessons_script():
    path = Path(__file__).parents[2] / "lessons" / "standalone" / "train_ddp.py"
    return (path.read_text(),)


@wrong("program", "flags of its own", several=True)
def hands_in_the_lessons_program():
    return (Path(lesson04.__file__).read_text(),)


@wrong("program", "some rank waits for another", status="timed out", several=True)
def a_rank_that_never_comes():
    waits = "if rank:\n    import time\n    time.sleep(600)\n"
    return (edited(OURS, ("losses = torch.tensor(", f"{waits}losses = torch.tensor(")),)


@wrong("program", "the text of a Python program", several=True)
def a_function_in_place_of_a_text():
    return (print,)


@right("program", several=True)
def wraps_after_the_optimizer():
    """The wrapper has the same parameters, so the optimizer may be made before."""
    wrap = "model = DistributedDataParallel(model)\n"
    return (edited(OURS, (wrap, ""), ("losses = []\n", f"{wrap}losses = []\n")),)


@right("program", several=True)
def reduces_each_loss():
    return (
        edited(
            OURS,
            ("losses.append(loss.item())", "mean = loss.detach().clone()\n        dist.all_reduce(mean, dist.ReduceOp.AVG)\n"
             "        losses.append(mean.item())"),
            ("losses = torch.tensor(losses)\ndist.all_reduce(losses)\nlosses = (losses / world_size).tolist()\n", ""),
        ),
    )  # fmt: skip


@right("program", several=True)
def broadcasts_the_start():
    """Only rank 0 reads start.pt; the wrapper sends it to the others."""
    load = 'model.load_state_dict(torch.load("start.pt"))\n'
    return (edited(OURS, (load, f"if rank == 0:\n    {load}")),)


@wrong("program", "order of the one before", several=True)
def tells_the_epoch_at_its_end():
    tell = "    sampler.set_epoch(epoch)\n"
    return (edited(OURS, (tell, ""), ("losses = torch.tensor", f"{tell}losses = torch.tensor")),)


@wrong("program", "on its own share alone", several=True)
def all_reduces_only_the_loss():
    bare = ("F.cross_entropy(model(", "F.cross_entropy(model.module(")
    return (
        edited(
            OURS, bare, ("        loss.backward()", "        dist.all_reduce(loss.detach())\n        loss.backward()")
        ),
    )


@wrong("program", "each rank writes|only rank 0|let rank 0", several=True)
def rank_1_writes_instead():
    return (edited(OURS, ("if rank == 0:\n    Path(", "if rank == 1:\n    Path(")),)


@wrong("program", "only rank 0 prints", several=True)
def nobody_prints():
    return (edited(OURS, ("    print(", "    str(")),)


@wrong("program", "losses of all epochs", several=True)
def begins_the_losses_anew():
    line = "    sampler.set_epoch(epoch)\n"
    return (edited(OURS, (line, f"{line}    losses = []\n")),)


@wrong("program", "divided by the number of ranks once too often", several=True)
def divides_the_losses_twice():
    return (edited(OURS, ("(losses / world_size)", "(losses / world_size**2)")),)


@wrong("program", "as the given program does", several=True)
def writes_another_dict():
    return (edited(OURS, ('{"parameters": parameters, "losses": losses}', '{"parameters": 5, "losses": losses}')),)


@wrong("program", "as the given program does", several=True)
def writes_nothing():
    return (edited(OURS, ('Path("result.json").write_text(json.dumps(result))', "pass")),)


@wrong("program", "by name, as the given program writes them", several=True)
def writes_a_list_of_parameters():
    """By number, not by name."""
    return (edited(OURS, ("{name: tensor.tolist() for name", "{str(len(name)): tensor.tolist() for name")),)


@wrong("program", "lists of numbers", several=True)
def writes_one_number_per_parameter():
    return (edited(OURS, ("tensor.tolist() for", "tensor.mean().item() for")),)


@wrong("program", "with its own seed|own share alone", several=True)
def steps_on_rank_0_only():
    return (edited(OURS, ("        optimizer.step()", "        if rank == 0:\n            optimizer.step()")),)


@wrong("program", "the sampler shuffles", several=True)
def a_sampler_and_a_shuffle():
    return (edited(OURS, ("sampler=sampler", "sampler=sampler, shuffle=True")),)


@wrong("program", "mean over the batch of all ranks|rank 0's own samples", several=True)
def losses_of_the_last_rank():
    return (edited(OURS, ("dist.all_reduce(losses)", "dist.broadcast(losses, world_size - 1)")),)


# ---- find_the_bug_1 ----


def fit(model, loader, epochs, sampler=None, called=None, lr=0.1, factor=1.0):
    """The loop of the answers below. called: what is called in it, where that is not
    `model`.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(epochs):
        if sampler:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            (factor * F.cross_entropy((called or model)(inputs), labels)).backward()
            optimizer.step()
    return model


def fit_on_ranks(make_model, train_set, epochs, batch_size, called=lambda model: model):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    return fit(model, loader, epochs, sampler, called=called(model)).module


@right("find_the_bug_1")
def calls_the_wrapper(make_model, train_set, epochs, batch_size):
    return fit_on_ranks(make_model, train_set, epochs, batch_size)


@right("find_the_bug_1")
def averages_by_hand(make_model, train_set, epochs, batch_size):
    """Leaves the call as it is, and averages the gradients itself."""
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model.module(inputs), labels).backward()
            lesson03.average_gradients(model.module)
            optimizer.step()
    return model


@wrong("find_the_bug_1", "end with different ones: nothing is wrong with any rank")
def bug_1_as_given(make_model, train_set, epochs, batch_size):
    called = lambda model: model.module
    return fit_on_ranks(make_model, train_set, epochs, batch_size, called)


@wrong("find_the_bug_1", "end with different ones: nothing is wrong with any rank")
def averages_the_loss(make_model, train_set, epochs, batch_size):
    """All-reduces the loss, in the hope that the gradients follow."""
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model.module(inputs), labels)
            loss.backward()
            dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
            optimizer.step()
    return model.module


@wrong("find_the_bug_1", "the mean of networks that were trained apart")
def averages_the_parameters_at_the_end(make_model, train_set, epochs, batch_size):
    network = bug_1_as_given(make_model, train_set, epochs, batch_size)
    for parameter in network.parameters():
        dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
    return network


@wrong("find_the_bug_1", "what rank 0 would end with alone")
def broadcasts_after_each_epoch(make_model, train_set, epochs, batch_size):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        fit(model, loader, 1, called=model.module)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    return model.module


@wrong("find_the_bug_1", "too long by a factor of the number of ranks")
def sums_by_hand(make_model, train_set, epochs, batch_size):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model.module(inputs), labels).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return model.module


@wrong("find_the_bug_1", "all ranks are trained on the same samples")
def gives_all_the_same_samples(make_model, train_set, epochs, batch_size):
    """The ranks agree now, because each computes the same."""
    sampler = DistributedSampler(train_set, dist.get_world_size(), 0)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    return fit(model, loader, epochs, sampler, called=model.module).module


@right("find_the_bug_1")
def averages_before_each_step(make_model, train_set, epochs, batch_size):
    """The wrapper only starts the ranks alike."""
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    network = DistributedDataParallel(make_model()).module
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch + 7)
        for inputs, labels in loader:
            loss = F.cross_entropy(network(inputs), labels)
            for parameter, gradient in zip(network.parameters(), torch.autograd.grad(loss, list(network.parameters()))):
                dist.all_reduce(gradient)
                parameter.grad = gradient / dist.get_world_size()
            optimizer.step()
    return network


@right("find_the_bug_1")
def averages_the_parameters_in_each_step(make_model, train_set, epochs, batch_size):
    """With plain SGD, the mean after a step is a step with the mean gradient."""
    sampler = DistributedSampler(train_set)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(train_set, batch_size, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model.module(inputs), labels).backward()
            optimizer.step()
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
    return model


def with_sampler(
    make_model, sampler, epochs, batch_size, tell=lambda sampler, epoch: sampler.set_epoch(epoch), **options
):
    """The loop, with another sampler."""
    model, loader = DistributedDataParallel(make_model()), DataLoader(sampler.dataset, batch_size, sampler=sampler)
    for epoch in range(epochs):
        tell(sampler, epoch)
        fit(model, loader, 1, **options)
    return model.module


@wrong("find_the_bug_1", "which epoch it is")
def only_two_orders(make_model, train_set, epochs, batch_size):
    tell = lambda sampler, epoch: sampler.set_epoch(epoch % 2)
    return with_sampler(make_model, DistributedSampler(train_set), epochs, batch_size, tell)


@wrong("find_the_bug_1", "nothing is shuffled")
def never_shuffles(make_model, train_set, epochs, batch_size):
    return with_sampler(make_model, DistributedSampler(train_set, shuffle=False), epochs, batch_size)


@wrong("find_the_bug_1", "from one seed")
def another_seed_on_each_rank(make_model, train_set, epochs, batch_size):
    return with_sampler(make_model, DistributedSampler(train_set, seed=dist.get_rank()), epochs, batch_size)


@wrong("find_the_bug_1", "leave it unchanged")
def half_the_batch_size(make_model, train_set, epochs, batch_size):
    """Takes the batch size for that of all ranks."""
    return with_sampler(make_model, DistributedSampler(train_set), epochs, batch_size - 1)


@wrong("find_the_bug_1", "every rank goes through all samples")
def shuffles_everything(make_model, train_set, epochs, batch_size):
    model = DistributedDataParallel(make_model())
    return fit(model, DataLoader(train_set, batch_size, shuffle=True), epochs)


@wrong("find_the_bug_1", "each sample once in each epoch")
def one_epoch_more(make_model, train_set, epochs, batch_size):
    return with_sampler(make_model, DistributedSampler(train_set), epochs + 1, batch_size)


@wrong("find_the_bug_1", "too short by a factor")
def divides_once_more(make_model, train_set, epochs, batch_size):
    return with_sampler(make_model, DistributedSampler(train_set), epochs, batch_size, factor=1 / dist.get_world_size())


@wrong("find_the_bug_1", "have not changed")
def returns_another_copy(make_model, train_set, epochs, batch_size):
    """Trains the wrapped copy, and returns the network that it was copied from."""
    network = make_model()
    copied = make_model()
    copied.load_state_dict(network.state_dict())
    network(train_set[0][0][None])
    fit_on_ranks(lambda: copied, train_set, epochs, batch_size)
    return network


@wrong("find_the_bug_1", "return the network that the loop trains")
def returns_nothing(make_model, train_set, epochs, batch_size):
    fit_on_ranks(make_model, train_set, epochs, batch_size)


@wrong("find_the_bug_1", "start from the same parameters")
def wraps_nothing(make_model, train_set, epochs, batch_size):
    """Averages gradients by hand, of networks that start apart."""
    network = make_model()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    sampler = DistributedSampler(train_set)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(train_set, batch_size, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), labels).backward()
            lesson03.average_gradients(network)
            optimizer.step()
    return network


# ---- find_the_bug_2 ----


def fit_two_classes(train_set, epochs, batch_size, loss_of, outputs=1, wrap=DistributedDataParallel):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = wrap(nn.Linear(len(train_set[0][0]), outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return getattr(model, "module", model), losses


@right("find_the_bug_2")
def binary_cross_entropy(train_set, epochs, batch_size):
    return fit_two_classes(train_set, epochs, batch_size, F.binary_cross_entropy_with_logits)


@right("find_the_bug_2")
def one_output_a_class(train_set, epochs, batch_size):
    print("two outputs")
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, labels[:, 0].long())
    network, losses = fit_two_classes(train_set, epochs, batch_size, loss_of, outputs=2)
    return DistributedDataParallel(network), torch.tensor(losses)


@right("find_the_bug_2")
def probabilities_first(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy(torch.sigmoid(outputs), labels)
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "the loss is zero from the first step")
def one_logit_with_cross_entropy(train_set, epochs, batch_size):
    return fit_two_classes(train_set, epochs, batch_size, F.cross_entropy)


@wrong("find_the_bug_2", "out of bounds", status="your code raised")
def labels_made_whole(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, labels[:, 0].long())
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "never below zero")
def arguments_swapped(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(labels, outputs)
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "training diverges")
def squared_error(train_set, epochs, batch_size):
    return fit_two_classes(train_set, epochs, batch_size, F.mse_loss)


@wrong("find_the_bug_2", "this loss cannot approach 0")
def two_sigmoids(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(torch.sigmoid(outputs), labels)
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "it has learned the opposite")
def the_other_way_round(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(outputs, 1 - labels)
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "the ranks have trained different networks")
def takes_the_wrapper_away(train_set, epochs, batch_size):
    return fit_two_classes(
        train_set, epochs, batch_size, F.binary_cross_entropy_with_logits, wrap=lambda network: network
    )


@wrong("find_the_bug_2", "one output, above 0 for label 1, or one output per class")
def ten_classes(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, labels[:, 0].long())
    return fit_two_classes(train_set, epochs, batch_size, loss_of, outputs=10)


@wrong("find_the_bug_2", "return both, as the given program")
def without_the_losses(train_set, epochs, batch_size):
    return binary_cross_entropy(train_set, epochs, batch_size)[0]


@right("find_the_bug_2")
def written_out(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.softplus(torch.where(labels > 0, -outputs, outputs)).mean()
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@right("find_the_bug_2")
def summed_over_the_batch(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@right("find_the_bug_2")
def with_a_zero_beside_it(train_set, epochs, batch_size):
    """A second output that is always 0 makes the two losses the same."""
    both = lambda outputs: torch.cat([torch.zeros_like(outputs), outputs], dim=1)
    loss_of = lambda outputs, labels: F.cross_entropy(both(outputs), labels.flatten().long())
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "the loss is zero from the first step")
def labels_flattened(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long))
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "between 0 and 1", status="your code raised")
def probabilities_expected(train_set, epochs, batch_size):
    return fit_two_classes(train_set, epochs, batch_size, F.binary_cross_entropy)


@wrong("find_the_bug_2", "training diverges|never below zero")
def the_output_itself(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: (outputs * (1 - 2 * labels)).mean()
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "the loss stays large|does not separate")
def targets_of_one_half(train_set, epochs, batch_size):
    """Smooths the labels so far that no output can be sure."""
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(outputs, 0.5 + 0.2 * (labels - 0.5))
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "one number per step")
def one_loss_per_epoch(train_set, epochs, batch_size):
    network, losses = binary_cross_entropy(train_set, epochs, batch_size)
    return network, losses[:: len(losses) // epochs]


@wrong("find_the_bug_2", "one number per step")
def losses_of_all_samples(train_set, epochs, batch_size):
    network, losses = binary_cross_entropy(train_set, epochs, batch_size)
    return network, torch.tensor(losses)[:, None].expand(-1, 2)


@wrong("find_the_bug_2", "does not separate the two classes")
def looks_at_one_class(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: (labels * F.softplus(-outputs)).mean()
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "does not separate the two classes|have trained different")
def returns_a_new_network(train_set, epochs, batch_size):
    _, losses = binary_cross_entropy(train_set, epochs, batch_size)
    network = nn.Linear(len(train_set[0][0]), 1)
    nn.init.zeros_(network.weight)
    nn.init.ones_(network.bias)
    return network, losses


# ---- find_the_bug_3 ----


def report(make_model, train_set, test_set, epochs, batch_size, tell_epoch, evaluate):
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        tell_epoch(sampler, epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.module, *evaluate(model, test_set)


def set_epoch(sampler, epoch):
    sampler.set_epoch(epoch)


def exactly(model, test_set):
    return lesson04.evaluate(model, test_set, torch.device("cpu"))


@right("find_the_bug_3")
def both_repaired(*arguments):
    return report(*arguments, set_epoch, exactly)


@right("find_the_bug_3")
def every_rank_tests_all(*arguments):
    network, correct, seen = report(*arguments, set_epoch, lambda model, test_set: count(model.module, test_set))
    print(f"test accuracy {correct / seen:.1%}")
    return DistributedDataParallel(network), torch.tensor(correct), torch.tensor(seen)


@wrong("find_the_bug_3", "what should differ between these epochs")
def bug_as_given(make_model, train_set, *others):
    evaluate = lambda model, test_set: exactly(model, train_set)
    return report(make_model, train_set, *others, lambda sampler, epoch: None, evaluate)


@wrong("find_the_bug_3", "which are counted here")
def only_the_order_repaired(make_model, train_set, *others):
    return report(make_model, train_set, *others, set_epoch, lambda model, test_set: exactly(model, train_set))


@wrong("find_the_bug_3", "what should differ between these epochs")
def only_the_test_repaired(*arguments):
    return report(*arguments, lambda sampler, epoch: None, exactly)


@wrong("find_the_bug_3", "what should differ between these epochs")
def tells_it_once(*arguments):
    return report(*arguments, lambda sampler, epoch: sampler.set_epoch(0), exactly)


@wrong("find_the_bug_3", "counted more than once")
def tests_with_padding(*arguments):
    evaluate = lambda model, test_set: summed(*count(model.module, test_set, DistributedSampler(test_set)))
    return report(*arguments, set_epoch, evaluate)


@wrong("find_the_bug_3", "only its own share of the test set")
def forgets_to_sum(*arguments):
    return report(*arguments, set_epoch, lambda model, test_set: count(model.module, my_part(test_set)))


@wrong("find_the_bug_3", "trained on the samples that it is later tested on")
def trains_on_the_test_set_too(make_model, train_set, test_set, *others):
    return report(make_model, train_set + test_set, test_set, *others, set_epoch, exactly)


@right("find_the_bug_3")
def looks_at_the_training_set_too(make_model, train_set, *others):
    """Reports how many samples of the training set are right, and returns those of the test set."""

    def evaluate(model, test_set):
        print("train", exactly(model, train_set))
        return exactly(model, test_set)

    return report(make_model, train_set, *others, set_epoch, evaluate)


@right("find_the_bug_3")
def rank_0_tests_and_tells(*arguments):
    def evaluate(model, test_set):
        counts = torch.zeros(2)
        if dist.get_rank() == 0:
            counts = torch.tensor(count(model.module.eval(), test_set)).float()
        dist.broadcast(counts, 0)
        return counts

    return report(*arguments, set_epoch, evaluate)


@right("find_the_bug_3")
def tells_other_numbers(*arguments):
    tell = lambda sampler, epoch: sampler.set_epoch(100 - epoch)
    return report(*arguments, tell, exactly)


@wrong("find_the_bug_3", "what should differ between these epochs")
def tells_after_the_epoch(*arguments):
    """The first two epochs have the order of epoch 0."""
    return report(*arguments, lambda sampler, epoch: sampler.set_epoch(max(0, epoch - 1)), exactly)


@wrong("find_the_bug_3", "what should differ between these epochs")
def tells_two_numbers_in_turn(*arguments):
    return report(*arguments, lambda sampler, epoch: sampler.set_epoch(epoch % 2), exactly)


@wrong("find_the_bug_3", "which are counted here")
def counts_both_sets(make_model, train_set, *others):
    evaluate = lambda model, test_set: exactly(model, test_set + train_set)
    return report(make_model, train_set, *others, set_epoch, evaluate)


@wrong("find_the_bug_3", "which are counted here")
def counts_the_training_set_on_rank_0(make_model, train_set, *others):
    def evaluate(model, test_set):
        mine = my_part(train_set if dist.get_rank() == 0 else test_set)
        return summed(*count(model.module, mine))

    return report(make_model, train_set, *others, set_epoch, evaluate)


@wrong("find_the_bug_3", "do the ranks together count each sample")
def without_the_tail(*arguments):
    evaluate = lambda model, test_set: summed(
        *count(model.module, test_set, DistributedSampler(test_set, shuffle=False, drop_last=True))
    )
    return report(*arguments, set_epoch, evaluate)


@wrong("find_the_bug_3", "do the ranks together count each sample")
def right_guesses_of_rank_0(*arguments):
    """Sums only the number of samples."""

    def evaluate(model, test_set):
        correct, seen = count(model.module, my_part(test_set))
        return correct, summed(seen)[0]

    return report(*arguments, set_epoch, evaluate)


@wrong("find_the_bug_3", "counted more than once")
def everything_on_each_rank_and_summed(*arguments):
    evaluate = lambda model, test_set: summed(*count(model.module, test_set))
    return report(*arguments, set_epoch, evaluate)


@wrong("find_the_bug_3", "return the network and two numbers")
def returns_an_accuracy_as_a_text(*arguments):
    network, correct, seen = both_repaired(*arguments)
    return network, f"{correct / seen:.1%}", None


@wrong("find_the_bug_3", "return the network that the loop trains")
def returns_only_the_network(*arguments):
    return both_repaired(*arguments)[0]
