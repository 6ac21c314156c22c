"""Exercise 01: normalise, train for an epoch, measure the accuracy; all in one
process.
"""

import math
import numbers
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.school.judge import Wrong, question

# ---- what the answers are tried on ----


class Watched(nn.Module):
    """A linear network that notes what is done with it. Takes (batch, 1, 28, 28);
    returns log-probabilities (batch, 10).

    calls: 'forward', 'backward' and 'zero_grad', as they come; modes, recording:
    whether it was in training mode at each forward, and whether autograd recorded it.
    """

    def __init__(self, weight, dropout=0.0):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(784, 10, bias=False)
        self.linear.weight = nn.Parameter(weight.clone())
        self.calls, self.modes, self.recording = [], [], []
        self.linear.weight.register_post_accumulate_grad_hook(
            lambda _: self.calls.append("backward")
        )

    def forward(self, images):
        self.calls.append("forward")
        self.modes.append(self.dropout.training)
        self.recording.append(torch.is_grad_enabled())
        return F.log_softmax(self.linear(self.dropout(images.flatten(1))), dim=1)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


class WatchedSGD(torch.optim.SGD):
    """SGD that adds its own 'zero_grad' and 'step' to the calls of a Watched
    network.
    """

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.calls = model.calls

    def step(self, closure=None):
        self.calls.append("step")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


def number(value):
    """A number of any kind, NumPy's too, as a float; anything else as it is."""
    return (
        float(value)
        if isinstance(value, numbers.Real) and not isinstance(value, bool)
        else value
    )


def told(values):
    """What an answer returned, as a learner reads it: a list of numbers or of tensors,
    a small tensor, None, or whatever.
    """
    if values is None:
        return "nothing (None)"
    if isinstance(values, torch.Tensor) and values.numel() == 1:
        return str(values)
    if isinstance(values, list) and any(
        isinstance(value, torch.Tensor) for value in values
    ):
        return f"a list of {len(values)}, the first {values[0]!r:.300}"
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, float) for value in values)
    ):
        return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
    return values


# ---- 1: normalise ----


def normalize_there(normalize, train_images, test_images):
    before = train_images.clone(), test_images.clone()
    result = normalize(train_images, test_images)
    return {
        "result": result,
        "unchanged": [*map(torch.equal, before, (train_images, test_images))],
    }


