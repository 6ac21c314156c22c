"""Exercise 16: making it fast."""

import collections
import functools
import itertools
import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from ddp_course.lesson16 import StepProfile, buckets, exposed_seconds, time_use
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mutants import right, wrong

# ---- update ----


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def average(tensors):
    """One all-reduce for several tensors; their means over the ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    pieces = (flat / dist.get_world_size()).split([t.numel() for t in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors)]


@right("update")
def all_in_one_message(model, micro_batches, optimizer):
    """The losses travel with the gradients."""
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in trained(model)]
    *means, losses = average([*gradients, torch.stack(losses) * len(losses)])
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean)
    optimizer.step()
    return losses.tolist()


@right("update")
def gradients_of_the_sum(model, micro_batches, optimizer):
    """One backward for the mean of all losses, and numbers fetched one by one."""
    losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches]
    parameters = trained(model)
    gradients = torch.autograd.grad(sum(losses) / len(losses), parameters)
    for parameter, mean in zip(parameters, average(gradients)):
        parameter.grad = mean
    optimizer.step()
    [means] = average([torch.stack(losses).detach()])
    return [mean.item() for mean in means]


@right("update")
def with_async_messages(model, micro_batches, optimizer):
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        losses.append(F.cross_entropy(model(inputs), labels))
        (losses[-1] / len(micro_batches)).backward()
    means = torch.stack(losses).detach()
    work = dist.all_reduce(means, dist.ReduceOp.AVG, async_op=True)
    for parameter, mean in zip(trained(model), average([parameter.grad for parameter in trained(model)])):
        parameter.grad = mean
    optimizer.step()
    work.wait()
    return means.tolist()


def update_with(each=None, reset=True, micro_batch_mean=True, rank_mean=True, travels=average, fetch=None):
    """An answer with one difference.

    each: what happens in the loop, with the model and the loss; travels: averages the
    gradients; fetch: how losses become numbers.
    """

    def update(model, micro_batches, optimizer):
        if reset:
            optimizer.zero_grad()
        losses = []
        for inputs, labels in micro_batches:
            loss = F.cross_entropy(model(inputs), labels)
            (loss / (len(micro_batches) if micro_batch_mean else 1)).backward()
            losses.append(each(loss.detach()) if each else loss.detach())
        gradients = [parameter.grad for parameter in trained(model)]
        n = 1 if rank_mean else dist.get_world_size()
        for gradient, mean in zip(gradients, travels(gradients)):
            gradient.copy_(mean * n)
        optimizer.step()
        if fetch:
            return fetch(losses)
        return average([torch.stack(losses)])[0].tolist()

    return [update]


def one_by_one(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
    return [tensor / dist.get_world_size() for tensor in tensors]


def item_of_the_mean(loss):
    dist.all_reduce(loss)
    return torch.tensor(loss.item() / dist.get_world_size())


def mean_without_item(loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@wrong("update", "each gradient travels alone, for each micro-batch")
def as_it_was(model, micro_batches, optimizer):
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, trained(model))
        for parameter, mean in zip(trained(model), one_by_one(gradients)):
            mean = mean / len(micro_batches)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        losses.append(item_of_the_mean(loss.detach()).item())
    optimizer.step()
    return losses


@wrong("update", "each of them travels alone", several=True)
def gradients_one_by_one():
    return update_with(travels=one_by_one)


@wrong("update", "the losses can wait until the end", several=True)
def losses_one_by_one():
    return update_with(each=mean_without_item, fetch=lambda losses: torch.stack(losses).tolist())


@wrong("update", "fetch the losses at the end", several=True)
def fetches_each_loss():
    return update_with(each=lambda loss: torch.tensor(loss.item(), dtype=loss.dtype))


@wrong("update", "both can wait until the end")
def everything_per_micro_batch(model, micro_batches, optimizer):
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels)
        means = average(torch.autograd.grad(loss, trained(model)))
        for parameter, mean in zip(trained(model), means):
            mean = mean / len(micro_batches)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        losses.append(mean_without_item(loss.detach()))
    optimizer.step()
    return torch.stack(losses).tolist()


@wrong("update", "add them up, and send them at the end")
def gradients_per_micro_batch(model, micro_batches, optimizer):
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        losses.append(F.cross_entropy(model(inputs), labels))
        means = average(torch.autograd.grad(losses[-1], trained(model)))
        for parameter, mean in zip(trained(model), means):
            mean = mean / len(micro_batches)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
    optimizer.step()
    return average([torch.stack(losses).detach()])[0].tolist()


@wrong("update", "must not hold the gradients of each micro-batch")
def all_gradients_at_the_end(model, micro_batches, optimizer):
    losses, gradients = [], []
    for inputs, labels in micro_batches:
        losses.append(F.cross_entropy(model(inputs), labels))
        gradients += torch.autograd.grad(losses[-1], trained(model))
    means, count = average(gradients), len(micro_batches)
    for place, parameter in enumerate(trained(model)):
        parameter.grad = sum(means[place :: len(trained(model))]) / count
    optimizer.step()
    return average([torch.stack(losses).detach()])[0].tolist()


@wrong("update", "the sum over the ranks", several=True)
def sums_over_ranks():
    return update_with(rank_mean=False)


@wrong("update", "the sum over the micro-batches", several=True)
def sums_over_micro_batches():
    return update_with(micro_batch_mean=False)


@wrong("update", "divide by the number of ranks and of micro-batches", several=True)
def sums_over_all():
    return update_with(micro_batch_mean=False, rank_mean=False)


@wrong("update", "of the update before are still there", several=True)
def never_resets():
    return update_with(reset=False)


@wrong("update", "each loss is the mean over the ranks", several=True)
def own_losses():
    return update_with(fetch=lambda losses: torch.stack(losses).tolist())


@wrong("update", "a list with the mean loss of each micro-batch", several=True)
def one_loss():
    return update_with(fetch=lambda losses: sum(losses).item())


@wrong("update", "must take the mean gradient over all", several=True)
def not_averaged():
    return update_with(travels=lambda gradients: gradients)


# ---- Pixels ----


class Base(Dataset):
    """The right data set, with methods to replace."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        numbers = images.float()
        self.mean, self.deviation = numbers.mean(), numbers.std()

    def __len__(self):
        return len(self.labels)

    def normal(self, images):
        return (images.float() - self.mean) / self.deviation

    def __getitem__(self, index):
        return self.normal(self.images[index])[None], self.labels[index]


@right("pixels", several=True)
def whole_batches():
    class Pixels(Base):
        def __getitems__(self, indices):
            images = self.normal(self.images[indices])[:, None]
            return list(zip(images, self.labels[indices]))

    return [Pixels]


@right("pixels", several=True)
def with_a_table():
    """256 values are all that there are."""

    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            self.table = self.normal(torch.arange(256))

        def __getitem__(self, index):
            return self.table[self.images[index].long()][None], self.labels[index]

    return [Pixels]


@right("pixels", several=True)
def when_it_is_first_needed():
    class Pixels(Base):
        def __init__(self, images, labels):
            self.images, self.labels, self.found = images, labels, None

        def __getitem__(self, index):
            if self.found is None:
                self.found = self.images.float().mean(), self.images.float().std()
            mean, deviation = self.found
            return ((self.images[index].float() - mean) / deviation)[None], self.labels[index]

    return [Pixels]


@wrong("pixels", "each image still goes through all images", several=True)
def for_each_image():
    class Pixels(Base):
        def __getitem__(self, index):
            numbers = self.images.float()
            image = (numbers[index] - numbers.mean()) / numbers.std()
            return image[None], self.labels[index]

    return [Pixels]


@wrong("pixels", "each batch still goes through all images", several=True)
def for_each_batch():
    class Pixels(Base):
        def __getitems__(self, indices):
            numbers = self.images.float()
            images = ((numbers - numbers.mean()) / numbers.std())[indices]
            return list(zip(images[:, None], self.labels[indices]))

    return [Pixels]


@wrong("pixels", "keep them as uint8", several=True)
def normalised_in_advance():
    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            self.ready = self.normal(images)

        def __getitem__(self, index):
            return self.ready[index][None], self.labels[index]

    return [Pixels]


