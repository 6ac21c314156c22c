"""Exercise 04: DistributedDataParallel."""

import math
import random
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import lesson01, lesson03, lesson04
from mutants import right, wrong

# ---- sharded_sampler ----


@right("sharded_sampler")
class Interleaved:
    """As in the solution; the parts of the wrong ones below."""

    def __init__(
        self, samples, num_replicas, rank, shuffle=True, seed=0, drop_last=False
    ):
        self.samples, self.num_replicas, self.rank = samples, num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.epoch = (
            shuffle,
            seed,
            drop_last,
            0,
        )

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        part = self.samples / self.num_replicas
        return math.floor(part) if self.drop_last else math.ceil(part)

    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def order(self):
        if not self.shuffle:
            return list(range(self.samples))
        return torch.randperm(self.samples, generator=self.generator()).tolist()

    def resized(self, order):
        total = len(self) * self.num_replicas
        return (order * math.ceil(total / len(order)))[:total]

    def __iter__(self):
        return iter(self.resized(self.order())[self.rank :: self.num_replicas])


@right("sharded_sampler")
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

    def set_epoch(self, epoch):
        order = numpy.random.default_rng([self.seed, epoch]).permutation(self.samples)
        self.mine = numpy.resize(
            order if self.shuffle else numpy.arange(self.samples),
            len(self) * self.num_replicas,
        )

    def __iter__(self):
        return iter(self.mine.reshape(-1, self.num_replicas)[:, self.rank])


@right("sharded_sampler")
class Torchs(DistributedSampler):
    def __init__(self, samples, num_replicas, rank, **options):
        super().__init__(range(samples), num_replicas, rank, **options)


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
        total = self.num_replicas * (
            math.floor(part) if self.drop_last else math.ceil(part)
        )
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
        return torch.randint(
            self.samples, (self.samples,), generator=self.generator()
        ).tolist()


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
        return iter(
            order[
                torch.arange(
                    self.rank, len(self) * self.num_replicas, self.num_replicas
                )
            ].tolist()
        )


