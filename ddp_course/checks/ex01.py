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

# ---- the models that the answers are tested with ----


class Watched(nn.Module):
    """A linear network that records how it is used. Takes (batch, 1, 28, 28); returns
    log-probabilities (batch, 10).

    calls: 'forward', 'backward' and 'zero_grad', in the order of the calls. modes and
    recording: whether the network was in training mode at each forward, and whether
    autograd recorded that forward.
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
    """A number of any kind, including NumPy's, as a float; anything else unchanged."""
    return (
        float(value)
        if isinstance(value, numbers.Real) and not isinstance(value, bool)
        else value
    )


def told(values):
    """What an answer returned, in a form for the learner to read."""
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
    "Both sets are shifted and scaled by the same two numbers. The test images must not influence the preparation, "
    "so which images may you compute these two numbers from?",
    "images.unsqueeze(1).float() / 255 has the right shape, and its values are between 0 and 1. Without dim, "
    ".mean() and .std() are computed over all pixels of all images.",
    "train and test: each unsqueeze(1).float() / 255. mean, std = train.mean(), train.std(). Then return "
    "(train - mean) / std, (test - mean) / std",
)
def check_normalize(answer, draw):
    """Both sets must be normalised with the mean and standard deviation of all training
    pixels.
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
            checked = f"the original {name} images after {call}"
            cause = "the caller may still need the original images: do not use in-place operations, whose names end in _"
            raise Wrong(checked, expected="unchanged", got="changed", cause=cause)
    result = seen["result"]
    if not isinstance(result, list) or len(result) != 2:
        cause = "return both sets: return train, test"
        cause = (
            "it returns None: is the return statement missing?"
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
    """Random images, uint8 (count, 28, 28): each with a random contrast, and all
    brighter towards the right.
    """
    contrast = torch.rand(count, 1, 1, generator=generator) * 0.5 + 0.5
    ramp = torch.linspace(0.6, 1.0, 28)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (dark + (bright - dark) * contrast * ramp * noise).round().byte()


def compare_images(checked, images, position, both, result):
    """Raise Wrong unless result[position] is `images`, normalised with the training
    set; name the likely mistake.
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
            tuple(images.shape): "the channel dimension is missing: unsqueeze(1) turns (n, 28, 28) into (n, 1, 28, 28)",
            (*images.shape, 1): "the channel must be the second dimension, (n, 1, 28, 28), not the last: use unsqueeze(1)",
            (1, *images.shape): "the samples must be the first dimension and the channel the second: use "
                                "unsqueeze(1), not unsqueeze(0)",
            (len(both["test"]), 1, 28, 28): "the two are in the wrong order: return train, test",
        }  # fmt: skip
        cause = causes.get(
            tuple(got.shape),
            "each image must keep its 28 rows of 28 pixels, in one channel",
        )
        raise Wrong(
            checked,
            expected=f"shape {shape}",
            got=f"shape {tuple(got.shape)}",
            cause=cause,
        )
    got = got.cpu()
    if got.dtype != torch.float32:
        cause = (
            "convert to 32 bits with .float(): the weights of a network are float32, so its images must be float32, "
            "too"
        )
        if not got.is_floating_point():
            cause = "integers cannot hold values between 0 and 1: convert with .float(), and do not convert back"
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
            cause = "some values are nan: did you divide by a standard deviation of 0?"
    raise Wrong(checked, expected=in_words(expected), got=in_words(got), cause=cause)