@wrong("pixels", "keep them as uint8", several=True)
def keeps_each_image():
    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            self.cache = {}

        def __getitem__(self, index):
            if index not in self.cache:
                self.cache[index] = self.normal(self.images[index])[None]
            return self.cache[index], self.labels[index]

    return [Pixels]


@wrong("pixels", "not of one image or one batch", several=True)
def normalises_each_image():
    class Pixels(Base):
        def normal(self, images):
            images = images.float()
            return (images - images.mean()) / images.std()

    return [Pixels]


@wrong("pixels", r"has the shape \(1, height, width\)", several=True)
def without_the_channel():
    class Pixels(Base):
        def __getitem__(self, index):
            return self.normal(self.images[index]), self.labels[index]

    return [Pixels]


@wrong("pixels", "images are float32", several=True)
def in_64_bits():
    class Pixels(Base):
        def normal(self, images):
            return (images.double() - self.mean) / self.deviation

    return [Pixels]


@wrong("pixels", "subtract the mean before you divide", several=True)
def forgets_the_mean():
    class Pixels(Base):
        def normal(self, images):
            return images.float() / self.deviation

    return [Pixels]


@wrong("pixels", "the label of an image has the same index", several=True)
def other_labels():
    class Pixels(Base):
        def __getitem__(self, index):
            return self.normal(self.images[index])[None], self.labels[index - 1]

    return [Pixels]


@wrong("pixels", "the length is the number of images", several=True)
def another_length():
    class Pixels(Base):
        def __len__(self):
            return len(self.labels) - 1

    return [Pixels]


@wrong("pixels", "do not change them in place", several=True)
def changes_what_it_was_given():
    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images.clone(), labels)
            images.zero_()

    return [Pixels]


@wrong("pixels", "as they were given, as uint8", several=True)
def keeps_them_in_16_bits():
    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            self.images = images.half()

    return [Pixels]


@wrong("pixels", "images of this data set|are those of all images", several=True)
def has_one_mean_for_all_data_sets():
    common = []

    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            common.append((self.mean, self.deviation))
            self.mean, self.deviation = common[0]

    return [Pixels]


@wrong("pixels", "images of this data set|are those of all images", several=True)
def measures_the_first_thousand():
    class Pixels(Base):
        def __init__(self, images, labels):
            super().__init__(images, labels)
            some = images[:1000].float()
            self.mean, self.deviation = some.mean(), some.std()

    return [Pixels]


def with_labels(kind):
    class Pixels(Base):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, kind(label.item())

    return [Pixels]


@wrong("pixels", "as they were given: int64", several=True)
def labels_as_floats():
    return with_labels(float)


@wrong("pixels", "as they were given: int64", several=True)
def labels_as_texts():
    return with_labels(str)


# ---- evaluate ----


@right("evaluate")
def with_lists_of_tensors(model, loader):
    model.eval()
    right_ones, losses = [], []
    with torch.inference_mode():
        for inputs, labels in loader:
            outputs = model(inputs)
            right_ones.append(outputs.argmax(1) == labels)
            losses.append(F.cross_entropy(outputs, labels, reduction="none"))
    model.train()
    return torch.cat(right_ones).double().mean().item(), torch.cat(losses).mean().item()