@question(
    "Both sets are shifted and scaled by the same two numbers. The test images are to be new to everything that you "
    "prepare, so which images may these two numbers come from?",
    "images.unsqueeze(1).float() / 255 has the right shape and lies between 0 and 1. Called without dim, .mean() and "
    ".std() go over all pixels of all images.",
    "train and test: each unsqueeze(1).float() / 255. mean, std = train.mean(), train.std(). Then return "
    "(train - mean) / std, (test - mean) / std",
)
def check_normalize(answer, draw):
    """Both sets, with one mean and one standard deviation: those of all pixels of the
    training images.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    sizes = draw.sample(range(30, 61), 2)
    train_images = a_set_of_images(
        sizes[0], dark=0, bright=draw.randint(100, 130), generator=generator
    )
    test_images = a_set_of_images(
        sizes[1], dark=60, bright=draw.randint(180, 220), generator=generator
    )
    images = {"training": train_images, "test": test_images}
    seen = answer.on_ranks(normalize_there, train_images, test_images)[0]
    call = "normalize(train_images, test_images)"

    for name, unchanged in zip(images, seen["unchanged"]):
        if not unchanged:
            checked = f"the {name} images that were given, after {call}"
            cause = "the caller may still need them: no operations in place, such as those whose names end in _"
            raise Wrong(checked, expected="as they were", got="changed", cause=cause)
    result = seen["result"]
    if not isinstance(result, list) or len(result) != 2:
        cause = "return both sets: return train, test"
        cause = (
            "it returns nothing: is there a return at the end?"
            if result is None
            else cause
        )
        raise Wrong(
            f"what {call} returns",
            expected="two tensors",
            got=told(result),
            cause=cause,
        )
    for position, (name, of_set) in enumerate(images.items()):
        compare_images(
            f"the {name} images that {call} returns", of_set, position, images, result
        )


def a_set_of_images(count, dark, bright, generator):
    """Random images, uint8 (count, 28, 28): each as bright as it likes, and all
    brighter to the right.
    """
    contrast = torch.rand(count, 1, 1, generator=generator) * 0.5 + 0.5
    ramp = torch.linspace(0.6, 1.0, 28)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (dark + (bright - dark) * contrast * ramp * noise).round().byte()


def compare_images(checked, images, position, both, result):
    """Raise Wrong unless result[position] is `images`, normalised with the training
    set; say what else it looks like.
    """
    got, shape = result[position], (len(images), 1, 28, 28)
    if not isinstance(got, torch.Tensor):
        raise Wrong(
            checked,
            expected="a tensor",
            got=got,
            cause="return two tensors, and nothing else",
        )
    if got.shape != shape:
        causes = {
            tuple(images.shape): "the channel is missing: unsqueeze(1) makes (n, 1, 28, 28) of (n, 28, 28)",
            (*images.shape, 1): "the channel comes second, (n, 1, 28, 28), and not last: unsqueeze(1)",
            (1, *images.shape): "the channel comes second, and the samples first: unsqueeze(1), not unsqueeze(0)",
            (len(both["test"]), 1, 28, 28): "the two are in the wrong order: return train, test",
        }  # fmt: skip
        cause = causes.get(
            tuple(got.shape),
            "each image is to keep its 28 rows of 28 pixels, in one channel",
        )
        raise Wrong(
            checked,
            expected=f"shape {shape}",
            got=f"shape {tuple(got.shape)}",
            cause=cause,
        )
    got = got.cpu()
    if got.dtype != torch.float32:
        cause = "convert with .float(), 32 bits: the weights of a network are float32, and its images must be, too"
        if not got.is_floating_point():
            cause = "whole numbers cannot hold what lies between 0 and 1: convert with .float(), and do not go back"
        raise Wrong(checked, expected="torch.float32", got=got.dtype, cause=cause)

    x, train = images.unsqueeze(1).double() / 255, both["training"].double() / 255
    mean, std = train.mean(), train.std()
    expected = (x - mean) / std
    if torch.allclose(
        got.double(), expected, rtol=1e-3, atol=1e-3
    ):  # biased or unbiased: 0.00002 of it
        return
    looks = [(distance(got, value), cause) for value, cause in other_ways(x, both)]
    nearest, cause = min(looks, key=lambda look: look[0])
    if not nearest < 0.03:  # or not a number
        cause = "compute one mean and one standard deviation, over all pixels of the training images, and use them for both"
        if got.isnan().any():
            cause = "there are numbers that are none: was something divided by a standard deviation of 0?"
    raise Wrong(checked, expected=in_words(expected), got=in_words(got), cause=cause)


def other_ways(x, both):
    """What people do instead: [(pixels, what a teacher would say)]. x: one of the two
    sets, scaled to 0..1.
    """
    train = both["training"].unsqueeze(1).double() / 255
    pooled = torch.cat([pixels.flatten() for pixels in both.values()]).double() / 255
    mean, std = train.mean(), train.std()
    deviate = lambda pixels, dim: (
        pixels.mean(dim, keepdim=True),
        pixels.std(dim, keepdim=True),
    )
    by = lambda mean, std: (x - mean) / std
    of_its_own = "has a mean and a standard deviation of its own:"
    return [
        (x, "the pixels are scaled to 0..1, but not normalised: subtract the mean, divide by the standard deviation (or are "
         "these two taken from training images that had been normalised before? Then they are 0 and 1)"),
        (x * 255, "the pixels are as they came: divide by 255, subtract the mean, divide by the standard deviation"),
        (x - mean, "the mean is subtracted: now divide by the standard deviation"),
        (x / std, "it is divided by the standard deviation, but the mean was not subtracted before"),
        (by(mean, std**2), "it is divided by the variance: the standard deviation is its square root, .std()"),
        (by(mean / 255, std / 255), "mean and standard deviation are of pixels from 0 to 1: divide the pixels by 255, too"),
        (by(mean * 255, std * 255), "the pixels were divided by 255 only after mean and standard deviation were taken"),
        (by(x.mean(), x.std()), f"this set {of_its_own} take those of the training images for both"),
        (by(x.mean(), std), "the mean is this set's own: take that of the training images for both"),
        (by(mean, x.std()), "the standard deviation is this set's own: take that of the training images for both"),
        (by(pooled.mean(), pooled.std()), "mean and standard deviation are of both sets: take those of the training images"),
        (by(*deviate(x, (1, 2, 3))), f"each image {of_its_own} compute them once, over all images"),
        (by(*deviate(x, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(*deviate(train, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(0.1307, 0.3081), "0.1307 and 0.3081 are MNIST's numbers: compute those of the training images given"),
        (by(0.3054, 0.3246), "0.3054 and 0.3246 are the digits' numbers: compute those of the training images given"),
        (by(0.5, 0.5), "0.5 and 0.5 are somebody's guess: compute mean and standard deviation of the training images"),
    ]  # fmt: skip


def distance(got, guess):
    """How far `got` is from a guess, relative to its size; infinite where that is no
    number.
    """
    far = ((got - guess).norm() / guess.norm()).item()
    return far if math.isfinite(far) else math.inf


def in_words(pixels):
    first = ", ".join(f"{pixel:.3f}" for pixel in pixels.flatten()[:3].tolist())
    mean = round(pixels.mean().item(), 3) + 0.0  # no one wants to read -0.000
    std = pixels.std().item()
    return f"pixels {first}, ..., with mean {mean:.3f} and standard deviation {std:.3f}"


# ---- 2: one epoch ----


def train_there(train_one_epoch, weight, images, labels, batch_size, lr):
    model = Watched(weight).eval()  # as an evaluation leaves it
    loader = DataLoader(TensorDataset(images, labels), batch_size)
    losses = train_one_epoch(model, loader, WatchedSGD(model, lr))
    if isinstance(losses, list | tuple):
        losses = [number(loss) for loss in losses]
    return {
        "losses": number(losses), "weight": model.linear.weight.cpu(), "calls": model.calls, "modes": model.modes,
    }  # fmt: skip


def simulate(weight, batches, lr, reset=True, reduction="mean"):
    """One epoch of SGD by hand: the weights after it, the loss of each step, and what
    each was once the step was taken.
    """
    loss_of = lambda weight, images, labels: F.nll_loss(
        F.log_softmax(images.flatten(1) @ weight.T, dim=1), labels, reduction=reduction
    )
    gradient, losses, afterwards = 0, [], []
    for batch in batches:
        weight = weight.detach().requires_grad_()
        loss = loss_of(weight, *batch)
        gradient = torch.autograd.grad(loss, weight)[0] + (0 if reset else gradient)
        weight = weight.detach() - lr * gradient
        losses.append(loss.item())
        afterwards.append(loss_of(weight, *batch).item())
    return weight, losses, afterwards


@question(
    "Each batch takes four calls, in this order: reset the gradients, compute the loss, compute the gradients, take the "
    "step. What does each of them need from the one before?",
    "An evaluation leaves the model in eval mode, so begin with model.train(). loss.backward() adds to the gradients that "
    "are there: optimizer.zero_grad() is for that. loss.detach() is a loss without its graph, and after the loop "
    "torch.stack(losses).tolist() makes floats of all of them. (loss.item() would make a GPU wait in each step.)",
    "losses = []; for each batch: optimizer.zero_grad(); loss = F.nll_loss(model(images), labels); loss.backward(); "
    "optimizer.step(); losses.append(loss.detach()). After the loop: return torch.stack(losses).tolist()",
)
def check_train_one_epoch(answer, draw):
    """One step for each batch, also the last, smaller one; in training mode; and the
    losses that it returns.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    batch_size, steps = draw.randint(8, 14), draw.randint(4, 6)
    samples = batch_size * (steps - 1) + draw.randint(3, batch_size - 2)
    images = torch.randn(samples, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    weight = 0.05 * torch.randn(10, 784, generator=generator)
    lr = draw.uniform(0.005, 0.015)
    seen = answer.on_ranks(train_there, weight, images, labels, batch_size, lr)[0]

    batches = list(zip(images.split(batch_size), labels.split(batch_size)))
    epoch = f"an epoch of {steps - 1} batches of {batch_size} samples and one of {len(batches[-1][1])}"
    if not all(seen["modes"]):
        cause = "an evaluation leaves the model in eval mode: begin with model.train(), or dropout never acts"
        checked = f"the mode of the model in each forward of {epoch}"
        raise Wrong(checked, expected="training", got="eval", cause=cause)
    compare_weights(
        f"the weights of the model after {epoch}", seen, weight, batches, lr
    )
    compare_losses(
        f"what train_one_epoch returns after {epoch}",
        seen["losses"],
        weight,
        batches,
        lr,
    )


def compare_weights(checked, seen, weight, batches, lr):
    """Raise Wrong unless the weights are those of one step for each batch; say what the
    calls tell of it.
    """
    equal = lambda one, other: (
        one.shape == other.shape
        and torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-5)
    )
    expected, got, calls = (
        simulate(weight, batches, lr)[0],
        seen["weight"],
        seen["calls"],
    )
    if equal(got, expected):
        return
    count, order = Counter(calls), " ".join(calls)
    forward, step = count["forward"], count["step"]
    added_up = simulate(weight, batches, lr, reset=False)[0]
    summed = simulate(weight, batches, lr, reduction="sum")[0]
    looks = [
        (forward == 0, "the model was not called with a batch: for images, labels in loader"),
        (count["backward"] == 0, "there are no gradients: loss.backward() computes them"),
        (step == 0, "the optimizer that it was given took no step: optimizer.step(), after backward"),
        (forward == 1, "it stopped after the first batch: does return stand within the loop?"),
        (forward < len(batches), "a batch was left out: the last, smaller one takes a step like all others"),
        (step < len(batches), "one step for each batch: optimizer.step() belongs within the loop"),
        (step > len(batches), "there are more steps than batches: one step for each, and the loader once"),
        (calls.index("step") < calls.index("backward") if step and count["backward"] else False,
         "the step comes before backward, so it does not know this batch's gradients: backward first"),
        ("backward zero_grad step" in order or equal(got, weight),
         "the gradients are reset between backward and step: none is left for the step"),
        (equal(got, added_up), "the gradients of all batches so far add up: optimizer.zero_grad(), for each batch"),
        (equal(got, summed), "the loss is the sum over the batch: F.nll_loss is a mean, unless it is told otherwise"),
    ]  # fmt: skip
    other = "is each batch one forward, F.nll_loss, backward and step of the optimizer, and nothing else?"
    cause = next((cause for applies, cause in looks if applies), other)
    end = nth(calls, "forward", 3)
    order = (
        ", ".join(calls[:end]) + (", ..." if end < len(calls) else "")
        or "no call at all"
    )
    wanted = f"zero_grad, forward, backward, step, for each batch (steps in all: {len(batches)})"
    raise Wrong(
        checked,
        expected=f"{weights(expected)}\nafter {wanted}",
        got=f"{weights(got)}\nafter {order} (steps in all: {step})",
        cause=cause,
    )


