"""Exercise 01: one device."""

import copy
import io
import math
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from ddp_course import lesson01
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mutants import right, wrong

# ---- normalize ----


def scaled(images):
    return images.unsqueeze(1).float() / 255


@right("normalize")
def biased_and_talkative(train_images, test_images):
    """The standard deviation with n instead of n - 1, and a generator instead of two
    lines.
    """
    train = scaled(train_images)
    std, mean = torch.std_mean(train, correction=0)
    print(f"mean {mean:.4f}, standard deviation {std:.4f}")
    return tuple((images - mean) / std for images in (train, scaled(test_images)))


@right("normalize")
def never_divides(train_images, test_images):
    """The 255 cancels out, in NumPy and 64 bits."""
    pixels = train_images.numpy().astype("float64")
    mean, std = pixels.mean(), pixels.std(ddof=1)
    warnings.warn("pixels of up to 255", stacklevel=1)
    return [((images[:, None].double() - mean) / std).float() for images in (train_images, test_images)]


@right("normalize")
def in_place_on_copies(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    mean, std = train.mean().item(), train.std().item()
    for images in (train, test):
        images.sub_(mean).div_(std + 1e-8)
    return train, test


@wrong("normalize", r"test images (.|\n)*its own mean and standard deviation: use those of the training images")
def each_set_by_itself(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    return (train - train.mean()) / train.std(), (test - test.mean()) / test.std()


@wrong("normalize", "the mean is this set's own")
def test_set_with_its_own_mean(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    return (train - train.mean()) / train.std(), (test - test.mean()) / train.std()


@wrong("normalize", "computed over both sets")
def both_sets_together(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    pixels = torch.cat([train, test])
    return (train - pixels.mean()) / pixels.std(), (test - pixels.mean()) / pixels.std()


@wrong("normalize", "each image was normalised with its own mean")
def image_by_image(train_images, test_images):
    def normal(images):
        return (images - images.mean((2, 3), keepdim=True)) / images.std((2, 3), keepdim=True)

    return normal(scaled(train_images)), normal(scaled(test_images))


@wrong("normalize", "each pixel was normalised with its own mean")
def pixel_by_pixel(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    return (train - train.mean(0)) / train.std(0), (test - train.mean(0)) / train.std(0)


@wrong("normalize", "divided by the variance")
def variance(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    return (train - train.mean()) / train.var(), (test - train.mean()) / train.var()


@wrong("normalize", "not normalised: subtract the mean")
def only_scales(train_images, test_images):
    return scaled(train_images), scaled(test_images)


@wrong("normalize", "now divide by the standard deviation")
def only_centers(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    return train - train.mean(), test - train.mean()


@wrong("normalize", r"test images (.|\n)*not normalised: subtract the mean")
def forgets_the_test_set(train_images, test_images):
    train = scaled(train_images)
    return (train - train.mean()) / train.std(), scaled(test_images)


@wrong("normalize", "divide the pixels by 255, too")
def does_not_divide_the_pixels(train_images, test_images):
    train, test = train_images.unsqueeze(1).float(), test_images.unsqueeze(1).float()
    mean, std = (train / 255).mean(), (train / 255).std()
    return (train - mean) / std, (test - mean) / std


@wrong("normalize", "MNIST's numbers")
def what_everybody_copies(train_images, test_images):
    return (scaled(train_images) - 0.1307) / 0.3081, (scaled(test_images) - 0.1307) / 0.3081


@wrong("normalize", "the channel dimension is missing")
def without_a_channel(train_images, test_images):
    train, test = train_images / 255, test_images / 255
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@wrong("normalize", r"not unsqueeze\(0\)")
def channel_first_of_all(train_images, test_images):
    train, test = train_images[None] / 255, test_images[None] / 255
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@wrong("normalize", "do not use in-place operations")
def changes_its_inputs(train_images, test_images):
    train, test = train_images.unsqueeze_(1) / 255, test_images.unsqueeze_(1) / 255
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@wrong("normalize", "32 bits")
def in_64_bits(train_images, test_images):
    train, test = scaled(train_images).double(), scaled(test_images).double()
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@wrong("normalize", "wrong order: return train, test")
def test_set_first(train_images, test_images):
    return tuple(reversed(in_place_on_copies(train_images, test_images)))


@wrong("normalize", "is the return statement missing")
def returns_nothing(train_images, test_images):
    in_place_on_copies(train_images, test_images)


@wrong("normalize", "could not infer output dtype", status="your code raised")
def mean_of_bytes(train_images, test_images):
    mean = train_images.mean()
    return train_images - mean, test_images - mean


@wrong("normalize", "^(?s:(?!.*another that does not come).*a loop does not end)", status="timed out")
def counts_for_ever(train_images, test_images):
    while True:
        time.sleep(0.1)


@wrong("normalize", "were already normalised")
def normalises_the_training_images_first(train_images, test_images):
    train, test = (images.unsqueeze(1).float() / 255 for images in (train_images, test_images))
    train = (train - train.mean()) / train.std()
    test = (test - train.mean()) / train.std()
    return train, test


@wrong("normalize", "mean and standard deviation are swapped")
def swaps_mean_and_deviation(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    std, mean = train.mean(), train.std()
    return (train - mean) / std, (test - mean) / std


@wrong("normalize", r"\(pixels / 255 - mean\) / std and nothing else")
def clamps_to_one(train_images, test_images):
    train, test = in_place_on_copies(train_images, test_images)
    return train.clamp(-1, 1), test.clamp(-1, 1)


@right("normalize")
@torch.no_grad()
def with_batch_norm(train_images, test_images):
    """Batch norm without weights: its running statistics are those of the training
    images.
    """
    norm = torch.nn.BatchNorm2d(1, eps=1e-9, momentum=1.0, affine=False)
    train = norm(scaled(train_images))
    return train, norm.eval()(scaled(test_images))


def kept(train_images, test_images):
    """The numbers of the first training images, in an attribute of the function."""
    if not hasattr(kept, "numbers"):
        train = scaled(train_images)
        kept.numbers = train.mean(), train.std()
    mean, std = kept.numbers
    return (scaled(train_images) - mean) / std, (scaled(test_images) - mean) / std


@wrong("normalize", "those of the first call: compute them anew")
def computes_the_numbers_once(train_images, test_images):
    return kept(train_images, test_images)


@wrong("normalize", "one mean and one standard deviation, over all pixels")
def a_few_images_are_enough(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    few = train[:4]
    return (train - few.mean()) / few.std(), (test - few.mean()) / few.std()


@wrong("normalize", "one mean and one standard deviation, over all pixels")
def to_the_range_of_the_training_images(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    low, high = train.min(), train.max()
    return (train - low) / (high - low), (test - low) / (high - low)


@right("normalize")
def mean_of_squares(train_images, test_images):
    """The variance as the mean of squares minus the square of the mean, image by image."""
    total = squares = 0
    for image in train_images:
        total += (image.double() / 255).sum().item()
        squares += (image.double() / 255).square().sum().item()
    mean = total / train_images.numel()
    std = (squares / train_images.numel() - mean**2) ** 0.5
    return tuple(
        torch.stack([(image.float()[None] / 255 - mean) / std for image in images])
        for images in (train_images, test_images)
    )


@wrong("normalize", "each image must keep its 28 rows")
def squeezes_one_image(train_images, test_images):
    """Of a single image, squeeze() removes the first dimension."""
    train, test = ((images.float() / 255).squeeze().unsqueeze(1) for images in (train_images, test_images))
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@wrong("normalize", "one mean and one standard deviation, over all pixels|some values are nan")
def squares_in_32_bits(train_images, test_images):
    """The sum of the squares of many images does not fit into an int32."""
    count = train_images.numel()
    mean = train_images.sum(dtype=torch.int32).item() / count
    squares = train_images.int().square().sum(dtype=torch.int32).item() / count
    std = abs(squares - mean**2) ** 0.5
    return tuple((images[:, None].float() - mean) / std for images in (train_images, test_images))


@wrong("normalize", "one mean and one standard deviation, over all pixels")
def from_the_first_hundred(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    mean, std = train[:100].mean(), train[:100].std()
    return (train - mean) / std, (test - mean) / std


@wrong("normalize", "one mean and one standard deviation, over all pixels")
def mean_of_the_images_deviations(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    mean, std = train.mean(), train.std(dim=(1, 2, 3)).mean()
    return (train - mean) / std, (test - mean) / std


@right("normalize")
def scaled_to_their_brightest_pixel(train_images, test_images):
    """By which pixels are divided first makes no difference."""
    train, test = (images.unsqueeze(1) / train_images.max() for images in (train_images, test_images))
    return (train - train.mean()) / train.std(), (test - train.mean()) / train.std()


@right("normalize")
def as_one_linear_map(train_images, test_images):
    std, mean = torch.std_mean(train_images.double())
    return tuple(torch.add(-mean / std, images, alpha=1 / std.item())[:, None].float()
                 for images in (train_images, test_images))  # fmt: skip


# ---- train_one_epoch ----


@right("train_one_epoch")
def sums_and_divides(model, loader, optimizer, limit):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = torch.zeros(())
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers, reduction="sum") / len(labels)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return torch.stack(losses).tolist()


@right("train_one_epoch")
def weighs_and_resets_at_the_end(model, loader, optimizer, limit):
    """Pieces by index, the smaller piece first, zero_grad after the step, and a progress
    bar of dots.
    """
    losses = ()
    for step, (images, labels) in enumerate(loader):
        loss_of_batch = 0
        model.train(True)
        for end in range(len(labels), 0, -limit):
            begin = max(0, end - limit)
            loss = -model(images[begin:end]).gather(1, labels[begin:end, None]).mean()
            loss = loss * (end - begin) / len(labels)
            loss.backward()
            loss_of_batch = loss_of_batch + loss
        optimizer.step()
        model.zero_grad(set_to_none=False)
        losses += (loss_of_batch,)
        print("." * step)
    return tuple(map(float, losses))


@right("train_one_epoch")
def scales_the_gradients_at_the_end(model, loader, optimizer, limit):
    """Sums of losses, in pieces of equal size, and gradients divided before the step."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        pieces = math.ceil(len(labels) / limit)
        total = 0
        for piece, answers in zip(images.chunk(pieces), labels.chunk(pieces)):
            loss = F.cross_entropy(model(piece), answers, reduction="sum")
            loss.backward()
            total += loss.data
        for parameter in model.parameters():
            parameter.grad /= len(labels)
        optimizer.step()
        losses.append(total / len(labels))
    return [np.float64(loss) for loss in losses]


@right("train_one_epoch")
def with_a_closure(model, loader, optimizer, limit):
    def one_loss(images, labels):
        optimizer.zero_grad()
        total = 0
        for place in torch.arange(len(labels)).split(limit):
            loss = F.nll_loss(model(images[place]), labels[place]) * len(place)
            (loss / len(labels)).backward()
            total = total + loss.detach()
        return total / len(labels)

    model.train()
    return torch.stack([optimizer.step(partial(one_loss, *batch)) for batch in loader]).tolist()


def mean_of_samples(piece, batch, pieces):
    return piece / batch


def train(model, loader, optimizer, limit, share=mean_of_samples, order="zero pieces step",
          within="forward backward", cut=torch.split, returned=None):  # fmt: skip
    """A loop with places to go wrong. order: of each batch; within: of each piece;
    returned: what it makes of the losses of a batch's pieces and their sizes.
    """
    model.train()
    losses = []
    for images, labels in loader:
        of_pieces, sizes = [], []
        for act in order.split():
            if act == "zero":
                optimizer.zero_grad()
            elif act == "step":
                optimizer.step()
            else:
                cuts = list(zip(cut(images, limit), cut(labels, limit)))
                for piece, answers in cuts:
                    for inner in within.split():
                        if inner == "forward":
                            loss = F.nll_loss(model(piece), answers)
                            of_pieces.append(loss.item())
                            sizes.append(len(answers))
                        elif inner == "backward":
                            part = share(len(answers), len(labels), len(cuts))
                            (loss * part).backward()
                        elif inner == "zero":
                            optimizer.zero_grad()
                        elif inner == "step":
                            optimizer.step()
        if returned:
            losses += returned(of_pieces, sizes)
        else:
            losses.append(sum(map(math.prod, zip(of_pieces, sizes))) / sum(sizes))
    return losses


@wrong("train_one_epoch", "Invalid device|CUDA|device", status="your code raised")
def the_lessons_own(model, loader, optimizer, limit):
    return lesson01.train_one_epoch(model, loader, optimizer, limit)


@wrong("train_one_epoch", r"expected +at most \d(.|\n)*cut each batch into pieces")
def the_lessons_own_on_the_cpu(model, loader, optimizer, limit):
    return lesson01.train_one_epoch(model, loader, optimizer, "cpu")


@wrong("train_one_epoch", "the pieces count the same, although the last one is smaller")
def mean_of_means(model, loader, optimizer, limit):
    share = lambda piece, batch, pieces: 1 / pieces
    return train(model, loader, optimizer, limit, share)


@wrong("train_one_epoch", "gradients of the pieces are added up, but each is already a mean")
def adds_means(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, lambda piece, batch, pieces: 1)


@wrong("train_one_epoch", "the loss is the sum over the samples")
def sums_the_loss(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, lambda piece, batch, pieces: piece)


@wrong("train_one_epoch", "divided by the loader's batch size, but the last batch is smaller")
def divides_by_full_batches(model, loader, optimizer, limit):
    share = lambda piece, batch, pieces: piece / loader.batch_size
    return train(model, loader, optimizer, limit, share)


@wrong("train_one_epoch", "must first be multiplied by those in the piece")
def divides_means_by_the_batch(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, lambda piece, batch, pieces: 1 / batch)


@wrong("train_one_epoch", "it takes a step for each piece")
def a_step_per_piece(model, loader, optimizer, limit):
    within = "zero forward backward step"
    return train(model, loader, optimizer, limit, order="pieces", within=within)


@wrong("train_one_epoch", "only those of its last piece are left")
def resets_for_each_piece(model, loader, optimizer, limit):
    within = "zero forward backward"
    return train(model, loader, optimizer, limit, order="pieces step", within=within)


@wrong("train_one_epoch", "only those of its last piece are left|backward for each piece")
def goes_backward_for_the_last_piece_only(model, loader, optimizer, limit):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = 0
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers)
            total += loss.item() * len(answers) / len(labels)
        loss.backward()
        optimizer.step()
        losses.append(total)
    return losses


@wrong("train_one_epoch", "call backward for each piece, before the next forward")
def one_backward_for_all_pieces(model, loader, optimizer, limit):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        scores = torch.cat([model(piece) for piece in images.split(limit)])
        loss = F.nll_loss(scores, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@wrong("train_one_epoch", r"chunk\(k\) makes k pieces|at most \d")
def takes_chunk_for_split(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, cut=torch.chunk)


@wrong("train_one_epoch", "its last, smaller piece counts, too")
def whole_pieces_only(model, loader, optimizer, limit):
    cut = lambda batch, size: (
        [batch[begin : begin + size] for begin in range(0, len(batch) - size + 1, size)] or [batch]
    )
    return train(model, loader, optimizer, limit, cut=cut)


@wrong("train_one_epoch", "each sample is in one forward pass")
def the_last_piece_is_filled_up(model, loader, optimizer, limit):
    cut = lambda batch, size: [
        batch[max(0, min(begin, len(batch) - size)) :][:size] for begin in range(0, len(batch), size)
    ]
    return train(model, loader, optimizer, limit, cut=cut)


@wrong("train_one_epoch", r"call optimizer.zero_grad\(\) for each batch")
def never_resets(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, order="pieces step")


@wrong("train_one_epoch", "the step comes before backward")
def steps_before_the_pieces(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, order="zero step pieces")


@wrong("train_one_epoch", "reset between backward and step")
def resets_too_late(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, order="pieces zero step")


@wrong("train_one_epoch", "took no step")
def never_steps(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, order="zero pieces")


@wrong("train_one_epoch", "took no step")
def steps_by_hand(model, loader, optimizer, limit):
    """Plain SGD on the parameters, in place of the optimizer's step."""
    model.train()
    losses = []
    for images, labels in loader:
        model.zero_grad()
        total = 0
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers) * len(answers) / len(labels)
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= optimizer.param_groups[0]["lr"] * parameter.grad
        losses.append(total)
    return losses


@wrong("train_one_epoch", r"loss.backward\(\) computes them")
def never_goes_backward(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, within="forward")


@wrong("train_one_epoch", "more steps than batches")
def steps_twice(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, order="zero pieces step step")


@wrong("train_one_epoch", r"begin with model.train\(\)")
def stays_in_eval_mode(model, loader, optimizer, limit):
    model.train = lambda mode=True: model
    return sums_and_divides(model, loader, optimizer, limit)


@wrong("train_one_epoch", "belongs inside the loop")
def one_step_an_epoch(model, loader, optimizer, limit):
    losses = train(model, loader, optimizer, limit, order="zero pieces")
    optimizer.step()
    return losses


@wrong("train_one_epoch", "is the return inside the loop")
def returns_too_soon(model, loader, optimizer, limit):
    return train(model, [next(iter(loader))], optimizer, limit)


@wrong("train_one_epoch", "a batch was left out: the last, smaller one")
def full_batches_only(model, loader, optimizer, limit):
    full = [batch for batch in loader if len(batch[1]) == loader.batch_size]
    return train(model, full, optimizer, limit)


@wrong("train_one_epoch", "a batch was left out: the first one")
def skips_the_first_batch(model, loader, optimizer, limit):
    batches = iter(loader)
    next(batches)
    return train(model, batches, optimizer, limit)


@wrong("train_one_epoch", r"takes images \(b, 1, 28, 28\)", status="your code raised")
def flattens_the_images(model, loader, optimizer, limit):
    flat = [(images.flatten(1), labels) for images, labels in loader]
    return train(model, flat, optimizer, limit)


@wrong("train_one_epoch", "the given optimizer took no step")
def brings_its_own_optimizer(model, loader, optimizer, limit):
    return train(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), limit)


@wrong("train_one_epoch", "nothing but the given optimizer, as it is, change the weights")
def clips_as_well(model, loader, optimizer, limit):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = 0
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers) * len(answers) / len(labels)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(total)
    return losses


@wrong("train_one_epoch", "each piece is divided by `limit`")
def divides_by_the_limit(model, loader, optimizer, limit):
    share = lambda piece, batch, pieces: piece / limit
    return train(model, loader, optimizer, limit, share)


@wrong("train_one_epoch", "in the order of the loader")
def batches_backwards(model, loader, optimizer, limit):
    return train(model, [*loader][::-1], optimizer, limit)[::-1]


@wrong("train_one_epoch", "as it is, change the weights")
def scales_the_learning_rate(model, loader, optimizer, limit):
    for group in optimizer.param_groups:
        group["lr"] *= limit
    return train(model, loader, optimizer, limit)


@wrong("train_one_epoch", "each sample is in one forward pass")
def measures_the_loss_beforehand(model, loader, optimizer, limit):
    """A second forward pass for the loss, without gradients."""
    losses = []
    for images, labels in loader:
        with torch.no_grad():
            pieces = zip(images.split(limit), labels.split(limit))
            model.train()
            of_pieces = [F.nll_loss(model(x), y, reduction="sum") for x, y in pieces]
        train(model, [(images, labels)], optimizer, limit)
        losses.append((sum(of_pieces) / len(labels)).item())
    return losses


@right("train_one_epoch")
def sets_the_gradients_by_hand(model, loader, optimizer, limit):
    """torch.autograd.grad for each piece, sample by sample; the sum is put into .grad."""
    model.train()
    losses, parameters = [], [*model.parameters()]
    for images, labels in loader:
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        total = torch.tensor(0.0)
        for image, label in zip(images.split(1), labels.split(1)):
            loss = F.nll_loss(model(image), label)
            for gradient, more in zip(gradients, torch.autograd.grad(loss, parameters)):
                gradient += more / len(labels)
            total += loss.detach() / len(labels)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.step()
        losses.append(total)
    return [float(total) for total in losses]


@wrong("train_one_epoch", "losses of the pieces: return one for each batch")
def losses_of_pieces(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, returned=lambda of, sizes: of)


@wrong("train_one_epoch", "it is the loss of the last piece")
def loss_of_the_last_piece(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit, returned=lambda of, sizes: of[-1:])


@wrong("train_one_epoch", "it is the mean of the pieces' losses")
def mean_loss_of_pieces(model, loader, optimizer, limit):
    returned = lambda of, sizes: [sum(of) / len(of)]
    return train(model, loader, optimizer, limit, returned=returned)


@wrong("train_one_epoch", "it is the last piece's part of the loss")
def last_part_of_the_loss(model, loader, optimizer, limit):
    returned = lambda of, sizes: [of[-1] * sizes[-1] / sum(sizes)]
    return train(model, loader, optimizer, limit, returned=returned)


@wrong("train_one_epoch", "multiplied by the size of its batch")
def sums_of_losses(model, loader, optimizer, limit):
    returned = lambda of, sizes: [sum(map(math.prod, zip(of, sizes)))]
    return train(model, loader, optimizer, limit, returned=returned)


@wrong("train_one_epoch", "losses of all batches so far add up")
def never_begins_anew(model, loader, optimizer, limit):
    losses = train(model, loader, optimizer, limit)
    return [sum(losses[: end + 1]) for end in range(len(losses))]


@wrong("train_one_epoch", "these are still tensors")
def returns_tensors(model, loader, optimizer, limit):
    return [*map(torch.tensor, train(model, loader, optimizer, limit))]


@wrong("train_one_epoch", r"\.tolist\(\)")
def returns_one_tensor(model, loader, optimizer, limit):
    return torch.tensor(train(model, loader, optimizer, limit))


@wrong("train_one_epoch", "one number for the epoch")
def mean_of_the_epoch(model, loader, optimizer, limit):
    losses = train(model, loader, optimizer, limit)
    return sum(losses) / len(losses)


@wrong("train_one_epoch", "one loss for the whole epoch")
def last_loss_only(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit)[-1:]


@wrong("train_one_epoch", "mean of the losses so far")
def running_mean(model, loader, optimizer, limit):
    losses = train(model, loader, optimizer, limit)
    return [sum(losses[: end + 1]) / (end + 1) for end in range(len(losses))]


@wrong("train_one_epoch", "collect the losses in a list")
def returns_no_losses(model, loader, optimizer, limit):
    train(model, loader, optimizer, limit)


@wrong("train_one_epoch", "gradients stay switched off")
def gradients_off_at_the_end(model, loader, optimizer, limit):
    losses = train(model, loader, optimizer, limit)
    torch.set_grad_enabled(False)
    return losses


@wrong("train_one_epoch", "cut each batch into pieces|at most")
def always_pieces_of_four(model, loader, optimizer, limit):
    return train(model, loader, optimizer, 4)


@wrong("train_one_epoch", "has no attribute 'sampler'", status="your code raised")
def wants_another_loader(model, loader, optimizer, limit):
    model.sampler.set_epoch(0)
    return train(model, loader, optimizer, limit)


@wrong("train_one_epoch", "given to the model more than once")
def with_checkpoints(model, loader, optimizer, limit):
    """Little memory indeed, but each piece is computed twice."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        rows = [checkpoint(model, piece, use_reentrant=False) for piece in images.split(limit)]
        loss = F.nll_loss(torch.cat(rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_one_epoch", "a less precise type than float32")
def in_16_bits(model, loader, optimizer, limit):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sums_and_divides(model, loader, optimizer, limit)


@wrong("train_one_epoch", "Is one of the pieces empty")
def ends_with_an_empty_piece(model, loader, optimizer, limit):
    """Only where `limit` divides the batch: the mean over no samples is nan."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = 0.0
        for begin in range(0, len(labels) + 1, limit):
            piece = slice(begin, begin + limit)
            share = len(labels[piece]) / len(labels)
            loss = F.nll_loss(model(images[piece]), labels[piece]) * share
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


@right("train_one_epoch")
def with_gradients_by_autograd_grad(model, loader, optimizer, limit):
    model.train()
    losses, weights = [], list(model.parameters())
    for images, labels in loader:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        losses.append(torch.zeros(()))
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers, reduction="sum") / len(labels)
            for weight, grad in zip(weights, torch.autograd.grad(loss, weights)):
                weight.grad += grad
            losses[-1] += loss.detach()
        optimizer.step()
    return [loss.item() for loss in losses]


def once_per(batch_or_piece, fetch):
    """A right epoch that fetches something of each batch's or each piece's loss."""

    def epoch(model, loader, optimizer, limit):
        model.train()
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            total = 0
            for piece, answers in zip(images.split(limit), labels.split(limit)):
                loss = F.nll_loss(model(piece), answers, reduction="sum") / len(labels)
                loss.backward()
                total += loss.detach()
                if batch_or_piece == "piece":
                    fetch(loss)
            if batch_or_piece == "batch":
                fetch(total)
            optimizer.step()
            losses.append(total)
        return torch.stack(losses).tolist()

    return epoch


@wrong("train_one_epoch", r"fetched between .*(.|\n)*got +[345]\n(.|\n)*waits until a GPU")
def appends_numbers(model, loader, optimizer, limit):
    """One item() per batch."""
    kept = []
    once_per("batch", lambda loss: kept.append(loss.item()))(model, loader, optimizer, limit)
    return kept


@wrong("train_one_epoch", "waits until a GPU")
def adds_numbers(model, loader, optimizer, limit):
    return train(model, loader, optimizer, limit)


@wrong("train_one_epoch", "waits until a GPU")
def looks_for_nan(model, loader, optimizer, limit):
    def refuse_nan(loss):
        if loss.isnan():
            raise ValueError("the loss is nan")

    return once_per("piece", refuse_nan)(model, loader, optimizer, limit)


@wrong("train_one_epoch", "waits until a GPU")
def prints_each_loss(model, loader, optimizer, limit):
    return once_per("batch", lambda loss: print(f"loss {loss:.4f}"))(model, loader, optimizer, limit)


@wrong("train_one_epoch", "waits until a GPU")
def moves_each_loss_to_the_cpu(model, loader, optimizer, limit):
    return once_per("batch", lambda loss: loss.cpu().numpy())(model, loader, optimizer, limit)


@wrong("train_one_epoch", "not with retain_graph=True")
def keeps_each_graph(model, loader, optimizer, limit):
    """With retain_graph=True, backward frees nothing, and the sum holds the graphs of all pieces."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = 0
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers, reduction="sum") / len(labels)
            loss.backward(retain_graph=True)
            total = total + loss
        optimizer.step()
        losses.append(total.detach())
    return torch.stack(losses).tolist()


@wrong("train_one_epoch", r"begin with model.train\(\)")
def switches_on_the_layers_only(model, loader, optimizer, limit):
    for layer in model.children():
        layer.train()
    model.train = lambda: None
    return once_per("epoch", None)(model, loader, optimizer, limit)


@right("train_one_epoch")
def sums_with_their_graphs(model, loader, optimizer, limit):
    """Without detach(): backward has freed what the graphs of the losses need."""
    model.train()
    losses = []
    for images, labels in loader:
        total = 0
        optimizer.zero_grad()
        for piece, answers in zip(images.split(limit), labels.split(limit)):
            loss = F.nll_loss(model(piece), answers, reduction="sum") / len(labels)
            loss.backward()
            total = total + loss
        optimizer.step()
        losses.append(total)
    return [loss.item() for loss in losses]


@right("train_one_epoch")
def fills_a_tensor_of_losses(model, loader, optimizer, limit):
    losses = torch.zeros(len(loader))
    model.train()
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        for place in range(math.ceil(len(labels) / limit)):
            piece = slice(place * limit, (place + 1) * limit)
            loss = F.nll_loss(model(images[piece]), labels[piece])
            loss *= len(labels[piece]) / len(labels)
            loss.backward()
            losses[number] += loss.detach()
        optimizer.step()
    return losses.tolist()


@wrong("train_one_epoch", "^(?s:(?!.*another that does not come).*a loop does not end)", status="timed out")
def trains_for_ever(model, loader, optimizer, limit):
    while True:
        train(model, loader, optimizer, limit)


@wrong("train_one_epoch", "", status="not attempted")
def not_begun(model, loader, optimizer, limit):
    raise NotImplementedError


# ---- predict_run ----

IMAGE = 28 * 28 * 4


def ceil(a, b):
    return -(-a // b)


@right("predict_run")
def with_divmod(samples, batch_size, limit, epochs):
    full, rest = divmod(samples, batch_size)
    passes = full * math.ceil(batch_size / limit) + math.ceil(rest / limit)
    largest = min(samples, batch_size, limit)
    return epochs * (full + (rest > 0)), epochs * passes, largest * IMAGE


@right("predict_run")
def by_playing_it_through(samples, batch_size, limit, epochs):
    steps = passes = largest = 0
    for _ in range(epochs):
        for batch in torch.zeros(samples, dtype=torch.uint8).split(batch_size):
            steps += 1
            for piece in batch.split(limit):
                passes += 1
                largest = max(largest, len(piece))
    return [steps, passes, largest * IMAGE]


@right("predict_run")
def in_numpy(samples, batch_size, limit, epochs):
    sizes = np.diff([*range(0, samples, batch_size), samples])
    passes = np.ceil(sizes / limit).astype(int).sum()
    largest = np.minimum(sizes.max(), limit)
    return np.int64(epochs * len(sizes)), epochs * passes, largest * IMAGE


def predict(samples, batch_size, limit, epochs, **wrong):
    """Right, but for what is given: a function of the same arguments, by its name."""
    right = with_divmod(samples, batch_size, limit, epochs)
    run = samples, batch_size, limit, epochs
    names = "steps", "passes", "bytes"
    return [wrong[n](*run) if n in wrong else r for n, r in zip(names, right)]


@wrong("predict_run", "the last, smaller batch needs a step, too")
def drops_the_last_batch_of_all(*run):
    return predict(*run, steps=lambda s, b, k, e: e * (s // b))


@wrong("predict_run", "each epoch ends with its own smaller batch")
def one_long_epoch(*run):
    return predict(*run, steps=lambda s, b, k, e: ceil(s * e, b))


@wrong("predict_run", "multiply by the epochs")
def forgets_the_epochs(*run):
    return predict(*run, steps=lambda s, b, k, e: ceil(s, b))


@wrong("predict_run", "there is no smaller last batch")
def always_one_more(*run):
    return predict(*run, steps=lambda s, b, k, e: e * (s // b + 1))


@wrong("predict_run", "a step is taken once per batch")
def a_step_for_each_piece(*run):
    return predict(*run, steps=lambda s, b, k, e: e * ceil(s, k))


@wrong("predict_run", "it must be a whole number")
def divides_with_one_slash(*run):
    return predict(*run, steps=lambda s, b, k, e: e * s / b)


@wrong("predict_run", "it must be a whole number")
def steps_as_a_float(*run):
    return predict(*run, steps=lambda s, b, k, e: float(e * ceil(s, b)))


@wrong("predict_run", "the last batch is smaller, and may have fewer pieces")
def all_batches_are_full(*run):
    return predict(*run, passes=lambda s, b, k, e: e * ceil(s, b) * ceil(b, k))


@wrong("predict_run", "a piece never has samples of two batches")
def pieces_across_batches(*run):
    return predict(*run, passes=lambda s, b, k, e: e * ceil(s, k))


@wrong("predict_run", "a batch that is larger than `limit` takes several")
def a_pass_per_batch(*run):
    return predict(*run, passes=lambda s, b, k, e: e * ceil(s, b))


@wrong("predict_run", "can be smaller than `limit`")
def always_the_limit(*run):
    return predict(*run, bytes=lambda s, b, k, e: k * IMAGE)


@wrong("predict_run", "all samples together can be fewer than a batch")
def forgets_few_samples(*run):
    return predict(*run, bytes=lambda s, b, k, e: min(b, k) * IMAGE)


@wrong("predict_run", "each float32 has 4 bytes")
def counts_numbers(*run):
    return predict(*run, bytes=lambda s, b, k, e: min(s, b, k) * 784)


@wrong("predict_run", "a whole batch never is in one forward pass")
def bytes_of_a_batch(*run):
    return predict(*run, bytes=lambda s, b, k, e: b * IMAGE)


@wrong("predict_run", "4 bytes, not 8|28 × 28 numbers of 4 bytes")
def in_double_precision(*run):
    return predict(*run, bytes=lambda s, b, k, e: min(s, b, k) * 784 * 8)


@wrong("predict_run", "the largest input has as many samples as fit")
def pieces_of_equal_size(*run):
    def largest(s, b, k, e):
        return ceil(min(s, b), ceil(min(s, b), k)) * IMAGE

    return predict(*run, bytes=largest)


@wrong("predict_run", "return three numbers")
def steps_alone(samples, batch_size, limit, epochs):
    return epochs * ceil(samples, batch_size)


@wrong("predict_run", "without a return")
def prints_the_numbers(*run):
    print(with_divmod(*run))


@wrong("predict_run", "ZeroDivisionError", status="your code raised")
def divides_by_the_rest(samples, batch_size, limit, epochs):
    full, rest = divmod(samples, batch_size)
    return full, limit // rest, epochs


@wrong("predict_run", "where `limit` divides a batch, there is no smaller last piece")
def always_a_last_piece(*run):
    """One pass too many where the samples that are left fill their pieces."""

    def passes(s, b, k, e):
        full, rest = divmod(s, b)
        return e * (full * ceil(b, k) + (rest // k + 1 if rest else 0))

    return predict(*run, passes=passes)


@wrong("predict_run", "where `limit` divides a batch, there is no smaller last piece")
def always_a_smaller_piece_in_full_batches(*run):
    return predict(*run, passes=lambda s, b, k, e: e * (s // b * (b // k + 1) + ceil(s % b, k)))


@wrong("predict_run", "the last batch of each epoch|in each epoch")
def what_is_left_goes_into_the_next_epoch(*run):
    """Batches of several epochs in one: right only where the batch size divides the samples."""

    def passes(s, b, k, e):
        full, rest = divmod(s * e, b)
        return full * ceil(b, k) + ceil(rest, k)

    return predict(*run, passes=passes)


@wrong("predict_run", "it must be a whole number", status="failed")
def sometimes_a_text(samples, batch_size, limit, epochs):
    steps, passes, largest = with_divmod(samples, batch_size, limit, epochs)
    return steps, passes if samples % batch_size else "as many as pieces", largest


@right("predict_run")
def by_a_list_of_sizes(samples, batch_size, limit, epochs):
    sizes = [min(batch_size, samples - begin) for begin in range(0, samples, batch_size)]
    passes = sum(len(range(0, size, limit)) for size in sizes)
    return [epochs * len(sizes), epochs * passes, min(*sizes[:1], limit) * torch.zeros(1, 28, 28).nbytes]


@right("predict_run")
def as_an_array(samples, batch_size, limit, epochs):
    sizes = np.diff([*range(0, samples, batch_size), samples])
    passes = np.ceil(sizes / limit).astype(int).sum()
    largest = min(sizes.max(), limit) * 28 * 28 * 4
    return np.array([epochs * len(sizes), epochs * passes, largest])


@wrong("predict_run", "needs the memory of the one before again")
def memory_of_all_epochs(samples, batch_size, limit, epochs):
    steps, passes, largest = with_divmod(samples, batch_size, limit, epochs)
    return steps, passes, epochs * largest


@wrong("predict_run", "", status="not attempted")
def predicts_nothing(samples, batch_size, limit, epochs):
    raise NotImplementedError


# ---- accuracy_by_digit ----


@contextmanager
def evaluating(model):
    before = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(before)


@right("accuracy_by_digit")
def with_bincount(model, loader):
    before = model.training
    model.eval()
    correct, seen = torch.zeros(10), torch.zeros(10)
    with torch.no_grad():
        for images, labels in loader:
            right_ones = labels[model(images).argmax(dim=1) == labels]
            seen += torch.bincount(labels, minlength=10)
            correct += torch.bincount(right_ones, minlength=10)
    model.train(before)
    return (correct / seen).tolist()


@right("accuracy_by_digit")
def sample_by_sample(model, loader):
    """Two dictionaries, and everything in plain Python."""
    with evaluating(model):
        hits, seen = Counter(), Counter()
        for images, labels in loader:
            for scores, label in zip(model(images).tolist(), labels.tolist()):
                seen[label] += 1
                hits[label] += scores.index(max(scores)) == label
    print(dict(seen))
    return tuple(hits[d] / seen[d] if d in seen else float("nan") for d in range(10))


@right("accuracy_by_digit")
@torch.no_grad()
def all_at_once(model, loader):
    """Every prediction first; a table of labels and predictions; NumPy's numbers, and a
    warning for 0 / 0.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    table = np.zeros((10, 10))
    guesses = torch.cat([model(images).max(1).indices for images, _ in loader])
    labels = torch.cat([labels for _, labels in loader])
    np.add.at(table, (labels.numpy(), guesses.numpy()), 1)
    for module, mode in modes.items():
        module.training = mode
    return list(np.float32(table.diagonal() / table.sum(axis=1)))


@right("accuracy_by_digit")
def a_pass_for_each_digit(model, loader):
    with evaluating(model), torch.inference_mode():
        shares = []
        for digit in range(10):
            hits = [(model(images).argmax(-1) == digit)[labels == digit] for images, labels in loader]
            shares.append(torch.cat(hits).float().mean().item())
    return shares


def measure(model, loader, guess=lambda scores: scores.argmax(dim=1)):
    """Per batch: a tensor (2, 10), of each digit's correct and all samples."""
    with evaluating(model):
        batches = []
        for images, labels in loader:
            hits = labels[guess(model(images)) == labels]
            both = [torch.bincount(digits, minlength=10) for digits in (hits, labels)]
            batches.append(torch.stack(both).double())
    return torch.stack(batches)


def shares_of(both):
    return (both[0] / both[1]).tolist()


@wrong("accuracy_by_digit", "a list with one float per digit")
def the_lessons_own_count(model, loader):
    return lesson01.evaluate(model, loader, "cpu")[0]


@wrong("accuracy_by_digit", "one float for each of the ten digits")
def the_lessons_two_counts(model, loader):
    return lesson01.evaluate(model, loader, "cpu")


@wrong("accuracy_by_digit", "it is the accuracy over all digits")
def the_lessons_share_ten_times(model, loader):
    correct, seen = lesson01.evaluate(model, loader, "cpu")
    return [correct / seen] * 10


@wrong("accuracy_by_digit", "divided by the number of predictions of each digit")
def precision_for_recall(model, loader):
    hits, guessed = torch.zeros(10), torch.zeros(10)
    with evaluating(model):
        for images, labels in loader:
            guesses = model(images).argmax(dim=1)
            hits += torch.bincount(guesses[guesses == labels], minlength=10)
            guessed += torch.bincount(guesses, minlength=10)
    return (hits / guessed).tolist()


@wrong("accuracy_by_digit", "every prediction of a digit is counted")
def counts_predictions(model, loader):
    guessed = torch.zeros(10)
    with evaluating(model):
        for images, _ in loader:
            guessed += torch.bincount(model(images).argmax(dim=1), minlength=10)
    return (guessed / measure(model, loader).sum(0)[1]).tolist()


@wrong("accuracy_by_digit", "the mean of the batches' accuracies")
def mean_of_batches(model, loader):
    batches = measure(model, loader)
    return (batches[:, 0] / batches[:, 1]).nanmean(dim=0).tolist()


@wrong("accuracy_by_digit", "the mean of the batches' accuracies")
def mean_of_batches_with_zeros(model, loader):
    batches = measure(model, loader)
    return (batches[:, 0] / batches[:, 1].clamp(min=1)).mean(dim=0).tolist()


@wrong("accuracy_by_digit", "nan where one batch has no sample|the mean of the batches'")
def mean_of_batches_with_nan(model, loader):
    batches = measure(model, loader)
    return (batches[:, 0] / batches[:, 1]).mean(dim=0).tolist()


@wrong("accuracy_by_digit", "return nan for it, not 0")
def zero_for_an_absent_digit(model, loader):
    correct, seen = measure(model, loader).sum(0)
    return (correct / seen.clamp(min=1)).tolist()


@wrong("accuracy_by_digit", "has no accuracy: return nan for it")
def minus_one_for_an_absent_digit(model, loader):
    return [-1.0 if math.isnan(s) else s for s in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "that the model gets right")
def one_of_the_first_two(model, loader):
    hits, seen = torch.zeros(10), torch.zeros(10)
    with evaluating(model):
        for images, labels in loader:
            first_two = model(images).topk(2).indices
            right_ones = (first_two == labels[:, None]).any(dim=1)
            hits += torch.bincount(labels[right_ones], minlength=10)
            seen += torch.bincount(labels, minlength=10)
    return (hits / seen).tolist()


@right("accuracy_by_digit")
def on_a_copy(model, loader):
    """The given model is not touched at all."""
    return with_bincount(copy.deepcopy(model), loader)


@wrong("accuracy_by_digit", r"remember model.training before model.eval\(\)")
def restores_the_outermost_module_only(model, loader):
    before = model.training
    shares = with_bincount(model.eval(), loader)
    model.training = before
    return shares


@wrong("accuracy_by_digit", "a digit without any sample is left out")
def skips_an_absent_digit(model, loader):
    correct, seen = measure(model, loader).sum(0)
    return (correct / seen)[seen > 0].tolist()


@wrong("accuracy_by_digit", "and nan for a digit without any sample")
def none_for_an_absent_digit(model, loader):
    return [None if math.isnan(s) else s for s in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "float division by zero|division by zero", status="your code raised")
def divides_by_zero(model, loader):
    correct, seen = measure(model, loader).sum(0).tolist()
    return [c / s for c, s in zip(correct, seen)]


@wrong("accuracy_by_digit", "the last, smaller batch was left out")
def drops_the_last_batch(model, loader):
    return (
        shares_of(measure(model, loader)[:-1].sum(0))
        if len(loader.dataset) % (loader.batch_size)
        else shares_of(measure(model, loader).sum(0))
    )


@wrong("accuracy_by_digit", "it is the accuracy of the last batch")
def starts_again_each_batch(model, loader):
    return shares_of(measure(model, loader)[-1])


@wrong("accuracy_by_digit", "is the return inside the loop")
def stops_after_one_batch(model, loader):
    return shares_of(measure(model, loader)[0])


@wrong("accuracy_by_digit", "divided by the number of all samples")
def divides_by_all_samples(model, loader):
    correct, seen = measure(model, loader).sum(0)
    return (correct / seen.sum()).tolist()


@wrong("accuracy_by_digit", "divided by all correct predictions")
def divides_by_all_hits(model, loader):
    correct, _ = measure(model, loader).sum(0)
    return (correct / correct.sum()).tolist()


@wrong("accuracy_by_digit", "these are percentages")
def percentages(model, loader):
    return [100 * share for share in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "numbers of correct predictions: divide")
def counts_only(model, loader):
    return measure(model, loader).sum(0)[0].tolist()


@wrong("accuracy_by_digit", "shares of wrong predictions")
def error_rates(model, loader):
    return [1 - share for share in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "only predictions with a probability above 1/2 count")
def sure_ones_only(model, loader):
    def guess(scores):
        sure = scores.exp().max(dim=1).values > 0.5
        return torch.where(sure, scores.argmax(dim=1), -1)

    return shares_of(measure(model, loader, guess).sum(0))


@wrong("accuracy_by_digit", "argmax is taken over the samples")
def argmax_over_samples(model, loader):
    guess = lambda scores: scores.argmax(dim=0)
    return shares_of(measure(model, loader, guess).sum(0))


@wrong("accuracy_by_digit", r"model.eval\(\) switches it off")
@torch.no_grad()
def leaves_dropout_on(model, loader):
    correct, seen = torch.zeros(10), torch.zeros(10)
    for images, labels in loader:
        hits = labels[model(images).argmax(dim=1) == labels]
        correct += torch.bincount(hits, minlength=10)
        seen += torch.bincount(labels, minlength=10)
    return (correct / seen).tolist()


@wrong("accuracy_by_digit", "torch.no_grad")
def records_gradients(model, loader):
    before = model.training
    model.eval()
    correct, seen = torch.zeros(10), torch.zeros(10)
    for images, labels in loader:
        hits = labels[model(images).argmax(dim=1) == labels]
        correct += torch.bincount(hits, minlength=10)
        seen += torch.bincount(labels, minlength=10)
    model.train(before)
    return (correct / seen).tolist()


@wrong("accuracy_by_digit", "gradients stay switched off")
def gradients_off_for_good(model, loader):
    torch.set_grad_enabled(False)
    shares = with_bincount(model, loader)
    torch.set_grad_enabled(False)
    return shares


@wrong("accuracy_by_digit", "do not change requires_grad")
def freezes_the_model(model, loader):
    model.requires_grad_(False)
    return with_bincount(model, loader)


@wrong("accuracy_by_digit", r"remember model.training before model.eval\(\)")
def leaves_the_model_in_eval_mode(model, loader):
    shares = with_bincount(model, loader)
    model.eval()
    return shares


@wrong("accuracy_by_digit", r"remember model.training before model.eval\(\)")
def always_goes_on_training(model, loader):
    shares = with_bincount(model, loader)
    model.train()
    return shares


@wrong("accuracy_by_digit", "it is a tensor")
def returns_a_tensor(model, loader):
    return torch.tensor(with_bincount(model, loader))


@wrong("accuracy_by_digit", "these are tensors")
def returns_ten_tensors(model, loader):
    return [*torch.tensor(with_bincount(model, loader))]


@wrong("accuracy_by_digit", "the numbers were rounded")
def rounds_to_two_digits(model, loader):
    return [round(share, 2) for share in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "is the return statement missing")
def prints_it(model, loader):
    print(with_bincount(model, loader))


@wrong("accuracy_by_digit", r"takes images \(b, 1, 28, 28\)", status="your code raised")
def one_flat_image_at_a_time(model, loader):
    with evaluating(model):
        return [model(image.flatten()).argmax() for images, _ in loader for image in images]


@wrong("accuracy_by_digit", "of them that the model gets right")
def compares_scores(model, loader):
    guess = lambda scores: scores.max(dim=1)[0].long()
    return shares_of(measure(model, loader, guess).sum(0))


@wrong("accuracy_by_digit", "too large for the memory")
def all_batches_in_one(model, loader):
    images, labels = map(torch.cat, zip(*loader))
    with evaluating(model):
        hits = model(images).argmax(dim=1) == labels
    return [hits[labels == digit].float().mean().item() for digit in range(10)]


@wrong("accuracy_by_digit", "of which no sample is recognised has the share 0")
def nan_where_none_is_right(model, loader):
    return [share or math.nan for share in with_bincount(model, loader)]


@wrong("accuracy_by_digit", "the parameters of the model changed")
def goes_on_in_64_bits(model, loader):
    return with_bincount(model.double(), [(images.double(), labels) for images, labels in loader])


@wrong("accuracy_by_digit", "the dropout of the model changed")
def dropout_of_nothing(model, loader):
    """Dropout is switched off for good."""
    model.dropout.p = 0.0
    return with_bincount(model, loader)


@wrong("accuracy_by_digit", "the gradients of the model changed")
def resets_the_gradients(model, loader):
    model.zero_grad()
    return with_bincount(model, loader)


@right("accuracy_by_digit")
def with_unique_labels(model, loader):
    hits, seen = [0] * 10, [0] * 10
    with evaluating(model):
        for images, labels in loader:
            guesses = model(images).topk(1, dim=1).indices.squeeze(1)
            for digit in labels.unique().tolist():
                seen[digit] += (labels == digit).sum().item()
                hits[digit] += (guesses[labels == digit] == digit).sum().item()
    return [h / s if s else math.nan for h, s in zip(hits, seen)]


@wrong("accuracy_by_digit", "^(?s:(?!.*another that does not come).*a loop does not end)", status="timed out")
def waits_for_the_last_batch(model, loader):
    seen = 0
    while seen != len(loader) * loader.batch_size + 1:
        seen = sum(len(labels) for _, labels in loader)


# ---- train_and_choose ----


class Choosing:
    """What the answers below share: all right."""

    def __call__(self, model, train_batches, test_batches, optimizer, epochs):
        self.model, self.tests, self.optimizer = model, test_batches, optimizer
        best, self.losses = None, []
        self.begin()
        for _ in range(epochs):
            self.begin_epoch()
            for inputs, labels in train_batches:
                self.step(inputs, labels)
            self.before_tests()
            self.losses.append(self.evaluated())
            if self.is_best():
                best = self.kept()
        return self.returned(best)

    def begin(self):
        pass

    def begin_epoch(self):
        self.model.train()

    def step(self, inputs, labels):
        self.optimizer.zero_grad()
        F.nll_loss(self.model(inputs), labels).backward()
        self.optimizer.step()

    def before_tests(self):
        self.model.eval()

    @torch.no_grad()
    def evaluated(self):
        pairs = [(F.nll_loss(self.model(inputs), labels).item(), len(labels)) for inputs, labels in self.tests]
        return self.mean(*zip(*pairs))

    def mean(self, means, sizes):
        return sum(mean * size for mean, size in zip(means, sizes)) / sum(sizes)

    def is_best(self):
        return self.losses[-1] == min(self.losses)

    def kept(self):
        return copy.deepcopy(self.model.state_dict())

    def returned(self, best):
        return best, self.losses


def chosen_by(kind):
    """As a function, which is what the question asks for."""

    def train_and_choose(model, train_batches, test_batches, optimizer, epochs):
        return kind()(model, train_batches, test_batches, optimizer, epochs)

    train_and_choose.__name__, train_and_choose.__module__ = kind.__name__, kind.__module__
    return train_and_choose


def right_choice(kind):
    right("train_and_choose")(chosen_by(kind))
    return kind


def wrong_choice(*given, **options):
    def register(kind):
        wrong("train_and_choose", *given, **options)(chosen_by(kind))
        return kind

    return register


def choosing_with(*bugs):
    """A repaired program in which some of the given bugs are left."""

    class Rest(Choosing):
        def begin(self):
            self.model.train()

        def begin_epoch(self):
            if "mode" not in bugs:
                self.model.train()

        def mean(self, means, sizes):
            return sum(means) / len(means) if "mean" in bugs else super().mean(means, sizes)

        def kept(self):
            return self.model.state_dict() if "alias" in bugs else super().kept()

    return Rest


IN_EVAL_MODE, MEAN_OF_MEANS, NO_COPY = "from the second epoch on", "a mean of the batches' means", "copies nothing"


@wrong("train_and_choose", MEAN_OF_MEANS)
def train_and_choose_as_given(model, train_batches, test_batches, optimizer, epochs):
    best, losses = None, []
    model.train()
    for _ in range(epochs):
        for inputs, labels in train_batches:
            optimizer.zero_grad()
            F.nll_loss(model(inputs), labels).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, labels in test_batches:
                total += F.nll_loss(model(inputs), labels).item()
        losses.append(total / len(test_batches))
        if losses[-1] == min(losses):
            best = model.state_dict()
    return best, losses


@wrong_choice(IN_EVAL_MODE)
class ChoosingInEvalMode(choosing_with("mode")):
    pass


@wrong_choice(MEAN_OF_MEANS)
class ChoosingByMeanOfMeans(choosing_with("mean")):
    pass


@wrong_choice(NO_COPY)
class ChoosingWithoutACopy(choosing_with("alias")):
    pass


@wrong_choice(MEAN_OF_MEANS)
class ChoosingWithModeAndMean(choosing_with("mode", "mean")):
    pass


@wrong_choice(IN_EVAL_MODE)
class ChoosingWithModeAndAlias(choosing_with("mode", "alias")):
    pass


@wrong_choice(MEAN_OF_MEANS)
class ChoosingWithMeanAndAlias(choosing_with("mean", "alias")):
    pass


@right_choice
class ChoosingRepaired(Choosing):
    pass


@right_choice
class ChoosingWithTrainAfterTests(choosing_with("mode")):
    """The mode is put back where the evaluation ends."""

    def evaluated(self):
        loss = super().evaluated()
        self.model.train()
        return loss


@right("train_and_choose")
def choosing_in_one_batch(model, train_batches, test_batches, optimizer, epochs):
    """All test batches as one; strictly smaller; a file in memory for the state."""
    inputs, labels = map(torch.cat, zip(*test_batches))
    best, smallest, losses = None, math.inf, []
    for _ in range(epochs):
        for images, classes in train_batches:
            loss = F.nll_loss(model.train()(images), classes)
            model.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
        with torch.inference_mode():
            losses.append(F.nll_loss(model.eval()(inputs), labels))
        if losses[-1] < smallest:
            smallest, best = losses[-1], io.BytesIO()
            torch.save(model.state_dict(), best)
    best.seek(0)
    return torch.load(best, weights_only=True), torch.stack(losses)


@right_choice
class ChoosingAmongAll(Choosing):
    """Keeps all states, and chooses at the end."""

    def begin(self):
        self.all = []

    def kept(self):
        pass

    def evaluated(self):
        self.all.append({name: value.detach().clone() for name, value in self.model.state_dict().items()})
        return super().evaluated()

    def returned(self, best):
        return [self.all[self.losses.index(min(self.losses))], self.losses]


@wrong_choice("evaluated in training mode")
class ChoosingInTrainingMode(Choosing):
    def before_tests(self):
        pass


@wrong_choice("the network is trained in eval mode: BatchNorm")
class ChoosingAlwaysInEvalMode(Choosing):
    def begin_epoch(self):
        self.model.eval()


@wrong_choice("divide by their number")
class ChoosingBySums(Choosing):
    def mean(self, means, sizes):
        return super().mean(means, sizes) * sum(sizes)


@wrong_choice("earlier steps are still there")
class ChoosingWithOldGradients(Choosing):
    def step(self, inputs, labels):
        F.nll_loss(self.model(inputs), labels).backward()
        self.optimizer.step()


@wrong_choice("What is divided by what")
class ChoosingByTheNumberOfTrainingSamples(Choosing):
    """Sums, divided by the number of test batches."""

    def mean(self, means, sizes):
        return super().mean(means, sizes) * sum(sizes) / len(sizes)


@wrong_choice(NO_COPY)
class ChoosingWithACopyOfTheDict(Choosing):
    def kept(self):
        return dict(self.model.state_dict())


@wrong_choice(NO_COPY)
class ChoosingDetached(Choosing):
    def kept(self):
        return {name: value.detach() for name, value in self.model.state_dict().items()}


@wrong_choice("the best has the smallest")
class ChoosingTheWorst(Choosing):
    def is_best(self):
        return self.losses[-1] == max(self.losses)


@wrong_choice("numbers of the first epoch|the best has the smallest")
class ChoosingTheFirst(Choosing):
    def is_best(self):
        return len(self.losses) == 1


@wrong_choice("buffers, such as BatchNorm's")
class ChoosingOnlyParameters(Choosing):
    def kept(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@wrong_choice("as the given program does")
class ChoosingAnswersWithTheState(Choosing):
    def returned(self, best):
        return best


@wrong_choice("one number per epoch")
class ChoosingAnswersWithOneLoss(Choosing):
    def returned(self, best):
        return best, [min(self.losses)]


@wrong_choice("numbers of the best epoch")
class ChoosingPutsTheBestBack(Choosing):
    """The model itself should end as the last epoch leaves it."""

    def returned(self, best):
        self.model.load_state_dict(best)
        return best, self.losses