@right("evaluate")
@torch.no_grad()
def as_a_decorator(model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, labels in loader:
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        sums += torch.stack([(outputs.argmax(1) == labels).sum(), loss, loss * 0 + len(labels)])
    model.train()
    return [number.item() for number in sums[:2] / sums[2]]


@right("evaluate")
def fetches_in_parts_at_the_end(model, loader):
    model.eval()
    right_ones, losses, seen = [], [], torch.tensor(0)
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            right_ones.append((outputs.argmax(1) == labels).sum())
            losses.append(F.cross_entropy(outputs, labels, reduction="sum"))
            seen += len(labels)
    model.train()
    count = seen.cpu().item()
    return sum(one.cpu().item() for one in right_ones) / count, sum(one.cpu().numpy() for one in losses) / count


@wrong("evaluate", "for each batch: add up tensors")
def counts_with_a_mask(model, loader):
    model.eval()
    correct, total, seen = 0, 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            correct += len(labels[outputs.argmax(1) == labels])
            total += F.cross_entropy(outputs, labels, reduction="sum")
            seen += len(labels)
    model.train()
    return correct / seen, (total / seen).item()


def evaluation(eval_mode=True, train_after=True, grad=False, fetch=lambda x: x, loss_sum=True, divide=True):
    """An answer with one difference."""

    def evaluate(model, loader):
        if eval_mode:
            model.eval()
        correct, total, seen, batches = 0, 0, 0, 0
        with torch.set_grad_enabled(grad):
            for inputs, labels in loader:
                outputs = model(inputs)
                right_ones = (outputs.argmax(1) == labels).double()
                losses = F.cross_entropy(outputs, labels, reduction="none").detach()
                correct += fetch(right_ones.sum() if loss_sum else right_ones.mean())
                total += fetch(losses.sum() if loss_sum else losses.mean())
                seen, batches = seen + len(labels), batches + 1
        if train_after:
            model.train()
        count = (seen if loss_sum else batches) if divide else 1
        return float(correct / count), float(total / count)

    return [evaluate]


@wrong("evaluate", "call the model once per batch")
def per_sample(model, loader):
    model.eval()
    correct, total, seen = torch.zeros(()), torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for inputs, labels in loader:
            for one, label in zip(inputs, labels):
                output = model(one[None])
                correct += (output.argmax() == label).sum()
                total += F.cross_entropy(output[0], label)
                seen += 1
    model.train()
    return (correct / seen).item(), (total / seen).item()


@wrong("evaluate", "call the model once per batch")
def all_at_once(model, loader):
    model.eval()
    inputs, labels = (torch.cat(parts) for parts in zip(*loader))
    with torch.no_grad():
        outputs = model(inputs)
    model.train()
    accuracy = (outputs.argmax(1) == labels).double().mean()
    return accuracy.item(), F.cross_entropy(outputs, labels).item()


@wrong("evaluate", "for each sample: count with tensors")
def asks_for_each_sample(model, loader):
    model.eval()
    correct, total, seen = 0, 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            total += F.cross_entropy(outputs, labels, reduction="sum")
            for output, label in zip(outputs, labels):
                if output.argmax() == label:
                    correct += 1
            seen += len(labels)
    model.train()
    return correct / seen, (total / seen).item()


@wrong("evaluate", "for each batch: add up tensors", several=True)
def fetches_per_batch():
    return evaluation(fetch=lambda tensor: tensor.item())


@wrong("evaluate", "keeps all activations for a backward", several=True)
def with_autograd():
    return evaluation(grad=True)


@wrong("evaluate", r"model.eval\(\) first", several=True)
def in_training_mode():
    return evaluation(eval_mode=False)


@wrong("evaluate", r"model.train\(\) before you return", several=True)
def stays_in_evaluation_mode():
    return evaluation(train_after=False)


@wrong("evaluate", "mean of the batches' means", several=True)
def mean_of_means():
    return evaluation(loss_sum=False)


@wrong("evaluate", "the sum over all samples: divide", several=True)
def sums():
    return evaluation(divide=False)


@wrong("evaluate", "return the accuracy and the mean loss")
def only_the_accuracy(model, loader):
    [evaluate] = evaluation()
    return evaluate(model, loader)[0]


@wrong("evaluate", r"reduction='sum'\), divided by their number")
def weighs_batches_wrongly(model, loader):
    [evaluate] = evaluation()
    accuracy, loss = evaluate(model, loader)
    return accuracy, 2 * loss


@wrong("evaluate", "whose largest output is at their label")
def smallest_output(model, loader):
    [evaluate] = evaluation()
    accuracy, loss = evaluate(model, loader)
    return 1 - accuracy - 1e-3, loss


# ---- compare ----


@right("compare")
def counts_and_adds_up(before, after, comparisons):
    faster = sum(new < old for old, new in zip(before, after))
    slower = sum(new > old for old, new in zip(before, after))
    n, rare = faster + slower, min(faster, slower)
    chance = 2 * sum(math.comb(n, k) for k in range(rare + 1)) / 2**n
    rounds = math.ceil(math.log2(2 * comparisons / 0.05))
    verdict = "faster" if faster > slower else "slower"
    return (verdict if chance <= 0.05 / comparisons else "not shown"), rounds


@right("compare")
def by_scipy(before, after, comparisons):
    from scipy.stats import binomtest

    ratios = [new / old for old, new in zip(before, after) if new != old]
    least = next(n for n in itertools.count(1) if binomtest(0, n).pvalue <= 0.05 / comparisons)
    faster = sum(ratio < 1 for ratio in ratios)
    if not ratios or binomtest(faster, len(ratios)).pvalue > 0.05 / comparisons:
        return ["not shown", least]
    return ["faster" if 2 * faster > len(ratios) else "slower", least]


@right("compare")
def with_numpy_and_sidak(before, after, comparisons):
    """Šidák's error, which is a little larger than an equal part."""
    import numpy as np

    error = 1 - (1 - 0.05) ** (1 / comparisons)
    signs = np.sign(np.array(before) - np.array(after))
    signs = signs[signs != 0]
    n, rare = len(signs), min((signs > 0).sum(), (signs < 0).sum())
    ways = np.cumsum([math.comb(n, k) for k in range(n + 1)])
    rounds = np.argmax(2.0 ** (1 - np.arange(100)) <= error)
    if 2 * ways[rare] > error * 2**n:
        return "not shown", rounds
    return ("faster", rounds) if signs.sum() > 0 else ("slower", rounds)


@right("compare")
def by_the_lessons_interval(before, after, comparisons):
    """1 is outside of the interval from one order statistic to the other."""
    error = 0.05 / comparisons
    ratios = sorted(old / new for old, new in zip(before, after) if old != new)
    n, chance, outside = len(ratios), 0.0, -1
    while outside + 1 < n and chance + 2 * math.comb(n, outside + 1) / 2**n <= error:
        outside += 1
        chance += 2 * math.comb(n, outside) / 2**n
    rounds = 1
    while 2 ** (1 - rounds) > error:
        rounds += 1
    if outside >= 0 and ratios[outside] > 1:
        return "faster", rounds
    if outside >= 0 and ratios[-1 - outside] < 1:
        return "slower", rounds
    return "not shown", rounds


@right("compare")
def in_fractions(before, after, comparisons):
    from fractions import Fraction

    signs = [1 if new < old else -1 for old, new in zip(before, after) if new != old]
    error, total = Fraction(1, 20 * comparisons), sum(signs)
    extreme = sum(
        math.comb(len(signs), heads) for heads in range(len(signs) + 1) if abs(2 * heads - len(signs)) >= abs(total)
    )
    rounds = min(n for n in range(1, 60) if Fraction(2, 2**n) <= error)
    shown = Fraction(extreme, 2 ** len(signs)) <= error
    return ("not shown" if not shown else "faster" if total > 0 else "slower"), rounds


def compare(before, after, comparisons, tails=2, parts=True, swap=False, pmf=False, ties=0):
    """The right judge, with a mistake. ties: what a round without a difference adds to both sides."""
    faster = sum(a < b for b, a in zip(before, after)) + ties * sum(a == b for b, a in zip(before, after))
    slower = len(before) - sum(a <= b for b, a in zip(before, after))
    n, k = faster + slower, min(faster, slower)
    error = 0.05 / (comparisons if parts else 1)
    chance = sum(math.comb(n, i) for i in range(k if pmf else 0, k + 1)) * tails / 2**n
    rounds = next(m for m in itertools.count(1) if tails / 2**m <= error)
    if chance > error:
        return "not shown", rounds
    return ("faster" if (faster > slower) != swap else "slower"), rounds


def a_judge(**mistake):
    def judge(before, after, comparisons):
        return compare(before, after, comparisons, **mistake)

    judge.__name__ = "compare"
    return [judge]


@wrong("compare", "chance can put the rounds on either side: count both", several=True)
def one_tail():
    return a_judge(tails=1)


@wrong("compare", "each gets an equal part", several=True)
def five_percent_for_each():
    return a_judge(parts=False)


@wrong("compare", "faster where it takes less time", several=True)
def the_other_way_round():
    return a_judge(swap=True)


@wrong("compare", "all that are as extreme", several=True)
def exactly_so_many():
    return a_judge(pmf=True)


@wrong("compare", "not one in which `after` is faster", several=True)
def a_tie_is_faster():
    return a_judge(ties=1)


@wrong("compare", "one slow round can turn the mean")
def by_means(before, after, comparisons):
    least = math.ceil(math.log2(2 * comparisons / 0.05))
    if sum(before) == sum(after):
        return "not shown", least
    return ("faster" if sum(after) < sum(before) else "slower"), least


@wrong("compare", "a median always has a side")
def by_the_median(before, after, comparisons):
    import statistics

    ratio = statistics.median(new / old for old, new in zip(before, after))
    verdict = "faster" if ratio < 1 else "slower" if ratio > 1 else "not shown"
    return verdict, math.ceil(math.log2(2 * comparisons / 0.05))


@wrong("compare", "chance alone puts as many|allowed")
def students_test(before, after, comparisons):
    from scipy.stats import ttest_rel

    least = math.ceil(math.log2(2 * comparisons / 0.05))
    test = ttest_rel(before, after)
    if not test.pvalue <= 0.05 / comparisons:
        return "not shown", least
    return ("faster" if test.statistic > 0 else "slower"), least


@wrong("compare", "chance alone puts as many|allowed|the middle half")
def by_the_lessons_function(before, after, comparisons):
    """Neither several comparisons nor rounds without a difference."""
    from ddp_course.lesson16 import times_as_fast

    least = math.ceil(math.log2(2 * comparisons / 0.05))
    try:
        low, _, high = times_as_fast({"old": before, "new": after}, "new", "old")
    except ValueError:
        return "not shown", least
    return ("faster" if low > 1 else "slower" if high < 1 else "not shown"), least


@wrong("compare", "the first number whose chance")
def a_round_too_many(before, after, comparisons):
    verdict, rounds = compare(before, after, comparisons)
    return verdict, rounds + 1


@wrong("compare", "for the fewest rounds, chance can put all of them on either side")
def fewest_of_one_tail(before, after, comparisons):
    verdict, _ = compare(before, after, comparisons)
    return verdict, math.ceil(math.log2(comparisons / 0.05))


@wrong("compare", "fewest rounds are for one comparison of the table")
def always_six(before, after, comparisons):
    return compare(before, after, comparisons)[0], 6


@wrong("compare", "return two values")
def only_a_verdict(before, after, comparisons):
    return compare(before, after, comparisons)[0]


@wrong("compare", "return two values")
def in_other_words(before, after, comparisons):
    verdict, rounds = compare(before, after, comparisons)
    return verdict.replace("not shown", "no difference"), rounds


@wrong("compare", "without a return statement")
def returns_nothing(before, after, comparisons):
    compare(before, after, comparisons)


@wrong("compare", "return two values")
def half_a_round(before, after, comparisons):
    return compare(before, after, comparisons)[0], math.log2(2 * comparisons / 0.05)


@wrong("compare", "the middle half leaves out 1 too often|allowed")
def by_the_quartiles(before, after, comparisons):
    import statistics

    low, _, high = statistics.quantiles([new / old for old, new in zip(before, after)], n=4)
    verdict = "faster" if high < 1 else "slower" if low > 1 else "not shown"
    return verdict, math.ceil(math.log2(2 * comparisons / 0.05))


@wrong("compare", "with more comparisons, each must be surer")
def multiplies_the_error(before, after, comparisons):
    return compare(before, after, 1 / comparisons)


@wrong("compare", "chance alone puts as many")
def by_the_normal_curve(before, after, comparisons):
    """Without the continuity correction."""
    from statistics import NormalDist

    faster = sum(a < b for b, a in zip(before, after))
    slower = sum(a > b for b, a in zip(before, after))
    z = abs(faster - slower) / max(1, faster + slower) ** 0.5
    least = math.ceil(math.log2(2 * comparisons / 0.05))
    if 2 * (1 - NormalDist().cdf(z)) > 0.05 / comparisons:
        return "not shown", least
    return ("faster" if faster > slower else "slower"), least


# ---- choose ----


def exposed_with(cap, gradients, backward, ranks, alpha, beta):
    profile = StepProfile(0.0, backward, gradients)
    return exposed_seconds(profile, cap, ranks, alpha, beta)


def smallest(forward, backward, exposed, efficiency):
    count = efficiency * exposed / ((1 - efficiency) * (forward + backward))
    return max(1, math.ceil(count - 1e-9))


def every_sum(gradients):
    sizes = [size for _, size in gradients]
    ends = range(1, len(sizes) + 1)
    return [sum(sizes[begin:end]) for end in ends for begin in range(end)]


def choice(caps=every_sum, count=smallest):
    """An answer that tries other sizes, or counts the micro-batches in another way."""

    def choose(gradients, forward, backward, ranks, alpha, beta, efficiency):
        network = backward, ranks, alpha, beta
        cap = min(caps(gradients), key=lambda cap: exposed_with(cap, gradients, *network))
        exposed = exposed_with(cap, gradients, *network)
        return cap, count(forward, backward, exposed, efficiency)

    return [choose]


@right("choose", several=True)
def by_formula():
    return choice()


@right("choose")
def with_a_fine_grid(gradients, forward, backward, ranks, alpha, beta, efficiency):
    """Tries 4,000 sizes, by an own simulation."""
    whole = sum(size for _, size in gradients)
    best = None
    for part in range(1, 4001):
        cap, free = whole * part / 4000, 0.0
        for ready, size in buckets(gradients, cap):
            free = max(free, ready) + 2 * (ranks - 1) * (alpha + beta * size / ranks)
        exposed = max(0.0, free - backward)
        if best is None or exposed < best[0]:
            best = exposed, cap
    count = 1
    while count * (forward + backward) / (count * (forward + backward) + best[0]) < efficiency - 1e-12:
        count += 1
    return math.ceil(best[1]), count


@wrong(
    "choose",
    "try all sums of neighbouring gradients|efficient enough|exposed once"
    "|computes forward and backward",  # its number is sometimes that mistake's, too
)
def takes_the_last_gradient_for_the_end(gradients, forward, backward, ranks, alpha, beta, efficiency):
    [choose] = choice()
    best, _ = choose(gradients, forward, gradients[-1][0], ranks, alpha, beta, efficiency)
    exposed = exposed_with(best, gradients, gradients[-1][0], ranks, alpha, beta)
    return best, smallest(forward, backward, exposed, efficiency)


def the_whole(gradients):
    return [sum(size for _, size in gradients)]


@wrong("choose", "one bucket: it is sent when backward is over", several=True)
def one_bucket():
    return choice(caps=the_whole)


@wrong("choose", "each gradient is sent alone", several=True)
def no_buckets():
    return choice(caps=lambda gradients: [1])


@wrong("choose", "a size that is often used|nothing is hidden", several=True)
def a_megabyte():
    return choice(caps=lambda gradients: [2**20])


@wrong("choose", "one bucket: it is sent|a size that is often used", several=True)
def torchs_default():
    return choice(caps=lambda gradients: [25 * 2**20])


@wrong("choose", "exposed once per update", several=True)
def a_single_micro_batch():
    return choice(count=lambda *_: 1)


@wrong("choose", "more of them make updates rarer|computes forward and backward", several=True)
def one_too_many():
    return choice(count=lambda *case: smallest(*case) + 1)


@wrong("choose", "exposed once per update", several=True)
def rounded_down():
    return choice(count=lambda *case: max(1, smallest(*case) - 1))


@wrong("choose", "a micro-batch computes forward and backward", several=True)
def without_forward():
    return choice(count=lambda f, b, exposed, e: smallest(0.0, b, exposed, e))


def quotient(forward, backward, exposed, efficiency):
    return efficiency * exposed / ((1 - efficiency) * (forward + backward))


@wrong("choose", "2 micro-batches are efficient enough", several=True)
def adds_one_instead_of_rounding_up():
    return choice(count=lambda *case: math.floor(quotient(*case)) + 1)


@wrong("choose", "exposed once per update", several=True)
def rounds_to_the_nearest():
    return choice(count=lambda *case: max(1, round(quotient(*case))))


@wrong("choose", "exposed once per update", several=True)
def one_micro_batch_in_the_laboratory():
    """Right in all cases but the one that is measured."""
    few = lambda f, b, *rest: 1 if f + b > 0.1 else smallest(f, b, *rest)
    return choice(count=few)


@wrong("choose", "one bucket: it is sent when backward is over", several=True)
def one_bucket_in_the_laboratory():
    """Right in all cases but the one that is measured."""

    def choose(gradients, forward, backward, **network):
        measured = forward + backward > 0.1
        [choose] = choice(caps=the_whole) if measured else choice()
        return choose(gradients, forward, backward, **network)

    return [choose]


@wrong("choose", "return two numbers", several=True)
def half_a_micro_batch():
    return choice(count=lambda *case: smallest(*case) + 0.5)


@wrong("choose", "return two numbers")
def only_the_size(gradients, forward, backward, ranks, alpha, beta, efficiency):
    return sum(size for _, size in gradients)


@wrong("choose", "a bucket needs a size", several=True)
def no_size():
    return choice(caps=lambda gradients: [0.0])


# ---- analyse ----


def is_kernel(event):
    return event["ph"] == "X" and event["cat"] == "kernel"


def end_of(event):
    return event["ts"] + event["dur"]


def parts_of(events):
    [step] = [e for e in events if e["ph"] == "X" and e["name"] == "the step"]
    kernels = [e for e in events if is_kernel(e)]
    transfers = [e for e in kernels if e["name"].startswith("nccl")]
    return step, transfers, [e for e in kernels if e not in transfers]


def latest(traces):
    found = {}
    for events in traces:
        for e in parts_of(events)[1]:
            seq = e["args"]["seq"]
            found[seq] = max(e["ts"], found.get(seq, e["ts"]))
    return found


@right("analyse")
def by_edges(traces):
    """Between two edges, nothing changes."""
    complete, found = latest(traces), []
    for events in traces:
        step, transfers, computing = parts_of(events)
        edges = {step["ts"], end_of(step)}
        for e in [*transfers, *computing]:
            edges |= {e["ts"], end_of(e), complete.get(e["args"].get("seq"), step["ts"])}
        edges = sorted(t for t in edges if step["ts"] <= t <= end_of(step))
        spent = dict.fromkeys(("computing", "sending", "waiting", "idle"), 0)
        for begin, end in zip(edges, edges[1:]):
            at = lambda e, t=begin: e["ts"] <= t < end_of(e)
            running = [e for e in transfers if at(e)]
            if any(map(at, computing)):
                state = "computing"
            elif any(complete[e["args"]["seq"]] <= begin for e in running):
                state = "sending"
            else:
                state = "waiting" if running else "idle"
            spent[state] += end - begin
        found.append(spent)
    return found


def analysis(
    cut=lambda e, complete: max(complete[e["args"]["seq"]], e["ts"]),
    clip=True, union=True, kernels_only=True, key=lambda e, place: e["args"]["seq"], hidden=True,
):  # fmt: skip
    """An answer with one difference, by microseconds."""

    def analyse(traces):
        complete = {}
        for events in traces:
            transfers = [e for e in events if is_kernel(e) and e["name"].startswith("nccl")]
            for place, e in enumerate(transfers):
                e["args"]["key"] = key(e, place)
                e["args"]["seq"] = e["args"]["key"]
                complete[e["args"]["key"]] = max(e["ts"], complete.get(e["args"]["key"], e["ts"]))
        return [of_rank(events, complete) for events in traces]

    def of_rank(events, complete):
        step, transfers, computing = parts_of(events)
        if not kernels_only:
            others = [e for e in events if e["ph"] == "X" and e["cat"] == "cpu_op"]
            computing = [*computing, *others]
        ends = (step["ts"], end_of(step)) if clip else (-1000, 1000)
        span = lambda e: (e["ts"], end_of(e))
        busy = [span(e) for e in computing]
        seen = busy if hidden else []
        both = time_use([span(e) for e in transfers], seen, ends)
        moving = [(cut(e, complete), end_of(e)) for e in transfers]
        sending = time_use(moving, seen, ends)["exposed"]
        computes = time_use([], busy, ends)["computing"]
        if not union:
            computes = sum(min(b, ends[1]) - max(a, ends[0]) for a, b in busy if b > ends[0] and a < ends[1])
        waiting = both["exposed"] - sending
        idle = step["dur"] - computes - sending - waiting
        return {"computing": computes, "sending": sending, "waiting": waiting, "idle": idle}

    return [analyse]


@right("analyse", several=True)
def with_the_lessons_analyser():
    return analysis()


@wrong("analyse", "that part is waiting", several=True)
def exposed_only():
    return analysis(cut=lambda e, complete: e["ts"])


@wrong("analyse", "as soon as the last rank has begun", several=True)
def all_waits():
    return analysis(cut=lambda e, complete: end_of(e))


@wrong("analyse", "take the union of the spans", several=True)
def adds_lengths():
    return analysis(union=False)


@wrong("analyse", "only events with cat 'kernel'", several=True)
def operators_too():
    return analysis(kernels_only=False)


@wrong("analyse", "cut what is outside of the step", several=True)
def without_the_step():
    return analysis(clip=False)


@wrong("analyse", "by its seq, not by its place", several=True)
def by_place():
    return analysis(key=lambda e, place: place)


@wrong("analyse", "it counts as computing only", several=True)
def counts_hidden_communication():
    return analysis(hidden=False)


@wrong("analyse", "one dict per rank")
def only_rank_zero(traces):
    [analyse] = analysis()
    return analyse(traces)[:1]


@wrong("analyse", "these four keys|one dict per rank")
def the_lessons_keys(traces):
    return [{"computing": 1.0, "exposed": 2.0, "idle": 3.0} for _ in traces]


@wrong("analyse", "even if another one waits")
def waits_if_any_waits(traces):
    """Two collectives at once: waiting wins."""
    complete, found = latest(traces), []
    for events in traces:
        step, transfers, computing = parts_of(events)
        counts = dict.fromkeys(("computing", "sending", "waiting", "idle"), 0)
        edges = {step["ts"], end_of(step)}
        for event in [*transfers, *computing]:
            edges |= {event["ts"], end_of(event)}
        edges |= {complete[event["args"]["seq"]] for event in transfers}
        within = [edge for edge in edges if step["ts"] <= edge <= end_of(step)]
        for begin, end in itertools.pairwise(sorted(within)):
            now, took = (begin + end) / 2, end - begin
            running = [e for e in transfers if e["ts"] <= now < end_of(e)]
            if any(e["ts"] <= now < end_of(e) for e in computing):
                counts["computing"] += took
            elif any(complete[e["args"]["seq"]] > now for e in running):
                counts["waiting"] += took
            else:
                counts["sending" if running else "idle"] += took
        found.append(counts)
    return found


@wrong("update", "the mean gradient over all micro-batches")
def averages_parameters(model, micro_batches, optimizer):
    """each rank steps with its own gradient; then the parameters are averaged: right for SGD, wrong for AdamW"""
    optimizer.zero_grad()
    losses = []
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y)
        (loss / len(micro_batches)).backward()
        losses.append(loss.detach())
    optimizer.step()
    ps = [p.data for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.flatten() for p in ps]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, piece in zip(ps, flat.split([p.numel() for p in ps])):
        p.copy_(piece.view_as(p))
    losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(losses)
    return losses.tolist()


