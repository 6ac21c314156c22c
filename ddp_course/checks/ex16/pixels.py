"""Question 2: a data set that does too much for each image."""

import gc
import math
import tracemalloc

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import Pixels as SlowPixels
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group

BATCH = 16
MOST = 8  # times the numbers of all images, per epoch
# times the bytes of the images that may be kept: a copy in uint8, which is counted twice
# if numpy made it, and small tables; as float32, the images would take 4
MOST_KEPT = 2.5
LARGE = 1000, 28  # a data set that is timed: images, and their side
MANY = 1203, 4  # a second data set: more images than a sample of them would have
BRIGHT = 300, 180  # a third one, whose sum is more than 32 bits can hold
LEAST_GAIN = 15  # a right answer gains more than 100, one with a mean per image 7


def a_data_set(count, side, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (count, side, side)
    images = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    # they get brighter, so no part of them has the mean and the deviation of all
    images = (images * torch.linspace(0.3, 1, count)[:, None, None]).byte()
    return images, torch.randint(10, (count,), generator=generator)


def a_bright_data_set(count, side):
    """White images with some black rows."""
    images = torch.full((count, side, side), 255, dtype=torch.uint8)
    images[:, ::16] = 0
    return images, torch.arange(count) % 10


def others(seed):
    """The data sets that are made while the first one is in use, by name."""
    return {
        f"a second data set, of {MANY[0]:,} images of {MANY[1]} × {MANY[1]}": a_data_set(*MANY, seed + 1),
        f"a third data set, of {BRIGHT[0]:,} bright images of {BRIGHT[1]} × {BRIGHT[1]}": a_bright_data_set(*BRIGHT),
    }


def observed(pixels, count, side, seed):
    """What two epochs deliver, and what the second one computes."""
    images, labels = a_data_set(count, side, seed)
    given = images.clone()
    list(DataLoader(TensorDataset(given), BATCH))  # what torch itself keeps
    before, wide = bytes_in_use(), len(wide_tensors(images.numel()))
    with trying("Pixels(images, labels)"):
        dataset = pixels(images, labels)
    with trying("an epoch of a DataLoader"):
        list(DataLoader(dataset, BATCH))
        kept = bytes_in_use() - before
        tracemalloc.stop()
        wide = len(wide_tensors(images.numel())) - wide
    ends = []
    for name, (other_images, other_labels) in others(seed).items():
        with trying(name):
            other = pixels(other_images, other_labels)
            ends.append([list(other[index]) for index in (0, len(other_images) - 1)])
    with trying("an epoch of a DataLoader"):
        with Work() as work:
            batches = [list(batch) for batch in DataLoader(dataset, BATCH)]
    with trying("dataset[3]"):
        one = list(dataset[3])
    return {
        "length": len(dataset), "batches": batches, "one": one, "numbers": work.numbers,
        "ends": ends, "kept": kept, "wide": wide, "changed": not torch.equal(images, given),
    }  # fmt: skip


def bytes_in_use():
    """The bytes of all tensors of this process, wherever they are kept, and of what
    Python and numpy have made since the first call.
    """
    tracemalloc.start()
    gc.collect()
    made, _ = tracemalloc.get_traced_memory()
    return made + watch.bytes_of([thing for thing in gc.get_objects() if type(thing) is torch.Tensor])


def wide_tensors(count):
    """The tensors with so many numbers of more than one byte each."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return [one for one in tensors if one.numel() >= count and one.element_size() > 1]


def timed(pixels, seed):
    """The seconds of some images of the answer, and of the slow program, in turn."""
    images, labels = a_data_set(*LARGE, seed)
    with process_group(), trying(f"a data set of {LARGE[0]} images"):
        first = lambda dataset: lambda: next(iter(DataLoader(dataset, BATCH)))
        return in_turn(first(SlowPixels(images, labels)), first(pixels(images, labels)))


# ---- what is claimed ----

ALL = "mean and deviation are those of all images, not of one image or one batch"
OF_THIS_SET = (
    "mean and deviation are those of all images of this data set, not of some of them, and not of another data set; and "
    "the sum of many images needs more than 32 bits"
)


def claims(seen, count, side, seed):
    images, labels = a_data_set(count, side, seed)
    checked = f"{count} images of {side} × {side}"
    yield Claim(f"{checked}: len(dataset)", seen["length"], count, "the length is the number of images")
    yield Claim(f"{checked}: the images that were given", seen["changed"], False, "the images belong to the caller: do "
                "not change them in place", told="as before", shown="changed")  # fmt: skip
    places = torch.arange(count).split(BATCH)
    yield Claim(f"{checked}: the batches", len(seen["batches"]), len(places), "return an image and its label")
    cause = "subtract the mean over all images, and divide by their standard deviation"
    named = [(f"batch {number}", place) for number, place in enumerate(places)] + [("dataset[3]", 3)]
    for got, (name, place) in zip([*seen["batches"], seen["one"]], named):
        yield from samples(f"{checked}: %s of {name}", got, images, labels, place, cause)
    for (name, given), of_ends in zip(others(seed).items(), seen["ends"]):
        for place, got in zip((0, -1), of_ends):
            yield from samples(f"{name}: %s of dataset[{place % len(given[0])}]", got, *given, place, OF_THIS_SET)
    yield from memory(checked, seen, images.nbytes)
    yield Claim(f"{checked}: numbers that an epoch computes, for each number in the images",
                times := seen["numbers"] / images.numel(), Between(0, MOST),
                f"each batch {STILL}: {ONCE}", [(Between(count / 2), f"each image {STILL}: {ONCE}")],
                told=f"at most {MOST}", shown=f"{times:.0f}")  # fmt: skip


STILL, ONCE = "still goes through all images", "compute what all have in common once, in __init__"


def samples(what, got, images, labels, place, cause):
    """Claims about some samples, or one: an image, or a batch of them, and labels."""
    yield Claim(what % "parts", len(got), 2, "return an image and its label")
    deviation, mean = torch.std_mean(images.float())
    given = images[place].float()[..., None, :, :]
    each, of_each = torch.std_mean(given, (-2, -1), keepdim=True)
    image, expected = got[0], (given - mean) / deviation
    yield Claim(what % "the shape of images", shape_of(image), list(expected.shape), "an image has the shape (1, height, "
                "width), and is float32")  # fmt: skip
    yield Claim(what % "images", str(image.dtype), "torch.float32", "images are float32")
    yield Claim(what % "images", image, expected, cause, [
                    ((given - given.mean()) / given.std(), ALL), ((given - of_each) / each, ALL),
                    (given / deviation, "subtract the mean before you divide"),
                ], digits=4)  # fmt: skip
    label, expected = as_tensor(got[1]), labels[place]
    yield Claim(what % "labels", str(getattr(label, "dtype", None)), "torch.int64",
                "return the labels as they were given: int64", told=expected, shown=got[1])  # fmt: skip
    yield Claim(what % "labels", label, expected, "the label of an image has the same index")


def shape_of(image):
    return list(image.shape) if isinstance(image, torch.Tensor) else f"no tensor: {image!r:.99}"


def as_tensor(label):
    """A number, or some, as a loss takes them; other things, such as texts, as they are."""
    try:
        return torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):
        return label


def memory(checked, seen, given):
    """Claims about what is kept besides the bytes that were given."""
    kept = seen["kept"]
    yield Claim(f"{checked}: the bytes that are kept after an epoch, besides the {given:,} that were given", kept,
                Between(-math.inf, MOST_KEPT * given), "as float32 the images take four times the memory: keep them as "
                "uint8, and convert one when it is asked for",
                told="few, or a copy in uint8", shown=f"{kept:,}")  # fmt: skip
    yield Claim(f"{checked}: what is kept of all images", seen["wide"], Between(-math.inf, 0), "that needs twice the "
                "memory or more: keep the images as they were given, as uint8", told="uint8",
                shown="numbers of more than one byte")  # fmt: skip


@question(
    "Time dataset[0] for a data set of 100 images, and for one of 1,000. Why does one image take longer if there are more "
    "of them?",
    "__getitem__ converts all images and computes their mean and deviation, for a single one. What of that is the same for "
    "all images? Compute it once.",
    "In __init__: numbers = images.float(); self.mean, self.std = numbers.mean(), numbers.std(), and keep the uint8 "
    "images. In __getitem__: image = (self.images[index].float() - self.mean) / self.std; return image[None], "
    "self.labels[index].",
)
def check_pixels(answer, draw):
    """The batches are the slow class's; the numbers that are computed are counted; some
    images are timed.
    """
    count, side = draw.randint(130, 160), draw.randint(24, 30)
    seed = draw.randrange(10**6)
    [seen] = answer.on_ranks(observed, count, side, seed, timeout=10)
    hold(claims(seen, count, side, seed))
    [times] = answer.on_ranks(timed, seed, timeout=20)
    checked = f"{BATCH} of {LARGE[0]:,} images of {LARGE[1]} × {LARGE[1]}"
    return judge_gain(times, LEAST_GAIN, checked, f"each image, or each batch, {STILL}, with numpy or in a single operator "
                      f"such as a mean: {ONCE}")  # fmt: skip