def other_ways(x, both):
    """Common mistakes: [(the pixels that they give, the cause)]. x: one of the two
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
    of_its_own = "was normalised with its own mean and standard deviation:"
    return [
        (x, "the pixels are scaled to 0..1, but not normalised: subtract the mean and divide by the standard deviation "
         "(or did you compute these two from training images that were already normalised? Then they are 0 and 1)"),
        (x * 255, "the pixels are unchanged: divide by 255, subtract the mean, divide by the standard deviation"),
        (x - mean, "you subtracted the mean: now divide by the standard deviation"),
        (x / std, "you divided by the standard deviation without subtracting the mean first"),
        (by(mean, std**2), "you divided by the variance: the standard deviation is its square root, .std()"),
        (by(mean / 255, std / 255), "the mean and standard deviation are those of pixels from 0 to 1: divide the "
                                    "pixels by 255, too"),
        (by(mean * 255, std * 255), "the pixels were divided by 255 only after the mean and standard deviation were "
                                    "computed"),
        (by(x.mean(), x.std()), f"this set {of_its_own} use those of the training images for both sets"),
        (by(x.mean(), std), "the mean is this set's own: use that of the training images for both sets"),
        (by(mean, x.std()), "the standard deviation is this set's own: use that of the training images for both sets"),
        (by(pooled.mean(), pooled.std()), "the mean and standard deviation were computed over both sets: use those "
                                          "of the training images"),
        (by(*deviate(x, (1, 2, 3))), f"each image {of_its_own} compute them once, over all images"),
        (by(*deviate(x, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(*deviate(train, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(0.1307, 0.3081), "0.1307 and 0.3081 are MNIST's numbers: compute them from the given training images"),
        (by(0.3054, 0.3246), "0.3054 and 0.3246 are the digits' numbers: compute them from the given training images"),
        (by(0.5, 0.5), "0.5 and 0.5 are only a guess: compute the mean and standard deviation of the training images"),
    ]  # fmt: skip


def distance(got, guess):
    """The distance of `got` from a guess, relative to the guess; infinite if that is
    nan.
    """
    far = ((got - guess).norm() / guess.norm()).item()
    return far if math.isfinite(far) else math.inf


def in_words(pixels):
    first = ", ".join(f"{pixel:.3f}" for pixel in pixels.flatten()[:3].tolist())
    mean = round(pixels.mean().item(), 3) + 0.0  # avoids printing -0.000
    std = pixels.std().item()
    return f"pixels {first}, ..., with mean {mean:.3f} and standard deviation {std:.3f}"


# ---- 2: one epoch ----


def train_there(train_one_epoch, weight, images, labels, batch_size, lr):
    model = Watched(weight).eval()  # the state after an evaluation
    loader = DataLoader(TensorDataset(images, labels), batch_size)
    losses = train_one_epoch(model, loader, WatchedSGD(model, lr))
    if isinstance(losses, list | tuple):
        losses = [number(loss) for loss in losses]
    return {
        "losses": number(losses), "weight": model.linear.weight.cpu(), "calls": model.calls, "modes": model.modes,
    }  # fmt: skip


def simulate(weight, batches, lr, reset=True, reduction="mean"):
    """One epoch of SGD by hand: the weights after it, and the loss of each step's batch
    before and after that step.
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
    "Each batch needs four calls, in this order: reset the gradients, compute the loss, compute the gradients, take "
    "the step. What does each of them need from the one before?",
    "An evaluation leaves the model in eval mode, so begin with model.train(). loss.backward() adds to the existing "
    "gradients, so reset them with optimizer.zero_grad(). loss.detach() is the loss without its graph; after the loop, "
    "torch.stack(losses).tolist() turns all losses into floats. (loss.item() would make a GPU wait in each step.)",
    "losses = []; for each batch: optimizer.zero_grad(); loss = F.nll_loss(model(images), labels); loss.backward(); "
    "optimizer.step(); losses.append(loss.detach()). After the loop: return torch.stack(losses).tolist()",
)
def check_train_one_epoch(answer, draw):
    """One step per batch, including the last, smaller one; training mode; and the
    returned losses.
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
        cause = "an evaluation leaves the model in eval mode: begin with model.train(), otherwise dropout stays off"
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
    """Raise Wrong unless the weights are those of one step per batch; find the cause in
    the calls.
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
        (step == 0, "the given optimizer took no step: call optimizer.step() after backward"),
        (forward == 1, "it stopped after the first batch: is the return inside the loop?"),
        (forward < len(batches), "a batch was left out: the last, smaller batch needs a step like all others"),
        (step < len(batches), "one step for each batch: optimizer.step() belongs inside the loop"),
        (step > len(batches), "there are more steps than batches: go through the loader once, and take one step per "
                              "batch"),
        (calls.index("step") < calls.index("backward") if step and count["backward"] else False,
         "the step comes before backward, so it does not use this batch's gradients: call backward first"),
        ("backward zero_grad step" in order or equal(got, weight),
         "the gradients are reset between backward and step: nothing is left for the step"),
        (equal(got, added_up), "the gradients of all batches so far add up: call optimizer.zero_grad() for each batch"),
        (equal(got, summed), "the loss is the sum over the batch: F.nll_loss computes the mean by default"),
    ]  # fmt: skip
    other = "does each batch get one forward, F.nll_loss, one backward and one optimizer step, and nothing else?"
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
    """The position of the nth occurrence of a call; the length, if there is none."""
    places = [place for place, call in enumerate(calls) if call == name]
    return places[number - 1] if len(places) >= number else len(calls)