@wrong("evaluate", "here that happens for each batch")
def tolist_per_batch(model, loader):
    """.tolist() fetches two numbers for each batch"""
    model.eval()
    correct, total, seen = 0, 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            correct += (out.argmax(1) == y).sum().tolist()
            total += F.cross_entropy(out, y, reduction="sum").tolist()
            seen += len(y)
    model.train()
    return correct / seen, total / seen


def evaluated(model, loader):
    """What the answer returns; it leaves the model's mode and autograd to its caller."""
    correct, total, seen = 0, 0, 0
    for images, labels in loader:
        outputs = model(images)
        correct += (outputs.argmax(1) == labels).sum()
        total += F.cross_entropy(outputs, labels, reduction="sum")
        seen += len(labels)
    model.train()
    return correct.item() / seen, total.item() / seen


@wrong("evaluate", "needs gradients")
def grad_stays_off(model, loader):
    torch.set_grad_enabled(False)
    return evaluated(model.eval(), loader)


@wrong("evaluate", "needs gradients")
def freezes_the_model(model, loader):
    with torch.no_grad():
        return evaluated(model.eval().requires_grad_(False), loader)


@wrong("update", "a frozen parameter has changed")
def steps_the_frozen(model, micro_batches, optimizer):
    """frozen parameters get a gradient of zeros: momentum or weight decay would move them"""
    optimizer.zero_grad()
    losses = []
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y)
        (loss / len(micro_batches) / dist.get_world_size()).backward()
        losses.append(loss.detach())
    ps = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in ps])
    dist.all_reduce(flat)
    for p, piece in zip(ps, flat.split([p.numel() for p in ps])):
        p.grad = piece.view_as(p)
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(losses)
    return losses.tolist()


