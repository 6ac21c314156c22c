"""Exercise 01: one device."""

import time
import warnings
from functools import partial

import torch
from torch.nn import functional as F

from ddp_course import lesson01
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
    return [
        ((images[:, None].double() - mean) / std).float()
        for images in (train_images, test_images)
    ]


@right("normalize")
def in_place_on_copies(train_images, test_images):
    train, test = scaled(train_images), scaled(test_images)
    mean, std = train.mean().item(), train.std().item()
    for images in (train, test):
        images.sub_(mean).div_(std + 1e-8)
    return train, test


@wrong(
    "normalize",
    r"test images (.|\n)*its own mean and standard deviation: use those of the training images",
)
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
        return (images - images.mean((2, 3), keepdim=True)) / images.std(
            (2, 3), keepdim=True
        )

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
    return (scaled(train_images) - 0.1307) / 0.3081, (
        scaled(test_images) - 0.1307
    ) / 0.3081


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


@wrong(
    "normalize",
    "^(?s:(?!.*another that does not come).*a loop does not end)",
    status="timed out",
)
def counts_for_ever(train_images, test_images):
    while True:
        time.sleep(0.1)


# ---- train_one_epoch ----


@right("train_one_epoch")
def ours(model, loader, optimizer):
    return lesson01.train_one_epoch(model, loader, optimizer, "cpu")


@right("train_one_epoch")
def resets_at_the_end(model, loader, optimizer):
    """zero_grad after the step, another way to write the loss, and a progress bar of
    dots.
    """
    losses = ()
    for step, (images, labels) in enumerate(loader):
        model.train(True)
        loss = -model(images).gather(1, labels[:, None]).mean()
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        losses += (float(loss),)
        print("." * step)
    return losses


@right("train_one_epoch")
def with_a_closure(model, loader, optimizer):
    def one_loss(images, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(images), labels
        )  # of log-probabilities: the same number
        loss.backward()
        return loss

    model.train()
    return [optimizer.step(partial(one_loss, *batch)).item() for batch in loader]


def train(model, loader, optimizer, order="zero forward backward step", returned=None):
    """A loop that does what `order` says, for each batch. returned: what it makes of a
    loss.
    """
    model.train()
    losses = []
    for images, labels in loader:
        for act in order.split():
            if act == "zero":
                optimizer.zero_grad()
            elif act == "forward":
                loss = F.nll_loss(model(images), labels)
            elif act == "backward":
                loss.backward()
            elif act == "step":
                optimizer.step()
        losses.append(returned(loss, labels) if returned else loss.item())
    return losses


@wrong("train_one_epoch", r"call optimizer.zero_grad\(\) for each batch")
def never_resets(model, loader, optimizer):
    return train(model, loader, optimizer, "forward backward step")


@wrong("train_one_epoch", "the step comes before backward")
def steps_before_backward(model, loader, optimizer):
    return train(model, loader, optimizer, "zero forward step backward")


@wrong("train_one_epoch", "the step comes before backward")
def steps_first_and_never_resets(model, loader, optimizer):
    return train(model, loader, optimizer, "forward step backward")


@wrong("train_one_epoch", "reset between backward and step")
def resets_too_late(model, loader, optimizer):
    return train(model, loader, optimizer, "forward backward zero step")


@wrong("train_one_epoch", "reset between backward and step")
def resets_too_late_by_hand(model, loader, optimizer):
    model.train()
    losses = []
    for images, labels in loader:
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_one_epoch", "took no step")
def never_steps(model, loader, optimizer):
    return train(model, loader, optimizer, "zero forward backward")


@wrong("train_one_epoch", r"loss.backward\(\) computes them")
def never_goes_backward(model, loader, optimizer):
    return train(model, loader, optimizer, "zero forward step")


@wrong("train_one_epoch", "more steps than batches")
def steps_twice(model, loader, optimizer):
    return train(model, loader, optimizer, "zero forward backward step step")


@wrong("train_one_epoch", r"begin with model.train\(\)")
def stays_in_eval_mode(model, loader, optimizer):
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_one_epoch", "belongs inside the loop")
def one_step_an_epoch(model, loader, optimizer):
    losses = train(model, loader, optimizer, "zero forward backward")
    optimizer.step()
    return losses


@wrong("train_one_epoch", "is the return inside the loop")
def returns_too_soon(model, loader, optimizer):
    return train(model, [next(iter(loader))], optimizer)