def nth(calls, name, number):
    """Where a call comes for the nth time; the end, where it does not."""
    places = [place for place, call in enumerate(calls) if call == name]
    return places[number - 1] if len(places) >= number else len(calls)


def weights(tensor):
    return (
        ", ".join(f"{value:.4f}" for value in tensor.flatten()[:4].tolist()) + ", ..."
    )


def compare_losses(checked, got, weight, batches, lr):
    """Raise Wrong unless `got` is the list of the losses; say what else it looks
    like.
    """
    _, expected, afterwards = simulate(weight, batches, lr)
    close = lambda values, others: all(
        math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)
        for one, other in zip(values, others)
    )
    cause = None
    if got is None:
        cause = "it returns nothing: collect the losses in a list, and return that"
    elif isinstance(got, float):
        cause = "it is one number for the epoch: return the list, the loss of each step"
    elif isinstance(got, torch.Tensor):
        cause = "it is a tensor: .tolist() makes a list of floats of it"
    elif not isinstance(got, list):
        cause = "return a list of floats, the loss of each step"
    elif any(isinstance(loss, torch.Tensor) for loss in got):
        cause = "these are still tensors: after the loop, return torch.stack(losses).tolist()"
    elif not all(isinstance(loss, float) for loss in got):
        cause = "return a list of floats, the loss of each step, and nothing else"
    elif len(got) != len(expected):
        cause = "one loss for each step: append it within the loop"
        cause = (
            "it is one loss for the whole epoch: append one in each step"
            if len(got) == 1
            else cause
        )
    elif not close(got, expected):
        summed = [loss * len(labels) for loss, (_, labels) in zip(expected, batches)]
        so_far = [
            sum(expected[: step + 1]) / (step + 1) for step in range(len(expected))
        ]
        looks = [
            (
                summed,
                "each loss is multiplied by the size of its batch: F.nll_loss is the mean already",
            ),
            (so_far, "it is the mean of the losses so far: return each step's own"),
            (
                afterwards,
                "it is the loss after the step: return the one whose gradients made the step",
            ),
        ]
        other = "the steps were right, so keep the very loss that you call backward on"
        cause = next((cause for values, cause in looks if close(got, values)), other)
    if cause:
        raise Wrong(checked, expected=told(expected), got=told(got), cause=cause)