@right("update")
def reduce_scatter_and_gather(model, micro_batches, optimizer):
    """The two halves of an all-reduce."""
    n = dist.get_world_size()
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels)
        (loss / len(micro_batches)).backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in trained(model)]
    flat = torch.cat([torch.stack(losses), *(g.flatten() for g in gradients)]) / n
    flat = F.pad(flat, (0, -len(flat) % n))
    own = torch.empty(len(flat) // n, dtype=flat.dtype)
    dist.reduce_scatter_tensor(own, flat)
    dist.all_gather_into_tensor(flat, own)
    sizes = [len(losses), *(g.numel() for g in gradients)]
    losses, *means = flat[: sum(sizes)].split(sizes)
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean.view_as(gradient))
    optimizer.step()
    return losses.tolist()


@wrong("update", "DDP broadcasts them each time it wraps a model")
def wraps_in_ddp(model, micro_batches, optimizer):
    optimizer.zero_grad()
    wrapped, losses = DistributedDataParallel(model), []
    for left, (inputs, labels) in zip(range(len(micro_batches) - 1, -1, -1), micro_batches):
        wrapped.require_backward_grad_sync = not left
        loss = F.cross_entropy(wrapped(inputs), labels) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach() * len(micro_batches))
    optimizer.step()
    [losses] = average([torch.stack(losses)])
    return losses.tolist()


@wrong("update", "joined micro-batches need as much memory as one large batch")
def joins_micro_batches(model, micro_batches, optimizer):
    optimizer.zero_grad()
    inputs, labels = map(torch.cat, zip(*micro_batches))
    each = F.cross_entropy(model(inputs), labels, reduction="none")
    losses = each.view(len(micro_batches), -1).mean(1)
    losses.mean().backward()
    gradients = [parameter.grad for parameter in trained(model)]
    *means, losses = average([*gradients, losses.detach()])
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean)
    optimizer.step()
    return losses.tolist()


@wrong("pixels", "as float32 the images take four times the memory")
class KeepsThemInNumpy(Base):
    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.ready = self.normal(images).numpy()

    def __getitem__(self, index):
        return torch.from_numpy(self.ready[index])[None], self.labels[index]


@wrong("pixels", "as float32 the images take four times the memory")
class KeepsThemInACache(Base):
    @functools.cache  # noqa: B019, that is what is wrong with it
    def __getitem__(self, index):
        return super().__getitem__(index)


@wrong("pixels", "still goes through all images, with numpy")
class AsksNumpyEachTime(Base):
    def __getitem__(self, index):
        numbers = self.images.numpy()
        self.mean = float(numbers.mean())
        self.deviation = float(numbers.std(ddof=1))
        return super().__getitem__(index)


