"""Question 1: both sets, normalised with the numbers of the training images."""

import torch

from ddp_course.checks.claims import Claim, hold
from ddp_course.checks.ex01.watched import told
from ddp_course.judge.question import question


def a_set_of_images(count, dark, bright, generator):
    """Random images, uint8 (count, 28, 28): each with a random contrast, and all
    brighter towards the right.
    """
    contrast = torch.rand(count, 1, 1, generator=generator) * 0.5 + 0.5
    ramp = torch.linspace(0.6, 1.0, 28)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (dark + (bright - dark) * contrast * ramp * noise).round().byte()


def observe(normalize, several):
    """What `normalize` returns for several pairs of sets, one after the other, and the
    sets afterwards.
    """
    return [{"result": normalize(*given), "given": given} for given in several]


def claims(call, sets, first, seen):
    """Claims about one call. sets: the images that it was given, {name: tensor}. first:
    the training images of the first call.
    """
    for (name, images), after in zip(sets.items(), seen["given"]):
        yield Claim(
            f"the original {name} images after {call}", after, images,
            "the caller may still need the original images: do not use in-place operations, whose names end in _",
            told="unchanged", shown="changed",
        )  # fmt: skip
    result = seen["result"]
    cause = (
        "it returns None: is the return statement missing?"
        if result is None
        else "return both sets: return train, test"
    )
    two = isinstance(result, list) and len(result) == 2
    yield Claim(f"what {call} returns", two, True, cause, told="two tensors", shown=told(result))
    for (name, images), got in zip(sets.items(), result):
        yield from of_a_set(f"the {name} images that {call} returns", images, sets, first, got)


def of_a_set(what, images, sets, first, got):
    """Claims that `got` is `images`, normalised with the training set."""
    tensor = isinstance(got, torch.Tensor)
    yield Claim(what, tensor, True, "return two tensors, and nothing else", told="a tensor", shown=got)
    got = got.cpu()
    shape = [len(images), 1, 28, 28]
    yield Claim(what, list(got.shape), shape, "each image must keep its 28 rows of 28 pixels, in one channel", [
        ([*images.shape], "the channel dimension is missing: unsqueeze(1) turns (n, 28, 28) into (n, 1, 28, 28)"),
        ([*images.shape, 1], "the channel must be the second dimension, (n, 1, 28, 28), not the last: use unsqueeze(1)"),
        ([1, *images.shape], "the samples must be the first dimension and the channel the second: use unsqueeze(1), not "
                             "unsqueeze(0)"),
        ([len(sets["test"]), 1, 28, 28], "the two are in the wrong order: return train, test"),
    ], told=f"shape {tuple(shape)}", shown=f"shape {tuple(got.shape)}")  # fmt: skip
    cause = "convert to 32 bits with .float(): the weights of a network are float32, so its images must be float32, too"
    if not got.is_floating_point():
        cause = "integers cannot hold values between 0 and 1: convert with .float(), and do not convert back"
    yield Claim(what, str(got.dtype), "torch.float32", cause)
    x, train, both = (
        pixels.unsqueeze(1).double() / 255 for pixels in (images, sets["training"], torch.cat([*sets.values()]))
    )
    expected = (x - train.mean()) / train.std()
    cause = (
        "compute (pixels / 255 - mean) / std and nothing else, with one mean and one standard deviation, over all pixels of "
        "the training images"
    )
    if got.isnan().any():
        cause = "some values are nan: did you divide by a standard deviation of 0?"
    mistakes = lambda: other_ways(x, train, both, first.double() / 255)
    # to three digits it does not matter whether the sum of squares is divided by n or by n - 1
    yield Claim(what, got, expected, cause, mistakes, digits=3, told=in_words(expected), shown=in_words(got))


def other_ways(x, train, both, first):
    """Common mistakes: [(the pixels that they give, the cause)]. x: one of the two sets;
    both: the two together; first: the training images of the first call; from 0 to 1.
    """
    mean, std = train.mean(), train.std()
    below = min(1, len(x) - 1)  # one image has no deviation
    deviate = lambda pixels, dim: (pixels.mean(dim, keepdim=True), pixels.std(dim, correction=below, keepdim=True))
    by = lambda mean, std: (x - mean) / std
    of_its_own = "was normalised with its own mean and standard deviation:"
    return [
        (by(first.mean(), first.std()), "the mean and standard deviation are those of the first call: compute them anew in "
                                        "each call"),
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
        (by(std, mean), "mean and standard deviation are swapped: subtract the mean, divide by the standard deviation"),
        (by(x.mean(), x.std()), f"this set {of_its_own} use those of the training images for both sets"),
        (by(x.mean(), std), "the mean is this set's own: use that of the training images for both sets"),
        (by(mean, x.std()), "the standard deviation is this set's own: use that of the training images for both sets"),
        (by(both.mean(), both.std()), "the mean and standard deviation were computed over both sets: use those of the "
                                      "training images"),
        (by(*deviate(x, (1, 2, 3))), f"each image {of_its_own} compute them once, over all images"),
        (by(*deviate(x, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(*deviate(train, 0)), f"each pixel {of_its_own} compute them once, over all pixels"),
        (by(0.1307, 0.3081), "0.1307 and 0.3081 are MNIST's numbers: compute them from the given training images"),
        (by(0.3054, 0.3246), "0.3054 and 0.3246 are the digits' numbers: compute them from the given training images"),
        (by(0.5, 0.5), "0.5 and 0.5 are only a guess: compute the mean and standard deviation of the training images"),
    ]  # fmt: skip


def in_words(pixels):
    first = ", ".join(f"{pixel:.3f}" for pixel in pixels.flatten()[:3].tolist())
    mean = round(pixels.mean().item(), 3) + 0.0  # avoids printing -0.000
    std = pixels.std().item()
    return f"pixels {first}, ..., with mean {mean:.3f} and standard deviation {std:.3f}"


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
    several = {}
    for call in ("normalize(train_images, test_images)", "the second call of normalize"):
        sizes = draw.sample(range(30, 61), 2)
        bright = draw.randint(100, 130), draw.randint(180, 220)
        several[call] = (
            a_set_of_images(sizes[0], 0, bright[0], generator),
            a_set_of_images(sizes[1], 60, bright[1], generator),
        )
    # more images than anybody tries by hand, whose squares do not fit into 32 bits; and a single one
    several["normalize, with 1,200 training images and one test image,"] = (
        a_set_of_images(1200, 0, 255, generator),
        a_set_of_images(1, 60, 255, generator),
    )
    given = [*several.values()]
    for call, pair, seen in zip(several, given, answer.on_ranks(observe, given)[0]):
        hold(claims(call, dict(zip(("training", "test"), pair)), given[0][0], seen))