# ---- 3: accuracy ----


def measure_there(accuracy, weight, images, labels, batch_size):
    model = Watched(weight, dropout=0.5).train()  # as training leaves it
    share = number(
        accuracy(model, DataLoader(TensorDataset(images, labels), batch_size))
    )
    return {"share": share, "modes": model.modes, "recording": model.recording}


@question(
    "Accuracies of batches do not add up, counts do: keep two, how many samples were right and how many there were, and "
    "divide once, at the end.",
    "The model gives a row of ten scores for each sample: .argmax(dim=1) is the predicted digit. model.eval() switches "
    "dropout off, and with torch.no_grad(): keeps autograd from recording.",
    "For each batch: correct += (model(images).argmax(dim=1) == labels).sum().item(), and seen += len(labels). After the "
    "loop: return correct / seen",
)
def check_accuracy(answer, draw):
    """First on batches of one size, then with a last batch that is smaller; in eval
    mode and without gradients.
    """
    for ragged in (False, True):
        compare_accuracy(answer, *a_test_set(draw, ragged))


def a_test_set(draw, ragged):
    """Weights, images, labels and a batch size, such that every mistake leads to a
    wrong number, and each to another.

    The network knows each digit with certainty. It gets more than half of each batch
    right, and of a ragged one, one.
    """
    while True:  # twice or so
        # in batches of 10, one for each digit, even an argmax over the samples raises
        # no error
        batch_size = draw.choice([7, 8, 9, 11, 12, 13]) if ragged else 10
        sizes = [batch_size] * draw.randint(4, 6) + [
            draw.randint(3, batch_size - 2)
        ] * ragged
        generator = torch.Generator().manual_seed(draw.randrange(10**6))
        weight = torch.randn(10, 784, generator=generator)
        digits = torch.randint(10, (sum(sizes),), generator=generator)
        images = weight[digits] / 200 + 0.01 * torch.randn(
            len(digits), 784, generator=generator
        )
        right = []
        for size in sizes:
            count = 1 if size < batch_size else draw.randint(size // 2 + 1, size - 1)
            right += [place < count for place in draw.sample(range(size), size)]
        shifts = torch.randint(1, 10, (len(digits),), generator=generator)
        labels = torch.where(torch.tensor(right), digits, (digits + shifts) % 10)
        test_set = weight, images.view(-1, 1, 28, 28), labels, batch_size
        shares = {(round(share, 3), cause) for share, cause in mistakes(*test_set)}
        shares.add((round(sum(right) / len(right), 3), "right"))
        if (
            len({share for share, _ in shares})
            == len({cause for _, cause in shares})
            == len(shares)
        ):
            return test_set


def hits_of_each_batch(weight, images, labels, batch_size):
    """Scores and labels of each batch, and how many the network gets right in it, and
    of how many.
    """
    with torch.no_grad():
        scores = Watched(weight).eval()(images).split(batch_size)
    labels = labels.split(batch_size)
    hits = [
        (row.argmax(dim=1) == label).sum().item() for row, label in zip(scores, labels)
    ]
    return scores, labels, hits, [len(label) for label in labels]


def mistakes(weight, images, labels, batch_size):
    """What people return instead: [(number, what a teacher would say)]."""
    scores, labels, hits, sizes = hits_of_each_batch(weight, images, labels, batch_size)
    correct, seen = sum(hits), sum(sizes)
    anywhere = sum(
        (row.argmax() == label).sum().item() for row, label in zip(scores, labels)
    )
    nothing = (
        "it is 0: are digits compared with the labels, .argmax(dim=1), and not the highest scores? And is the division "
        "/ and not //?"
    )
    each_with_each = sum(
        (row.argmax(dim=1, keepdim=True) == label).sum().item()
        for row, label in zip(scores, labels)
    )
    looks = [
        (100 * correct / seen, "it is a percentage: the share lies between 0 and 1"),
        (correct, "it is the number of right answers: divide by the number of samples"),
        (0, nothing),
        (anywhere / seen, nothing),
        (each_with_each / seen, "each prediction was compared with each label of its batch: both must have the shape (b,), "
         "so leave out keepdim=True"),
        (1 - correct / seen, "it is the share that the model gets wrong: count with =="),
        (correct / len(sizes), "it is the number of right answers in a batch: divide by the samples, not the batches"),
        (correct / sizes[-1], "it is divided by the size of one batch: add up the sizes of all"),
        (hits[0] / sizes[0], "it is the accuracy of the first batch: does return stand within the loop?"),
        (hits[-1] / sizes[-1], "it is the accuracy of the last batch: set the counts to 0 before the loop, and add with +="),
    ]  # fmt: skip
    if sizes[-1] == batch_size == 10:
        across = sum(
            (row.argmax(dim=0) == label).sum().item()
            for row, label in zip(scores, labels)
        )
        looks.append((across / seen, "argmax goes over the samples, for each digit, and not over the digits, for each "
                                     "sample: .argmax(dim=1)"))  # fmt: skip
    if sizes[-1] < batch_size:
        mean_of_batches = sum(hit / size for hit, size in zip(hits, sizes)) / len(sizes)
        looks += [
            (mean_of_batches, "it is the mean of the batches' accuracies, in which each sample of a smaller batch weighs "
             "more: count the samples, and divide once"),
            (correct / (len(sizes) * batch_size), "it is divided by the number of batches times the batch size, but the "
             "last batch is smaller: add up len(labels)"),
            (sum(hits[:-1]) / sum(sizes[:-1]), "the last batch was left out: its samples count like all others"),
            (sum(hits[:-1]) / seen, "the right answers of the last batch were left out: they count like all others"),
        ]  # fmt: skip
    return looks


def compare_accuracy(answer, weight, images, labels, batch_size):
    """Raise Wrong unless the answer tells the accuracy on this test set, in eval mode
    and without gradients.
    """
    seen = answer.on_ranks(measure_there, weight, images, labels, batch_size)[0]
    _, _, hits, sizes = hits_of_each_batch(weight, images, labels, batch_size)
    ragged = f", the last one of {sizes[-1]}" if sizes[-1] < batch_size else ""
    checked = f"accuracy(model, loader), {sum(sizes)} samples in batches of {batch_size}{ragged}"
    expected, got = sum(hits) / sum(sizes), seen["share"]

    if any(seen["modes"]):
        cause = "dropout is still on, and half of each image is missing: model.eval() switches it off"
        raise Wrong(
            f"the mode of the model in {checked}",
            expected="eval",
            got="training",
            cause=cause,
        )
    if not isinstance(got, float):
        cause = "return one float, right answers divided by samples"
        cause = (
            "it returns nothing: is there a return at the end?"
            if got is None
            else cause
        )
        cause = (
            "it is a tensor: .item() is the number in it"
            if isinstance(got, torch.Tensor)
            else cause
        )
        raise Wrong(
            checked, expected=f"a float, {expected:.4f}", got=told(got), cause=cause
        )
    if not math.isclose(got, expected, abs_tol=1e-5):
        looks = mistakes(weight, images, labels, batch_size)
        other = "count the samples that it gets right, count all samples, and divide once, at the end"
        cause = next(
            (cause for share, cause in looks if abs(got - share) < 1e-4), other
        )
        expected = f"{expected:.4f} ({sum(hits)} of {sum(sizes)})"
        raise Wrong(checked, expected=expected, got=f"{got:.4f}", cause=cause)
    if any(seen["recording"]):
        cause = "nobody will call backward, so do not pay for it: with torch.no_grad(): around the loop"
        checked = f"whether autograd records the model in {checked}"
        raise Wrong(checked, expected="no", got="yes", cause=cause)