@wrong("evaluate", "that is a loop over samples")
def per_sample_in_python(model, loader):
    model.eval()
    correct, total, seen = torch.zeros(()), torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for inputs, labels in loader:
            for output, label in zip(model(inputs), labels):
                correct += output.argmax() == label
                total += F.cross_entropy(output, label)
                seen += 1
    model.train()
    return (correct / seen).item(), (total / seen).item()


def analysed(traces, counts, communicates):
    """As the exercise asks, for the events that count, and those that communicate."""
    of_ranks, complete, found = [], {}, []
    for events in traces:
        [step] = [event for event in events if event.get("name") == "the step"]
        kernels = [event for event in events if counts(event)]
        transfers = [kernel for kernel in kernels if communicates(kernel)]
        of_ranks.append((step, transfers, [k for k in kernels if k not in transfers]))
        for kernel in transfers:
            number = kernel["args"].get("seq")
            complete[number] = max(kernel["ts"], complete.get(number, kernel["ts"]))
    for step, transfers, computing in of_ranks:
        span = lambda event: (event["ts"], event["ts"] + event["dur"])
        busy = [span(kernel) for kernel in computing]
        sends = [(complete[k["args"].get("seq")], span(k)[1]) for k in transfers]
        both = time_use([span(kernel) for kernel in transfers], busy, span(step))
        sending = time_use(sends, busy, span(step))["exposed"]
        waiting = both["exposed"] - sending
        counts_ = {"computing": both["computing"], "idle": both["idle"]}
        found.append(counts_ | {"sending": sending, "waiting": waiting})
    return found


def is_nccl(event):
    return event["name"].startswith("nccl")


@right("analyse")
def by_two_unions(traces):
    return analysed(traces, is_kernel, is_nccl)


@wrong("analyse", "a kernel whose name begins with nccl communicates")
def nccl_anywhere(traces):
    return analysed(traces, is_kernel, lambda event: "nccl" in event["name"])


@wrong("analyse", "only events with ph 'X' count")
def ignores_ph(traces):
    return analysed(traces, lambda event: event.get("cat") == "kernel", is_nccl)


@wrong("analyse", "and do not count microseconds")
def counts_whole_microseconds(traces):
    def whole(event):
        begin, end = int(event["ts"]), int(end_of(event))
        return event | {"ts": begin, "dur": end - begin}

    only = [[whole(e) for e in events if e["ph"] == "X"] for events in traces]
    return analysed(only, is_kernel, is_nccl)


@wrong("analyse", "a kernel whose name begins with nccl communicates")
def by_stream(traces):
    """Streams from 20 on communicate."""
    return analysed(traces, is_kernel, lambda event: event["tid"] >= 20)


@wrong("pixels", "as float32 the images take four times the memory")
class KeepsThemInObjects(Base):
    class Sample(NamedTuple):
        image: torch.Tensor
        label: torch.Tensor

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.samples = [self.Sample(self.normal(image)[None], label) for image, label in zip(images, labels)]

    def __getitem__(self, index):
        return tuple(self.samples[index])


@wrong("pixels", "still goes through all images, with numpy or in a single operator")
class TakesTheMeanEachTime(Base):
    def __getitem__(self, index):
        self.mean = self.images.mean(dtype=torch.float32)
        return super().__getitem__(index)


@right("update")
def gathers_all_gradients(model, micro_batches, optimizer):
    """One all-gather, and each rank takes the mean itself."""
    optimizer.zero_grad()
    losses = []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach() * len(micro_batches))
    gradients = [parameter.grad for parameter in trained(model)]
    flat = torch.cat([*(g.flatten() for g in gradients), torch.stack(losses)])
    of_ranks = torch.empty(dist.get_world_size() * len(flat), dtype=flat.dtype)
    dist.all_gather_into_tensor(of_ranks, flat)
    sizes = [*(g.numel() for g in gradients), len(losses)]
    *means, losses = of_ranks.view(-1, len(flat)).mean(0).split(sizes)
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean.view_as(gradient))
    optimizer.step()
    return losses.tolist()


@wrong("update", "a barrier is a collective, too")
def waits_at_barriers(model, micro_batches, optimizer):
    dist.barrier()
    [update] = update_with()
    return update(model, micro_batches, optimizer)


@wrong("update", "divide by the number of ranks, whatever it is", several=True)
def divides_by_two():
    half = lambda mean: mean * dist.get_world_size() / 2
    return update_with(travels=lambda tensors: list(map(half, average(tensors))))


@wrong("evaluate", "here that happens for each batch")
def counts_with_nonzero(model, loader):
    """len(x.nonzero()) has to wait for the number of rows."""
    model.eval()
    correct, total, seen = 0, 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            correct += len((outputs.argmax(1) == labels).nonzero())
            total += F.cross_entropy(outputs, labels, reduction="sum")
            seen += len(labels)
    model.train()
    return correct / seen, (total / seen).item()


@wrong("evaluate", "the last batch is missing")
def leaves_the_last_batch_out(model, loader):
    full = [batch for batch in loader if len(batch[0]) == loader.batch_size]
    model.eval()
    with torch.no_grad():
        return evaluated(model, full)


@wrong("evaluate", "times their size, but the last batch is smaller")
def assumes_full_batches(model, loader):
    model.eval()
    with torch.no_grad():
        accuracy, loss = evaluated(model, loader)
    share = len(loader.dataset) / (len(loader) * loader.batch_size)
    return accuracy * share, loss * share


@wrong("update", "each gradient travels alone")
def with_functional_collectives(model, micro_batches, optimizer):
    optimizer.zero_grad()
    losses, group = [], dist.group.WORLD
    mean = lambda tensor: wait_tensor(all_reduce(tensor, "avg", group))
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, trained(model))
        for parameter, gradient in zip(trained(model), gradients):
            share = mean(gradient) / len(micro_batches)
            parameter.grad = share if parameter.grad is None else parameter.grad + share
        losses.append(mean(loss.detach()))
    optimizer.step()
    return torch.stack(losses).tolist()


@wrong("evaluate", "timed in turn with the slow program")
def waits_for_the_progress_bar(model, loader):
    def slowly():
        for batch in loader:
            time.sleep(0.05)
            yield batch

    model.eval()
    with torch.no_grad():
        return evaluated(model, slowly())


@wrong("analyse", "nan")
def finds_nan(traces):
    kinds = ("computing", "sending", "waiting", "idle")
    return [dict.fromkeys(kinds, float("nan")) for _ in traces]


@wrong("evaluate", "got +nan")
def evaluates_to_nan(model, batches):
    model.eval()
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
    model.train()
    return float("nan"), float("nan")


@wrong("pixels", "the sum of many images needs more than 32 bits")
class SumsIn32Bits(Base):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        mean = images.sum(dtype=torch.int32).item() / images.numel()
        squares = sum((image.double() - mean).pow(2).sum().item() for image in images)
        self.mean, self.deviation = mean, math.sqrt(squares / (images.numel() - 1))


@right("pixels")
class CountsEachValue(Base):
    """Of 256 values, it is enough to know how often each occurs."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        values, counts = torch.arange(256.0, dtype=torch.float64), torch.bincount(images.flatten(), minlength=256)
        self.mean = (values * counts).sum().item() / images.numel()
        squares = ((values - self.mean) ** 2 * counts).sum().item()
        self.deviation = math.sqrt(squares / (images.numel() - 1))


@right("pixels")
class OneImageAfterTheOther(Base):
    """Sums in Python: no copy of all images, not even for a moment."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        total = sum(image.sum().item() for image in images)
        self.mean = total / images.numel()
        squares = sum((image.double() - self.mean).square().sum().item() for image in images)
        self.deviation = (squares / (images.numel() - 1)) ** 0.5


@wrong("pixels", "divide by their standard deviation")
class WeighsImagesAsBatches(Base):
    """The deviation is the mean of the images' deviations."""

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.deviation = images.float().flatten(1).std(1).mean()


@wrong("pixels", "subtract the mean over all images, and divide")
class DividesByTheVariance(Base):
    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.deviation = images.float().var()