def weights(tensor):
    return (
        ", ".join(f"{value:.4f}" for value in tensor.flatten()[:4].tolist()) + ", ..."
    )


def compare_losses(checked, got, weight, batches, lr):
    """Raise Wrong unless `got` is the list of the losses; name the likely mistake."""
    _, expected, afterwards = simulate(weight, batches, lr)
    close = lambda values, others: all(
        math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)
        for one, other in zip(values, others)
    )
    cause = None
    if got is None:
        cause = "it returns None: collect the losses in a list, and return the list"
    elif isinstance(got, float):
        cause = (
            "it is one number for the epoch: return a list with the loss of each step"
        )
    elif isinstance(got, torch.Tensor):
        cause = "it is a tensor: .tolist() turns it into a list of floats"
    elif not isinstance(got, list):
        cause = "return a list of floats: the loss of each step"
    elif any(isinstance(loss, torch.Tensor) for loss in got):
        cause = "these are still tensors: after the loop, return torch.stack(losses).tolist()"
    elif not all(isinstance(loss, float) for loss in got):
        cause = "return only a list of floats: the loss of each step"
    elif len(got) != len(expected):
        cause = "return one loss for each step: append it inside the loop"
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
                "each loss is multiplied by the size of its batch: F.nll_loss is already the mean",
            ),
            (
                so_far,
                "it is the mean of the losses so far: return the loss of each step",
            ),
            (
                afterwards,
                "it is the loss after the step: return the loss whose gradients were used for the step",
            ),
        ]
        other = (
            "the steps were right, so return exactly the loss that you call backward on"
        )
        cause = next((cause for values, cause in looks if close(got, values)), other)
    if cause:
        raise Wrong(checked, expected=told(expected), got=told(got), cause=cause)


# ---- 3: accuracy ----


def measure_there(accuracy, weight, images, labels, batch_size):
    model = Watched(weight, dropout=0.5).train()  # the state after training
    share = number(
        accuracy(model, DataLoader(TensorDataset(images, labels), batch_size))
    )
    return {"share": share, "modes": model.modes, "recording": model.recording}


@question(
    "Accuracies of batches cannot be added up, but counts can: count the correct samples and all samples, and divide "
    "once, at the end.",
    "The model returns a row of ten scores for each sample: .argmax(dim=1) gives the predicted digit. model.eval() "
    "switches dropout off, and `with torch.no_grad():` keeps autograd from recording.",
    "For each batch: correct += (model(images).argmax(dim=1) == labels).sum().item(), and seen += len(labels). After the "
    "loop: return correct / seen",
)
def check_accuracy(answer, draw):
    """First with batches of equal size, then with a smaller last batch; in eval mode
    and without gradients.
    """
    for ragged in (False, True):
        compare_accuracy(answer, *a_test_set(draw, ragged))


def a_test_set(draw, ragged):
    """Weights, images, labels and a batch size, chosen so that every mistake gives a
    different wrong number.

    The network knows each digit with certainty. Its predictions are right for more than
    half of each batch, and for one sample of a smaller last batch.
    """
    while True:  # about two attempts
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
    """Of each batch: the scores, the labels, the number of correct predictions, and the
    size.
    """
    with torch.no_grad():
        scores = Watched(weight).eval()(images).split(batch_size)
    labels = labels.split(batch_size)
    hits = [
        (row.argmax(dim=1) == label).sum().item() for row, label in zip(scores, labels)
    ]
    return scores, labels, hits, [len(label) for label in labels]