@wrong("train_one_epoch", "a batch was left out")
def full_batches_only(model, loader, optimizer):
    return train(
        model,
        [batch for batch in loader if len(batch[1]) == loader.batch_size],
        optimizer,
    )


@wrong("train_one_epoch", "the loss is the sum over the batch")
def sums_the_loss(model, loader, optimizer):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_one_epoch", "the given optimizer took no step")
def brings_its_own_optimizer(model, loader, optimizer):
    return train(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))


@wrong("train_one_epoch", "these are still tensors")
def returns_tensors(model, loader, optimizer):
    return train(model, loader, optimizer, returned=lambda loss, labels: loss)


@wrong("train_one_epoch", r"\.tolist\(\)")
def returns_one_tensor(model, loader, optimizer):
    return torch.tensor(train(model, loader, optimizer))


@wrong("train_one_epoch", "one number for the epoch")
def mean_of_the_epoch(model, loader, optimizer):
    losses = train(model, loader, optimizer)
    return sum(losses) / len(losses)


@wrong("train_one_epoch", "one loss for the whole epoch")
def last_loss_only(model, loader, optimizer):
    return train(model, loader, optimizer)[-1:]


@wrong("train_one_epoch", "multiplied by the size of its batch")
def sums_of_losses(model, loader, optimizer):
    return train(
        model,
        loader,
        optimizer,
        returned=lambda loss, labels: loss.item() * len(labels),
    )


@wrong("train_one_epoch", "mean of the losses so far")
def running_mean(model, loader, optimizer):
    losses = train(model, loader, optimizer)
    return [sum(losses[: end + 1]) / (end + 1) for end in range(len(losses))]


@wrong("train_one_epoch", "collect the losses in a list")
def returns_no_losses(model, loader, optimizer):
    train(model, loader, optimizer)


@wrong("train_one_epoch", "has no attribute 'sampler'", status="your code raised")
def wants_another_loader(model, loader, optimizer):
    model.sampler.set_epoch(0)
    return train(model, loader, optimizer)


@wrong(
    "train_one_epoch",
    "^(?s:(?!.*another that does not come).*a loop does not end)",
    status="timed out",
)
def trains_for_ever(model, loader, optimizer):
    while True:
        train(model, loader, optimizer)


@wrong("train_one_epoch", "", status="not attempted")
def not_begun(model, loader, optimizer):
    raise NotImplementedError


# ---- accuracy ----


@right("accuracy")
def our_counts(model, loader):
    correct, seen = lesson01.evaluate(model, loader, "cpu")
    return correct / seen


@right("accuracy")
def all_at_once(model, loader):
    """Every prediction first, one comparison at the end, and a warning; the model is
    put back into training mode.
    """
    model.eval()
    with torch.inference_mode():
        guesses = torch.cat([model(images).max(1).indices for images, _ in loader])
    model.train()
    labels = torch.cat([labels for _, labels in loader])
    warnings.warn(f"{len(labels)} samples", stacklevel=1)
    return torch.eq(guesses, labels).double().mean().item()


@right("accuracy")
@torch.no_grad()
def weighted_means(model, loader):
    """Accuracies of batches, each times its size, as NumPy numbers."""
    print("evaluating ...")
    model.train(False)
    share = 0
    for images, labels in loader:
        accuracy = (model(images).argmax(-1) == labels).numpy().mean(dtype="float32")
        share += accuracy * len(labels) / len(loader.dataset)
    return share


@torch.no_grad()
def hits(model, loader, dim=1):
    """Right answers and samples of each batch."""
    model.eval()
    counts = [
        ((model(images).argmax(dim) == labels).sum().item(), len(labels))
        for images, labels in loader
    ]
    return zip(*counts)


@wrong("accuracy", "mean of the batches' accuracies")
def mean_of_batches(model, loader):
    correct, seen = hits(model, loader)
    return sum(c / s for c, s in zip(correct, seen)) / len(seen)


@wrong("accuracy", "number of batches times the batch size")
def divides_by_full_batches(model, loader):
    correct, _ = hits(model, loader)
    return sum(correct) / (len(loader) * loader.batch_size)


@wrong("accuracy", "the last batch was left out")
def drops_the_last_batch(model, loader):
    correct, seen = hits(
        model, [batch for batch in loader if len(batch[1]) == loader.batch_size]
    )
    return sum(correct) / sum(seen)