@wrong("sharded_sampler", "set_epoch has no effect")
class MultipliesSeedAndEpoch(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(self.seed * self.epoch)


@wrong("sharded_sampler", "the same samples are left out in every epoch")
class DropsBeforeItShuffles(Interleaved):
    def __iter__(self):
        total = len(self) * self.num_replicas
        order = self.resized(
            list(range(self.samples)) if self.drop_last else self.order()
        )
        if self.drop_last and self.shuffle:
            order = [
                order[place]
                for place in torch.randperm(total, generator=self.generator()).tolist()
            ]
        return iter(order[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "the same samples are repeated in every epoch")
class RepeatsBeforeItShuffles(Interleaved):
    def __iter__(self):
        order = self.order() if self.drop_last else list(range(self.samples))
        order = self.resized(order)
        if self.shuffle and not self.drop_last:
            order = [
                order[place]
                for place in torch.randperm(
                    len(order), generator=self.generator()
                ).tolist()
            ]
        return iter(order[self.rank :: self.num_replicas])


@wrong("sharded_sampler", "use your own torch.Generator")
class SeedsTheProcess(Interleaved):
    def generator(self):
        return torch.manual_seed(self.seed + self.epoch)


@wrong("sharded_sampler", "repeat different ones in turn")
class RepeatsTheLast(Interleaved):
    def resized(self, order):
        total = len(self) * self.num_replicas
        return (
            (order + order[-1:] * total)[:total]
            if total < 3 * len(order)
            else super().resized(order)
        )


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
        return torch.Generator().manual_seed(
            hash(f"{self.seed} {self.epoch}") & 0xFFFFFFFF
        )


@right("sharded_sampler")
class SeedsWithAHashOfNumbers(Interleaved):
    def generator(self):
        return torch.Generator().manual_seed(hash((self.seed, self.epoch)) % 2**31)


@wrong(
    "sharded_sampler", r"AttributeError.*\n.*\(in Sharded", status="your code raised"
)
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
    def set_epoch(self, epoch):
        self.epoch, self.left = epoch, None
        self.left = super().__iter__()

    def __iter__(self):
        return self.left if hasattr(self, "left") else super().__iter__()


@wrong("sharded_sampler", "before the first set_epoch, the epoch is 0")
class BeginsBeforeTheFirstEpoch(Interleaved):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.epoch = 7


# ---- evaluate ----


@right("evaluate")
def as_in_the_lesson(model, test_set, device):
    return lesson04.evaluate(model, test_set, device)


@right("evaluate")
def blocks_and_objects(model, test_set, device):
    """A block for each rank, batches cut by hand, counts sent as Python objects."""
    rank, n = dist.get_rank(), dist.get_world_size()
    network = model.module.eval()
    mine = list(range(rank * len(test_set) // n, (rank + 1) * len(test_set) // n))
    correct = 0
    for begin in range(0, len(mine), 64):
        pairs = [test_set[index] for index in mine[begin : begin + 64]]
        guesses = network(torch.stack([pair[0] for pair in pairs])).argmax(1)
        correct += sum(int(guess == pair[1]) for guess, pair in zip(guesses, pairs))
    print(f"{correct} of my {len(mine)}")
    gathered = [None] * n
    dist.all_gather_object(gathered, (correct, len(mine)))
    return [sum(column) for column in zip(*gathered)]


@right("evaluate")
@torch.no_grad()
def padded_but_not_counted(model, test_set, device):
    """Through the wrapper, which is allowed, since padding gives all ranks equally many
    batches; only real samples count.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    model.eval()
    positions = list(range(rank, math.ceil(len(test_set) / n) * n, n))
    padded = Subset(test_set, [position % len(test_set) for position in positions])
    counts = torch.zeros(2)
    for number, (inputs, labels) in enumerate(DataLoader(padded, batch_size=32)):
        real = torch.tensor(positions[32 * number : 32 * number + len(labels)]) < len(
            test_set
        )
        counts += torch.stack(
            [((model(inputs).argmax(1) == labels) & real).sum(), real.sum()]
        )
    dist.all_reduce(counts)
    return counts[0], counts[1]


def count(network, data_set, sampler=None):
    return lesson01.evaluate(
        network, DataLoader(data_set, 50, sampler=sampler), torch.device("cpu")
    )


def my_part(test_set):
    return Subset(
        test_set, range(dist.get_rank(), len(test_set), dist.get_world_size())
    )


def summed(*numbers):
    totals = torch.tensor(numbers)
    dist.all_reduce(totals)
    return totals.tolist()


@wrong("evaluate", "some samples were counted twice")
def with_distributed_sampler(model, test_set, device):
    return summed(
        *count(model.module, test_set, DistributedSampler(test_set, shuffle=False))
    )


@wrong("evaluate", "some samples were left out")
def drops_the_tail(model, test_set, device):
    return summed(
        *count(
            model.module,
            test_set,
            DistributedSampler(test_set, shuffle=False, drop_last=True),
        )
    )


@wrong("evaluate", "the mean of the ranks' accuracies")
def mean_of_means(model, test_set, device):
    correct, seen = count(model.module, my_part(test_set))
    [accuracy] = summed(correct / seen)
    return accuracy / dist.get_world_size() * len(test_set), len(test_set)


@wrong("evaluate", "the mean of the ranks' accuracies")
def mean_of_means_rounded(model, test_set, device):
    correct, seen = count(model.module, my_part(test_set))
    [accuracy] = summed(correct / max(seen, 1))
    return round(accuracy / dist.get_world_size() * len(test_set)), len(test_set)


@wrong("evaluate", "were evaluated more than once")
def padded_but_seen_is_right(model, test_set, device):
    sampler = DistributedSampler(test_set, shuffle=False)
    correct, _ = count(model.module, test_set, sampler)
    return summed(correct)[0], len(test_set)


@wrong("evaluate", "were evaluated more than once")
def shares_that_overlap(model, test_set, device):
    rank, n, size = dist.get_rank(), dist.get_world_size(), len(test_set)
    part = math.ceil(size / n)
    mine = range(max(0, min(rank * part, size) - 1), min((rank + 1) * part, size))
    correct, _ = count(model.module, Subset(test_set, mine))
    return summed(correct)[0], size


@wrong("evaluate", "gradients are still switched off")
def leaves_gradients_off(model, test_set, device):
    torch.set_grad_enabled(False)
    return lesson04.evaluate(model, test_set, device)


@wrong("evaluate", "this is an accuracy")
def returns_an_accuracy(model, test_set, device):
    correct, seen = summed(*count(model.module, my_part(test_set)))
    return correct / seen, seen


@wrong("evaluate", "return two numbers")
def returns_one_number(model, test_set, device):
    correct, seen = summed(*count(model.module, my_part(test_set)))
    return correct / seen


@wrong("evaluate", "only rank 0 has the totals")
def reduces_to_rank_zero(model, test_set, device):
    counts = torch.tensor(count(model.module, my_part(test_set)))
    dist.reduce(counts, dst=0)
    return counts.tolist()


@wrong("evaluate", "only rank 0 has the totals")
def rank_zero_alone(model, test_set, device):
    counts = count(model.module, test_set) if dist.get_rank() == 0 else (0, 0)
    dist.barrier()
    return counts


@wrong("evaluate", "one rank does all the work")
def rank_zero_tells(model, test_set, device):
    counts = torch.tensor(
        count(model.module, test_set) if dist.get_rank() == 0 else (0, 0)
    )
    dist.broadcast(counts, 0)
    return counts.tolist()


@wrong("evaluate", "every rank does all the work")
def everyone_does_everything(model, test_set, device):
    return count(model.module, test_set)


@wrong("evaluate", "each sample counts once")
def everything_and_summed(model, test_set, device):
    return summed(*count(model.module, test_set))


@wrong("evaluate", "counts of its own share: sum them")
def does_not_sum(model, test_set, device):
    return count(model.module, my_part(test_set))


@wrong("evaluate", "averaged over the ranks")
def averages_the_counts(model, test_set, device):
    return [
        number / dist.get_world_size()
        for number in summed(*count(model.module, my_part(test_set)))
    ]


@wrong("evaluate", "seen is summed over the ranks, correct is not")
def sums_only_seen(model, test_set, device):
    correct, seen = count(model.module, my_part(test_set))
    return correct, summed(seen)[0]


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def rank_zero_through_the_wrapper(model, test_set, device):
    counts = torch.tensor(count(model, test_set) if dist.get_rank() == 0 else (0, 0))
    dist.broadcast(counts, 0)
    return counts.tolist()


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def rank_zero_through_the_wrapper_then_barrier(model, test_set, device):
    counts = count(model, test_set) if dist.get_rank() == 0 else (0, 0)
    dist.barrier()
    return counts


@wrong("evaluate", "a forward through the DDP wrapper is a collective")
def through_the_wrapper(model, test_set, device):
    return summed(*count(model, my_part(test_set)))


@wrong("evaluate", "still in training mode")
def in_training_mode(model, test_set, device):
    correct = seen = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(my_part(test_set), 50):
            correct += (model.module(inputs).argmax(1) == labels).sum().item()
            seen += len(labels)
    return summed(correct, seen)


@wrong("evaluate", "still in training mode")
def in_training_mode_one_by_one(model, test_set, device):
    correct = seen = 0
    for inputs, labels in DataLoader(my_part(test_set), 1):
        correct += (model.module(inputs).argmax(1) == labels).sum().item()
        seen += len(labels)
    return summed(correct, seen)


@wrong("evaluate", "return two numbers")
def no_numbers(model, test_set, device):
    return float("nan"), len(test_set)


@wrong("evaluate", "ZeroDivisionError", status="your code raised")
def cannot_do_without_samples(model, test_set, device):
    correct, seen = count(model.module, my_part(test_set))
    print(f"my accuracy is {correct / seen:.1%}")
    return summed(correct, seen)


@wrong("evaluate", "correct first, then seen")
def in_the_other_order(model, test_set, device):
    return lesson04.evaluate(model, test_set, device)[::-1]


# ---- train ----


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


@right("train")
def with_ddp(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(DistributedDataParallel(make_model()), loader, epochs, sampler)


@right("train")
def by_hand(make_model, train_set, epochs, batch_size, seed):
    """No wrapper and no sampler: gradients averaged as in lesson 3, and each rank
    shuffles a part of its own.
    """
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = Subset(
        train_set, range(dist.get_rank(), len(train_set), dist.get_world_size())
    )
    for epoch in range(epochs):
        for inputs, labels in DataLoader(part, batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            lesson03.average_gradients(model)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    return model


@right("train")
def batches_of_one_shuffle(make_model, train_set, epochs, batch_size, seed):
    """Each rank cuts its part out of the joined batches itself, and looks at its model
    once in an epoch.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        order = torch.randperm(
            len(train_set), generator=torch.Generator().manual_seed(seed + epoch)
        )
        model.train()
        for joined in order.split(n * batch_size):
            inputs, labels = zip(
                *(train_set[index] for index in joined.chunk(n)[rank].tolist())
            )
            optimizer.zero_grad()
            F.cross_entropy(model(torch.stack(inputs)), torch.stack(labels)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model.module(train_set[0][0][None])
    return model


@wrong("train", "call the wrapped model in the loop")
def calls_the_bare_model(make_model, train_set, epochs, batch_size, seed):
    """As with_ddp, but forward and backward go past the wrapper: no error, no hook."""
    torch.manual_seed(seed)
    network = make_model()
    DistributedDataParallel(network)
    sampler = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(network, loader, epochs, sampler)


@wrong("train", "every rank goes through all samples")
def as_it_was_given(make_model, train_set, epochs, batch_size, seed):
    torch.manual_seed(seed)
    model = make_model()
    loader = DataLoader(train_set, batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(epochs):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    return model


@wrong("train", "every rank goes through all samples")
def without_a_sampler(make_model, train_set, epochs, batch_size, seed):
    torch.manual_seed(seed + dist.get_rank())
    return fit(
        DistributedDataParallel(make_model()),
        DataLoader(train_set, batch_size, shuffle=True),
        epochs,
    )


@wrong("train", "all ranks are trained on the same samples")
def the_first_part_for_all(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, dist.get_world_size(), rank=0, seed=seed)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(DistributedDataParallel(make_model()), loader, epochs, sampler)


@wrong("train", "does the sampler know which epoch it is")
def without_set_epoch(make_model, train_set, epochs, batch_size, seed):
    loader = DataLoader(
        train_set, batch_size, sampler=DistributedSampler(train_set, seed=seed)
    )
    return fit(DistributedDataParallel(make_model()), loader, epochs)


@wrong("train", "nothing is shuffled")
def without_shuffle(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, shuffle=False)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(DistributedDataParallel(make_model()), loader, epochs, sampler)


@wrong("train", "without averaging gradients")
def not_wrapped(make_model, train_set, epochs, batch_size, seed):
    torch.manual_seed(seed)
    sampler = DistributedSampler(train_set, seed=seed)
    return fit(
        make_model(),
        DataLoader(train_set, batch_size, sampler=sampler),
        epochs,
        sampler,
    )


@wrong("train", "start from the same parameters")
def not_wrapped_nor_seeded(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    return fit(
        make_model(),
        DataLoader(train_set, batch_size, sampler=sampler),
        epochs,
        sampler,
    )


@wrong("train", "without averaging gradients")
def calls_the_inner_model(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    model = DistributedDataParallel(make_model())
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(model, loader, epochs, sampler, called=model.module)


@wrong("train", "does the optimizer have the parameters")
def optimizer_of_another_model(make_model, train_set, epochs, batch_size, seed):
    model, wrapped = make_model(), DistributedDataParallel(make_model())
    sampler = DistributedSampler(train_set, seed=seed)
    fit(
        model,
        DataLoader(train_set, batch_size, sampler=sampler),
        epochs,
        sampler,
        called=wrapped,
    )
    return wrapped.module


@wrong("train", "return the network that the loop trains")
def returns_another_model(make_model, train_set, epochs, batch_size, seed):
    model = make_model()
    wrapped = DistributedDataParallel(make_model())
    sampler = DistributedSampler(train_set, seed=seed)
    fit(wrapped, DataLoader(train_set, batch_size, sampler=sampler), epochs, sampler)
    return model


@wrong("train", "return the network that the loop trains")
def returns_nothing(make_model, train_set, epochs, batch_size, seed):
    with_ddp(make_model, train_set, epochs, batch_size, seed)


@wrong("train", "from one shuffle, so from one seed")
def shuffles_by_rank(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed + dist.get_rank())
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(DistributedDataParallel(make_model()), loader, epochs, sampler)


@wrong("train", "too short by a factor of the number of ranks")
def divides_the_loss_again(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    return fit(model, loader, epochs, sampler, factor=1 / dist.get_world_size())


@wrong("train", "too long by a factor of the number of ranks")
def scales_the_learning_rate(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    return fit(
        DistributedDataParallel(make_model()),
        loader,
        epochs,
        sampler,
        lr=0.1 * dist.get_world_size(),
    )


@wrong("train", "leave it unchanged")
def divides_the_batch(make_model, train_set, epochs, batch_size, seed):
    sampler = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(
        train_set, max(1, batch_size // dist.get_world_size()), sampler=sampler
    )
    return fit(DistributedDataParallel(make_model()), loader, epochs, sampler)


@wrong("train", "do not call init_process_group", status="your code raised")
def joins_the_group_again(make_model, train_set, epochs, batch_size, seed):
    dist.init_process_group("gloo")
    return with_ddp(make_model, train_set, epochs, batch_size, seed)


@wrong("train", "some rank waits for another", status="timed out")
def rank_zero_trains(make_model, train_set, epochs, batch_size, seed):
    if dist.get_rank() == 0:
        return with_ddp(make_model, train_set, epochs, batch_size, seed)
    time.sleep(60)


# ---- find_the_bug_1 ----


@right("find_the_bug_1")
class AveragesGradients(nn.Module):
    """As in the solution; the parts of the wrong ones below."""

    def __init__(self, module):
        super().__init__()
        self.module, self.in_flight = module, []
        for value in module.state_dict().values():
            dist.broadcast(value, src=0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def send(self, tensor, op=dist.ReduceOp.AVG):
        self.in_flight.append(dist.all_reduce(tensor, op, async_op=True))

    def gradient_is_ready(self, parameter):
        self.send(parameter.grad)

    def finish_gradient_synchronization(self):
        for work in self.in_flight:
            work.wait()
        self.in_flight.clear()


@right("find_the_bug_1")
class AveragesAtTheEnd(AveragesGradients):
    def gradient_is_ready(self, parameter):
        print("ready")

    def finish_gradient_synchronization(self):
        lesson03.average_gradients(self.module)


@right("find_the_bug_1")
class DividesAndSums(AveragesGradients):
    def gradient_is_ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.send(parameter.grad, dist.ReduceOp.SUM)


@wrong("find_the_bug_1", "each rank still has its own gradient")
class AsGiven(AveragesGradients):
    def gradient_is_ready(self, parameter):
        self.send(parameter.data)


@wrong("find_the_bug_1", "backward has changed the parameters")
class SumsTheParameters(AveragesGradients):
    def gradient_is_ready(self, parameter):
        self.send(parameter.data, dist.ReduceOp.SUM)


@wrong("find_the_bug_1", "2 times too large")
class SumsTheGradients(AveragesGradients):
    def gradient_is_ready(self, parameter):
        self.send(parameter.grad, dist.ReduceOp.SUM)


@wrong("find_the_bug_1", "2 times too small")
class DividesTwice(AveragesGradients):
    def gradient_is_ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.send(parameter.grad)


@wrong("find_the_bug_1", "nothing was summed")
class SendsACopy(AveragesGradients):
    def gradient_is_ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.send(parameter.grad.clone())


@wrong("find_the_bug_1", "other ranks' samples are ignored")
class BroadcastsGradients(AveragesGradients):
    def gradient_is_ready(self, parameter):
        self.in_flight.append(dist.broadcast(parameter.grad, 0, async_op=True))


@wrong("find_the_bug_1", "the ranks do not start from the same parameters")
class TakesTheBroadcastAway(AveragesGradients):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.in_flight = module, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)


@wrong("find_the_bug_1", "left over from the step before")
class AveragesOnce(AveragesGradients):
    sent = 0

    def gradient_is_ready(self, parameter):
        self.sent += 1
        self.send(parameter.grad if self.sent <= 6 else parameter.grad.clone())


# ---- find_the_bug_2 ----


def fit_two_classes(
    train_set, epochs, batch_size, loss_of, outputs=1, wrap=DistributedDataParallel
):
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
    return fit_two_classes(
        train_set, epochs, batch_size, F.binary_cross_entropy_with_logits
    )


@right("find_the_bug_2")
def one_output_a_class(train_set, epochs, batch_size):
    print("two outputs")
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, labels[:, 0].long())
    network, losses = fit_two_classes(train_set, epochs, batch_size, loss_of, outputs=2)
    return DistributedDataParallel(network), torch.tensor(losses)


@right("find_the_bug_2")
def probabilities_first(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy(
        torch.sigmoid(outputs), labels
    )
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
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(
        labels, outputs
    )
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "training diverges")
def squared_error(train_set, epochs, batch_size):
    return fit_two_classes(train_set, epochs, batch_size, F.mse_loss)


@wrong("find_the_bug_2", "this loss cannot approach 0")
def two_sigmoids(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(
        torch.sigmoid(outputs), labels
    )
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "it has learned the opposite")
def the_other_way_round(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.binary_cross_entropy_with_logits(
        outputs, 1 - labels
    )
    return fit_two_classes(train_set, epochs, batch_size, loss_of)


@wrong("find_the_bug_2", "the ranks have trained different networks")
def takes_the_wrapper_away(train_set, epochs, batch_size):
    return fit_two_classes(
        train_set,
        epochs,
        batch_size,
        F.binary_cross_entropy_with_logits,
        wrap=lambda network: network,
    )


@wrong("find_the_bug_2", "one output, above 0 for label 1, or one output per class")
def ten_classes(train_set, epochs, batch_size):
    loss_of = lambda outputs, labels: F.cross_entropy(outputs, labels[:, 0].long())
    return fit_two_classes(train_set, epochs, batch_size, loss_of, outputs=10)


@wrong("find_the_bug_2", "return both, as the given program")
def without_the_losses(train_set, epochs, batch_size):
    return binary_cross_entropy(train_set, epochs, batch_size)[0]


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
    network, correct, seen = report(
        *arguments, set_epoch, lambda model, test_set: count(model.module, test_set)
    )
    print(f"test accuracy {correct / seen:.1%}")
    return DistributedDataParallel(network), torch.tensor(correct), torch.tensor(seen)


@wrong(
    "find_the_bug_3",
    "every epoch has the same order, so the same samples",
)
def bug_as_given(make_model, train_set, *others):
    evaluate = lambda model, test_set: exactly(model, train_set)
    return report(make_model, train_set, *others, lambda sampler, epoch: None, evaluate)


@wrong("find_the_bug_3", "tested on samples that it was trained on")
def only_the_order_repaired(make_model, train_set, *others):
    return report(
        make_model,
        train_set,
        *others,
        set_epoch,
        lambda model, test_set: exactly(model, train_set),
    )


@wrong("find_the_bug_3", "every epoch has the same order")
def only_the_test_repaired(*arguments):
    return report(*arguments, lambda sampler, epoch: None, exactly)


@wrong("find_the_bug_3", "every epoch has the same order")
def tells_it_once(*arguments):
    return report(*arguments, lambda sampler, epoch: sampler.set_epoch(0), exactly)


@wrong("find_the_bug_3", "counted more than once")
def tests_with_padding(*arguments):
    evaluate = lambda model, test_set: summed(
        *count(model.module, test_set, DistributedSampler(test_set))
    )
    return report(*arguments, set_epoch, evaluate)


@wrong("find_the_bug_3", "only its own share of the test set")
def forgets_to_sum(*arguments):
    return report(
        *arguments,
        set_epoch,
        lambda model, test_set: count(model.module, my_part(test_set)),
    )


@wrong("find_the_bug_3", "trained on the samples that it is later tested on")
def trains_on_the_test_set_too(make_model, train_set, test_set, *others):
    return report(
        make_model, train_set + test_set, test_set, *others, set_epoch, exactly
    )