def mistakes(weight, images, labels, batch_size):
    """Common mistakes: [(the number that they return, the cause)]."""
    scores, labels, hits, sizes = hits_of_each_batch(weight, images, labels, batch_size)
    correct, seen = sum(hits), sum(sizes)
    anywhere = sum(
        (row.argmax() == label).sum().item() for row, label in zip(scores, labels)
    )
    nothing = (
        "it is 0: do you compare the digits, .argmax(dim=1), with the labels, and not the highest scores? And do you "
        "divide with /, not with //?"
    )
    each_with_each = sum(
        (row.argmax(dim=1, keepdim=True) == label).sum().item()
        for row, label in zip(scores, labels)
    )
    looks = [
        (100 * correct / seen, "it is a percentage: return a share between 0 and 1"),
        (correct, "it is the number of correct predictions: divide by the number of samples"),
        (0, nothing),
        (anywhere / seen, nothing),
        (each_with_each / seen, "each prediction was compared with each label of its batch: both must have the shape (b,), "
         "so leave out keepdim=True"),
        (1 - correct / seen, "it is the share of wrong predictions: compare with =="),
        (correct / len(sizes), "it is the mean number of correct predictions per batch: divide by the number of "
                               "samples, not of batches"),
        (correct / sizes[-1], "it is divided by the size of one batch: add up the sizes of all batches"),
        (hits[0] / sizes[0], "it is the accuracy of the first batch: is the return inside the loop?"),
        (hits[-1] / sizes[-1], "it is the accuracy of the last batch: set the counts to 0 before the loop, and add "
                               "to them with +="),
    ]  # fmt: skip
    if sizes[-1] == batch_size == 10:
        across = sum(
            (row.argmax(dim=0) == label).sum().item()
            for row, label in zip(scores, labels)
        )
        cause = "argmax is taken over the samples instead of over the digits: use .argmax(dim=1)"
        looks.append((across / seen, cause))
    if sizes[-1] < batch_size:
        mean_of_batches = sum(hit / size for hit, size in zip(hits, sizes)) / len(sizes)
        looks += [
            (mean_of_batches, "it is the mean of the batches' accuracies, in which each sample of a smaller batch "
             "counts for more: count the samples, and divide once"),
            (correct / (len(sizes) * batch_size), "it is divided by the number of batches times the batch size, but the "
             "last batch is smaller: add up len(labels)"),
            (sum(hits[:-1]) / sum(sizes[:-1]), "the last batch was left out: include its samples"),
            (sum(hits[:-1]) / seen, "the correct predictions of the last batch were left out: include them"),
        ]  # fmt: skip
    return looks


def compare_accuracy(answer, weight, images, labels, batch_size):
    """Raise Wrong unless the answer returns the accuracy on this test set, in eval mode
    and without gradients.
    """
    seen = answer.on_ranks(measure_there, weight, images, labels, batch_size)[0]
    _, _, hits, sizes = hits_of_each_batch(weight, images, labels, batch_size)
    ragged = f", the last one of {sizes[-1]}" if sizes[-1] < batch_size else ""
    checked = f"accuracy(model, loader), {sum(sizes)} samples in batches of {batch_size}{ragged}"
    expected, got = sum(hits) / sum(sizes), seen["share"]

    if any(seen["modes"]):
        cause = "dropout is still on and removes half of each image: model.eval() switches it off"
        raise Wrong(
            f"the mode of the model in {checked}",
            expected="eval",
            got="training",
            cause=cause,
        )
    if not isinstance(got, float):
        cause = "return one float: the correct predictions divided by the samples"
        cause = (
            "it returns None: is the return statement missing?"
            if got is None
            else cause
        )
        cause = (
            "it is a tensor: .item() returns its number"
            if isinstance(got, torch.Tensor)
            else cause
        )
        raise Wrong(
            checked, expected=f"a float, {expected:.4f}", got=told(got), cause=cause
        )
    if not math.isclose(got, expected, abs_tol=1e-5):
        looks = mistakes(weight, images, labels, batch_size)
        other = "count the correct predictions, count all samples, and divide once, at the end"
        cause = next(
            (cause for share, cause in looks if abs(got - share) < 1e-4), other
        )
        expected = f"{expected:.4f} ({sum(hits)} of {sum(sizes)})"
        raise Wrong(checked, expected=expected, got=f"{got:.4f}", cause=cause)
    if any(seen["recording"]):
        cause = (
            "evaluation needs no backward: put `with torch.no_grad():` around the loop"
        )
        checked = f"whether autograd records the model in {checked}"
        raise Wrong(checked, expected="no", got="yes", cause=cause)