@wrong("accuracy", "correct predictions of the last batch were left out")
def drops_it_half(model, loader):
    correct, _ = hits(
        model, [batch for batch in loader if len(batch[1]) == loader.batch_size]
    )
    return sum(correct) / len(loader.dataset)


@wrong("accuracy", r"model.eval\(\) switches it off")
@torch.no_grad()
def leaves_dropout_on(model, loader):
    correct = sum(
        (model(images).argmax(dim=1) == labels).sum().item()
        for images, labels in loader
    )
    return correct / len(loader.dataset)


@wrong("accuracy", "torch.no_grad")
def records_gradients(model, loader):
    model.eval()
    correct = sum(
        (model(images).argmax(dim=1) == labels).sum().item()
        for images, labels in loader
    )
    return correct / len(loader.dataset)


@wrong("accuracy", "argmax is taken over the samples")
def argmax_over_samples(model, loader):
    correct, seen = hits(model, loader, dim=0)
    return sum(correct) / sum(seen)


@wrong("accuracy", "it is 0: do you compare the digits")
def argmax_over_everything(model, loader):
    correct, seen = hits(model, loader, dim=None)
    return sum(correct) / sum(seen)


@wrong("accuracy", "divide by the number of samples, not of batches")
def divides_by_batches(model, loader):
    correct, seen = hits(model, loader)
    return sum(correct) / len(seen)


@wrong("accuracy", "divided by the size of one batch")
def divides_by_one_batch(model, loader):
    correct, seen = hits(model, loader)
    return sum(correct) / seen[-1]


@wrong("accuracy", "before the loop, and add to them with")
def starts_again_each_batch(model, loader):
    correct, seen = hits(model, loader)
    return correct[-1] / seen[-1]


@wrong("accuracy", "is the return inside the loop")
def stops_after_one_batch(model, loader):
    correct, seen = hits(model, loader)
    return correct[0] / seen[0]


@wrong("accuracy", "a percentage")
def percentage(model, loader):
    correct, seen = hits(model, loader)
    return 100 * sum(correct) / sum(seen)


@wrong("accuracy", "the number of correct predictions: divide")
def counts_only(model, loader):
    correct, _ = hits(model, loader)
    return sum(correct)


@wrong("accuracy", "not with //")
def divides_whole_numbers(model, loader):
    correct, seen = hits(model, loader)
    return sum(correct) // sum(seen)


@wrong("accuracy", "the share of wrong predictions")
def error_rate(model, loader):
    correct, seen = hits(model, loader)
    return 1 - sum(correct) / sum(seen)


@wrong("accuracy", r"it is a tensor: \.item\(\)")
@torch.no_grad()
def returns_a_tensor(model, loader):
    model.eval()
    correct = sum(
        (model(images).argmax(dim=1) == labels).sum() for images, labels in loader
    )
    return correct / len(loader.dataset)


@wrong("accuracy", "is the return statement missing")
def prints_it(model, loader):
    correct, seen = hits(model, loader)
    print(sum(correct) / sum(seen))


@wrong(
    "accuracy",
    "only integer tensors|Boolean value of Tensor|ambiguous",
    status="your code raised",
)
@torch.no_grad()
def compares_batches_as_numbers(model, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        if model(images).argmax(dim=1) == labels:
            correct += 1
    return correct / len(loader.dataset)


@wrong(
    "accuracy",
    "^(?s:(?!.*another that does not come).*a loop does not end)",
    status="timed out",
)
def waits_for_the_last_batch(model, loader):
    seen = 0
    while seen != len(loader) * loader.batch_size + 1:
        seen = sum(len(labels) for _, labels in loader)


@wrong("accuracy", "leave out keepdim=True")
@torch.no_grad()
def keeps_a_dimension(model, loader):
    model.eval()
    hits = [
        (model(images).argmax(dim=1, keepdim=True) == labels).sum().item()
        for images, labels in loader
    ]
    return sum(hits) / len(loader.dataset)


@wrong("accuracy", "and not the highest scores")
@torch.no_grad()
def compares_scores(model, loader):
    model.eval()
    hits = [
        (model(images).max(dim=1)[0] == labels).sum().item()
        for images, labels in loader
    ]
    return sum(hits) / len(loader.dataset)


@wrong("normalize", "were already normalised")
def normalises_the_training_images_first(train_images, test_images):
    train, test = (
        images.unsqueeze(1).float() / 255 for images in (train_images, test_images)
    )
    train = (train - train.mean()) / train.std()
    test = (test - train.mean()) / train.std()
    return train, test
