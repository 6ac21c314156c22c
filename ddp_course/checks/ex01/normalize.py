"""Question 1: both sets, normalised with the numbers of the training images."""

import math

import torch

from ddp_course.checks.ex01.watched import told
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong


def normalize_there(normalize, several):
    """What `normalize` returns for several pairs of sets, one after the other."""
    seen = []
    for train_images, test_images in several:
        before = train_images.clone(), test_images.clone()
        result = normalize(train_images, test_images)
        unchanged = [*map(torch.equal, before, (train_images, test_images))]
        seen.append({"result": result, "unchanged": unchanged})
    return seen


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
    several = []
    for _ in range(2):
        sizes = draw.sample(range(30, 61), 2)
        bright = draw.randint(100, 130), draw.randint(180, 220)
        train_images = a_set_of_images(sizes[0], 0, bright[0], generator)
        test_images = a_set_of_images(sizes[1], 60, bright[1], generator)
        several.append((train_images, test_images))
    seen = answer.on_ranks(normalize_there, several)[0]
    compare_sets("normalize(train_images, test_images)", *several[0], seen[0])
    refuse_kept_numbers(several, seen[1]["result"])
    compare_sets("the second call of normalize", *several[1], seen[1])


def refuse_kept_numbers(several, result):
    """Raise Wrong if a second call used the training images of the first."""
    (train_images, _), (_, test_images) = several
    train, test = train_images.double() / 255, test_images.double() / 255
    kept = ((test - train.mean()) / train.std()).unsqueeze(1)
    returned = result[-1] if isinstance(result, list) and result else None
    if not isinstance(returned, torch.Tensor) or returned.shape != kept.shape:
        return
    if distance(returned.double(), kept) < 1e-3:
        checked = "the test images that a second call, with other images, returns"
        cause = "the mean and standard deviation are those of the first call: compute them anew in each call"
        expected = (test - several[1][0].double().mean() / 255).unsqueeze(1)
        expected = expected / (several[1][0].double() / 255).std()
        raise Wrong(checked, expected=in_words(expected), got=in_words(returned), cause=cause)


def compare_sets(call, train_images, test_images, seen):
    """Raise Wrong unless a call returned both sets, normalised, and left the originals
    unchanged.
    """
    images = {"training": train_images, "test": test_images}
    for name, unchanged in zip(images, seen["unchanged"]):
        if not unchanged:
            checked = f"the original {name} images after {call}"
            cause = (
                "the caller may still need the original images: do not use in-place operations, whose names end in _"
            )
            raise Wrong(checked, expected="unchanged", got="changed", cause=cause)
    result = seen["result"]
    if not isinstance(result, list) or len(result) != 2:
        cause = "return both sets: return train, test"
        cause = "it returns None: is the return statement missing?" if result is None else cause
        raise Wrong(f"what {call} returns", expected="two tensors", got=told(result), cause=cause)
    for position, (name, of_set) in enumerate(images.items()):
        compare_images(f"the {name} images that {call} returns", of_set, position, images, result)


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
        raise Wrong(checked, expected="a tensor", got=got, cause="return two tensors, and nothing else")
    if got.shape != shape:
        causes = {
            tuple(images.shape): "the channel dimension is missing: unsqueeze(1) turns (n, 28, 28) into (n, 1, 28, 28)",
            (*images.shape, 1): "the channel must be the second dimension, (n, 1, 28, 28), not the last: use unsqueeze(1)",
            (1, *images.shape): "the samples must be the first dimension and the channel the second: use "
                                "unsqueeze(1), not unsqueeze(0)",
            (len(both["test"]), 1, 28, 28): "the two are in the wrong order: return train, test",
        }  # fmt: skip
        cause = causes.get(tuple(got.shape), "each image must keep its 28 rows of 28 pixels, in one channel")
        raise Wrong(checked, expected=f"shape {shape}", got=f"shape {tuple(got.shape)}", cause=cause)
    got = got.cpu()
    if got.dtype != torch.float32:
        cause = (
            "convert to 32 bits with .float(): the weights of a network are float32, so its images must be float32, too"
        )
        if not got.is_floating_point():
            cause = "integers cannot hold values between 0 and 1: convert with .float(), and do not convert back"
        raise Wrong(checked, expected="torch.float32", got=got.dtype, cause=cause)

    x, train = images.unsqueeze(1).double() / 255, both["training"].double() / 255
    mean, std = train.mean(), train.std()
    expected = (x - mean) / std
    if torch.allclose(got.double(), expected, rtol=1e-3, atol=1e-3):  # biased or unbiased: 0.00002 of it
        return
    looks = [(distance(got, value), cause) for value, cause in other_ways(x, both)]
    nearest, cause = min(looks, key=lambda look: look[0])
    if not nearest < 0.03:  # or not a number
        cause = (
            "compute (pixels / 255 - mean) / std and nothing else, with one mean and one standard deviation, over all "
            "pixels of the training images"
        )
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
    deviate = lambda pixels, dim: (pixels.mean(dim, keepdim=True), pixels.std(dim, keepdim=True))
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
        (by(std, mean), "mean and standard deviation are swapped: subtract the mean, divide by the standard deviation"),
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