@wrong("pixels", "subtract the mean over all images, and divide")
class PerPlace(Base):
    """A mean and a deviation for each place, over the images."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        self.mean, self.deviation = images.float().mean(0), images.float().std(0)


@wrong("pixels", "return the labels as they were given|as they were given: int64")
class OneHotLabels(Base):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, F.one_hot(label, 10).float()


@wrong("pixels", "an image has the shape")
class AsNumpyArrays(Base):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.numpy(), label


@wrong("pixels", "return an image and its label")
class OnlyImages(Base):
    def __getitem__(self, index):
        return super().__getitem__(index)[:1]


def gathers_losses_as_objects(losses):
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [loss.item() for loss in losses])
    return [sum(row) / len(row) for row in zip(*of_ranks)]


@wrong("update", "a collective of objects, such as all_gather_object, calls two", several=True)
def losses_as_objects():
    return update_with(fetch=gathers_losses_as_objects)


def looks_for_nan(loss):
    assert not torch.isnan(loss)
    return loss


@wrong("update", "and `if`, `assert` or float", several=True)
def asserts_that_no_loss_is_nan():
    return update_with(each=looks_for_nan)


@wrong("update", "the mean loss of each micro-batch, as floats", several=True)
def losses_in_a_tensor():
    return update_with(fetch=lambda losses: average([torch.stack(losses)])[0])


@wrong("update", "each loss is the mean over the ranks")
def losses_after_the_update(model, micro_batches, optimizer):
    [update] = update_with()
    update(model, micro_batches, optimizer)
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches]
    return average([torch.stack(losses)])[0].tolist()


@wrong("update", "each further call computes something again")
def measures_losses_first(model, micro_batches, optimizer):
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches]
    [update] = update_with(fetch=lambda _: average([torch.stack(losses)])[0].tolist())
    return update(model, micro_batches, optimizer)


@wrong("update", "DDP broadcasts them each time it wraps a model")
def wraps_in_ddp_once(model, micro_batches, optimizer, wrapped={}):  # noqa: B006, the same in each update
    if id(model) not in wrapped:
        wrapped[id(model)] = DistributedDataParallel(model)
    optimizer.zero_grad()
    ours, losses = wrapped[id(model)], []
    for left, (inputs, labels) in zip(range(len(micro_batches) - 1, -1, -1), micro_batches):
        ours.require_backward_grad_sync = not left
        losses.append(F.cross_entropy(ours(inputs), labels))
        (losses[-1] / len(micro_batches)).backward()
    optimizer.step()
    return average([torch.stack(losses).detach()])[0].tolist()


@wrong("update", "or of frozen parameters")
def sends_zeros_for_the_frozen(model, micro_batches, optimizer):
    def with_zeros(tensors):
        frozen = [torch.zeros_like(p) for p in model.parameters() if not p.requires_grad]
        return average([*tensors, *frozen])[: len(tensors)]

    [update] = update_with(travels=with_zeros)
    return update(model, micro_batches, optimizer)


@wrong("update", "must take the mean gradient over all")
def of_the_last_micro_batch(model, micro_batches, optimizer):
    losses = []
    for inputs, labels in micro_batches:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(inputs), labels))
        losses[-1].backward()
    for parameter, mean in zip(trained(model), average([parameter.grad for parameter in trained(model)])):
        parameter.grad = mean
    optimizer.step()
    return average([torch.stack(losses).detach()])[0].tolist()


@right("update")
def with_a_functional_call(model, micro_batches, optimizer):
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(values, inputs, labels):
        return F.cross_entropy(torch.func.functional_call(model, values, (inputs,)), labels)

    both = torch.func.grad_and_value(loss_of)
    gradients, losses = zip(*(both(parameters, *batch) for batch in micro_batches))
    means = [torch.stack([each[name] for each in gradients]).mean(0) for name in parameters]
    for parameter, mean in zip(parameters.values(), average(means)):
        parameter.grad = mean.detach()
    optimizer.step()
    return average([torch.stack(losses).detach()])[0].tolist()


@right("update")
def with_vectors(model, micro_batches, optimizer):
    """The gradients are views of one vector from the beginning."""
    optimizer.zero_grad()
    parameters, n = trained(model), dist.get_world_size()
    vector = torch.nn.utils.parameters_to_vector(parameters).detach().mul(0)
    for parameter, piece in zip(parameters, vector.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)
    losses = vector.new_zeros(len(micro_batches))
    for place, (inputs, labels) in enumerate(micro_batches):
        loss = F.cross_entropy(model(inputs), labels)
        (loss / (n * len(micro_batches))).backward()
        losses[place] = loss.detach() / n
    dist.all_reduce(vector)
    dist.all_reduce(losses)
    optimizer.step()
    return [float(loss) for loss in losses]


@wrong("evaluate", "return the accuracy and the mean loss, as floats", several=True)
def returns_tensors():
    def evaluate(model, loader):
        model.eval()
        with torch.no_grad():
            pairs = [(model(inputs), labels) for inputs, labels in loader]
        model.train()
        outputs, labels = map(torch.cat, zip(*pairs))
        return (outputs.argmax(1) == labels).double().mean(), F.cross_entropy(outputs, labels)

    return [evaluate]


@wrong("evaluate", r"model.train\(\) before you return")
def trains_the_first_layer_only(model, loader):
    model.eval()
    with torch.no_grad():
        numbers = evaluated(model, loader)
    model.eval()[0].train()
    return numbers


@wrong("evaluate", r"model.eval\(\) first")
def switches_dropout_off_only(model, loader):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    with torch.no_grad():
        return evaluated(model, loader)


@wrong("evaluate", "for each batch: add up tensors")
def stops_at_a_loss_that_is_not_finite(model, loader):
    model.eval()
    correct, total, seen = 0, 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, labels, reduction="sum")
            if not torch.isfinite(loss):
                break
            correct, total, seen = correct + (outputs.argmax(1) == labels).sum(), total + loss, seen + len(labels)
    model.train()
    return (correct / seen).item(), (total / seen).item()


@wrong("evaluate", "mean of the batches' means")
def losses_by_the_default_reduction(model, loader):
    model.eval()
    correct, losses, seen = 0, [], 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = model(inputs)
            correct, seen = correct + (outputs.argmax(1) == labels).sum(), seen + len(labels)
            losses.append(F.cross_entropy(outputs, labels))
    model.train()
    return (correct / seen).item(), torch.stack(losses).mean().item()


@wrong("evaluate", "one sample: call the model once per batch")
def calls_the_model_for_each_number(model, loader):
    model.eval()
    correct, total, seen = 0, 0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            correct += (model(inputs).argmax(1) == labels).sum()
            total += F.cross_entropy(model(inputs), labels, reduction="sum")
            seen += len(labels)
    model.train()
    return (correct / seen).item(), (total / seen).item()


@right("evaluate")
def sums_in_32_bits(model, loader):
    model.eval()
    numbers = torch.zeros(3)
    with torch.inference_mode():
        for inputs, labels in loader:
            likely = model(inputs).log_softmax(1)
            numbers += torch.stack([
                (likely.argmax(1) == labels).sum().float(),
                -likely.gather(1, labels[:, None]).sum().float(),
                torch.tensor(float(len(labels))),
            ])  # fmt: skip
    model.train()
    correct, total, seen = numbers.tolist()
    return correct / seen, total / seen


@right("evaluate")
def collects_the_outputs(model, loader):
    """Small as they are, all outputs fit into memory."""
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    outputs, labels = map(torch.cat, zip(*[(model.eval()(inputs), labels) for inputs, labels in loader]))
    torch.set_grad_enabled(was)
    model.train()
    return torch.eq(outputs.argmax(1), labels).double().mean().item(), F.nll_loss(outputs.log_softmax(1), labels).item()


def all_transfers(traces):
    """[(rank, its step, event), ...] of all communicating kernels."""
    for rank, events in enumerate(traces):
        step, transfers, _ = parts_of(events)
        yield from ((rank, step, event) for event in transfers)


def complete_at(complete):
    """An answer for which a collective has begun on all ranks at complete(traces)[seq]."""

    def analyse(traces):
        begun = complete(traces)
        [analyse] = analysis(cut=lambda e, _: max(begun[e["args"]["seq"]], e["ts"]))
        return analyse(traces)

    return [analyse]


@wrong("analyse", "has begun on a rank when its kernel has, whether", several=True)
def begins_within_the_step():
    def complete(traces):
        found = {}
        for _, step, e in all_transfers(traces):
            seq, begin = e["args"]["seq"], max(e["ts"], step["ts"])
            found[seq] = max(begin, found.get(seq, begin))
        return found

    return complete_at(complete)


@wrong("analyse", "has begun on a rank when its kernel has, whether|your code raised", ".*", several=True)
def forgets_what_is_outside_of_the_step():
    def complete(traces):
        found = {}
        for _, step, e in all_transfers(traces):
            seq = e["args"]["seq"]
            if end_of(e) > step["ts"] and e["ts"] < end_of(step):
                found[seq] = max(e["ts"], found.get(seq, e["ts"]))
        return found

    return complete_at(complete)


@wrong("analyse", "even if another rank's has ended")
def sends_while_all_ranks_do(traces):
    [analyse] = analysis()
    first = {}
    for _, _, e in all_transfers(traces):
        seq = e["args"]["seq"]
        first[seq] = min(end_of(e), first.get(seq, end_of(e)))
    complete, found = latest(traces), analyse(traces)
    for use, events in zip(found, traces):
        step, transfers, computing = parts_of(events)
        both = [(complete[e["args"]["seq"]], first[e["args"]["seq"]]) for e in transfers]
        busy = [(e["ts"], end_of(e)) for e in computing]
        sending = time_use(both, busy, (step["ts"], end_of(step)))["exposed"]
        use["waiting"] += use["sending"] - sending
        use["sending"] = sending
    return found


@wrong("analyse", "that part is waiting", several=True)
def begins_with_the_first_rank():
    def complete(traces):
        found = {}
        for _, _, e in all_transfers(traces):
            found[e["args"]["seq"]] = min(e["ts"], found.get(e["args"]["seq"], e["ts"]))
        return found

    return complete_at(complete)


@wrong("analyse", "one of its running collectives begun on all ranks|that part is waiting", several=True)
def looks_at_the_next_rank_only():
    def analyse(traces):
        n, begins = len(traces), {(rank, e["args"]["seq"]): e["ts"] for rank, _, e in all_transfers(traces)}
        found = []
        for rank in range(n):
            seqs = {seq for _, seq in begins}
            complete = {seq: max(begins[rank, seq], begins[(rank + 1) % n, seq]) for seq in seqs}
            found.append(complete_at(lambda _, complete=complete: complete)[0](traces)[rank])
        return found

    return [analyse]


@right("analyse")
def by_counting_what_begins_and_ends(traces):
    """Each moment has changes: how many kernels compute, send and wait."""
    complete, found = latest(traces), []
    for events in traces:
        step, transfers, computing = parts_of(events)
        changes = [(step["ts"], "idle", 0), (end_of(step), "idle", 0)]
        for e in computing:
            changes += [(e["ts"], "computing", 1), (end_of(e), "computing", -1)]
        for e in transfers:
            ready = min(max(complete[e["args"]["seq"]], e["ts"]), end_of(e))
            changes += [
                (e["ts"], "waiting", 1),
                (ready, "waiting", -1),
                (ready, "sending", 1),
                (end_of(e), "sending", -1),
            ]
        counts, spent = collections.Counter(), dict.fromkeys(("computing", "sending", "waiting", "idle"), 0.0)
        for (now, kind, by), (then, *_) in itertools.pairwise(sorted(changes)):
            counts[kind] += by
            state = next((kind for kind in ("computing", "sending", "waiting") if counts[kind]), "idle")
            spent[state] += max(0, min(then, end_of(step)) - max(now, step["ts"]))
        found.append(spent)
    return found


@wrong("choose", "exposed once per update", several=True)
def exposes_in_each_micro_batch():
    """The efficiency does not grow then, so one micro-batch is as good as many."""

    def count(forward, backward, exposed, efficiency):
        reached = (forward + backward) / (forward + backward + exposed)
        return 1 if reached >= efficiency else math.ceil(efficiency / reached)

    return choice(count=count)


@wrong("choose", "exposed once per update|efficient enough", several=True)
def of_all_communication():
    """As if nothing were hidden by the backward."""

    def choose(gradients, forward, backward, ranks, alpha, beta, efficiency):
        [ours] = choice()
        cap, _ = ours(gradients, forward, backward, ranks, alpha, beta, efficiency)
        sent = [2 * (ranks - 1) * (alpha + beta * size / ranks) for _, size in buckets(gradients, cap)]
        return cap, smallest(forward, backward, sum(sent), efficiency)

    return [choose]


@wrong("choose", "buckets that end at a good moment|each gradient is sent alone|one bucket|often used", several=True)
def the_mean_of_the_gradients():
    return choice(caps=lambda gradients: [sum(size for _, size in gradients) / len(gradients)])


@wrong("choose", "efficient enough|exposed once per update", several=True)
def efficiency_of_the_time_that_is_exposed():
    """Takes efficiency for computing / exposed."""
    return choice(count=lambda f, b, exposed, e: max(1, math.ceil(e * exposed / (f + b))))


@right("choose")
def by_doubling(gradients, forward, backward, ranks, alpha, beta, efficiency):
    """Finds k as one finds a page in a book."""
    network = backward, ranks, alpha, beta
    cap = min(every_sum(gradients), key=lambda cap: exposed_with(cap, gradients, *network))
    exposed = exposed_with(cap, gradients, *network)
    enough = lambda k: k * (forward + backward) >= efficiency * (k * (forward + backward) + exposed) - 1e-12
    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return cap, high


def evaluating(before=lambda model: None, batches=lambda loader: loader, hits=torch.int64):
    """An answer with one difference."""

    def evaluate(model, loader):
        model.eval()
        before(model)
        correct, total, seen = torch.tensor(0, dtype=hits), torch.tensor(0.0, dtype=torch.float64), 0
        with torch.no_grad():
            for inputs, labels in batches(loader):
                outputs = model(inputs)
                correct += (outputs.argmax(1) == labels).sum().to(hits)
                total += F.cross_entropy(outputs, labels, reduction="sum")
                seen += len(labels)
        model.train()
        return correct.item() / seen, total.item() / seen

    return [evaluate]


@wrong("evaluate", "leave gradients alone", several=True)
def clears_the_gradients():
    return evaluating(before=lambda model: model.zero_grad())


@wrong("evaluate", "set no seed", several=True)
def sets_the_seed():
    return evaluating(before=lambda model: torch.manual_seed(0))


@wrong("evaluate", "the accuracy is the number of samples|the mean loss", several=True)
def ten_batches():
    return evaluating(batches=lambda loader: (batch for _, batch in zip(range(10), loader)))


@wrong("evaluate", "the accuracy is the number of samples", several=True)
def hits_in_eight_bits():
    return evaluating(hits=torch.uint8)


@wrong("update", "train in training mode")
def in_evaluation_mode(model, micro_batches, optimizer):
    model.eval()
    losses = all_in_one_message(model, micro_batches, optimizer)
    model.train()
    return losses


KEPT_BEFORE = []


@wrong("update", "", "failed|your code raised")
def the_first_models_parameters(model, micro_batches, optimizer):
    if not KEPT_BEFORE:
        KEPT_BEFORE.extend(trained(model))
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches]
    (sum(losses) / len(losses)).backward()
    for parameter, mean in zip(KEPT_BEFORE, average([parameter.grad for parameter in KEPT_BEFORE])):
        parameter.grad = mean
    optimizer.step()
    [means] = average([torch.stack(losses).detach()])
    return means.tolist()


@wrong("update", "must take the mean gradient over all|are still there")
def zeros_at_the_end(model, micro_batches, optimizer):
    losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in micro_batches]
    (sum(losses) / len(losses)).backward()
    for parameter, mean in zip(trained(model), average([parameter.grad for parameter in trained(model)])):
        parameter.grad = mean
    optimizer.step()
    optimizer.zero_grad()
    [means] = average([torch.stack(losses).detach()])
    return means.tolist()
