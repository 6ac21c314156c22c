"""Question 2: a data set that does too much for each image."""

import gc
import tracemalloc

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.differences import near, parted
from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import Pixels as SlowPixels
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group

BATCH = 16
MOST = 8  # times the numbers of all images, per epoch
# times the bytes of the images that may be kept: a copy in uint8, which is counted twice
# if numpy made it, and small tables; as float32, the images would take 4
MOST_KEPT = 2.5
LARGE = 1000, 28  # a data set that is timed: images, and their side
MANY = 1203, 4  # a second data set: more images than a sample of them would have
LEAST_GAIN = 15  # a right answer gains more than 100, one with a mean per image 7


def a_data_set(count, side, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (count, side, side)
    images = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    # they get brighter, so no part of them has the mean and the deviation of all
    images = (images * torch.linspace(0.3, 1, count)[:, None, None]).byte()
    return images, torch.randint(10, (count,), generator=generator)


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
    with trying("Pixels of other images, while the first data set is in use"):
        other = pixels(*a_data_set(*MANY, seed + 1))
        ends = [list(other[index]) for index in (0, MANY[0] - 1)]
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


def truth(images):
    """All images, normalised."""
    numbers = images.float()
    return ((numbers - numbers.mean()) / numbers.std())[:, None]


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
    images, labels = a_data_set(count, side, seed)
    checked = f"{count} images of {side} × {side}"
    if seen["length"] != count:
        raise Wrong(f"{checked}: len(dataset)", expected=count, got=seen["length"],
                    cause="the length is the number of images")  # fmt: skip
    if seen["changed"]:
        cause = "the images belong to the caller: do not change them in place"
        raise Wrong(f"{checked}: the images that were given", expected="as before", got="changed", cause=cause)  # fmt: skip
    judge_batches(seen, images, labels, checked)
    judge_ends(seen["ends"], seed)
    if seen["wide"] > 0 and seen["kept"] <= MOST_KEPT * images.nbytes:
        raise Wrong(f"{checked}: what is kept of all images", expected="uint8", got="numbers of more than one byte",
                    cause="that needs twice the memory or more: keep the images as they were given, as uint8")  # fmt: skip
    if seen["kept"] > MOST_KEPT * images.nbytes:
        raise Wrong(f"{checked}: the bytes that are kept after an epoch, besides the {images.nbytes:,} that were given",
                    expected="few, or a copy in uint8", got=f"{seen['kept']:,}",
                    cause="as float32 the images take four times the memory: keep them as uint8, and convert one when it "
                    "is asked for")  # fmt: skip
    times = seen["numbers"] / images.numel()
    if times > MOST:
        raise Wrong(f"{checked}: numbers that an epoch computes, for each number in the images",
                    expected=f"at most {MOST}", got=f"{times:.0f}", cause=cause_of_work(times, count))  # fmt: skip
    [times] = answer.on_ranks(timed, seed, timeout=20)
    checked = f"{BATCH} of {LARGE[0]:,} images of {LARGE[1]} × {LARGE[1]}"
    cause = (
        "each image, or each batch, still goes through all images, with numpy or in a single operator such as a mean: "
        "compute what all have in common once, in __init__"
    )
    return judge_gain(times, LEAST_GAIN, checked, cause)


def cause_of_work(times, count):
    if times > count / 2:
        return "each image still goes through all images: compute what all have in common once, in __init__"
    return "each batch still goes through all images: compute what all have in common once, in __init__"


def judge_batches(seen, images, labels, checked):
    normal = truth(images)
    pairs = list(zip(normal.split(BATCH), labels.split(BATCH)))
    if [len(batch) for batch in seen["batches"]] != [2] * len(pairs):
        raise Wrong(f"{checked}: the batches", expected=f"{len(pairs)} batches of images and labels",
                    got=f"{len(seen['batches'])} batches", cause="return an image and its label")  # fmt: skip
    named = [(f"batch {i}", *pair) for i, pair in enumerate(zip(pairs, seen["batches"]))]
    named.append(("dataset[3]", (normal[3], labels[3]), seen["one"]))
    for where, (expected, label), (got, got_label) in named:
        if not near(got, expected, 1e-4) or got.dtype != torch.float32:
            told = parted(expected, got, rtol=1e-4, atol=1e-4)
            raise Wrong(f"{checked}: images of {where}", expected=told[0], got=told[1],
                        cause=cause_of_images(got, expected, images))  # fmt: skip
        judge_labels(f"{checked}: labels of {where}", got_label, label)


def judge_labels(checked, got, expected):
    """A number, or a tensor of numbers, of the same kind: a loss takes no others."""
    try:
        numbers = torch.as_tensor(got)
    except (TypeError, ValueError, RuntimeError):  # such as texts
        numbers = None
    if numbers is None or numbers.dtype != expected.dtype:
        raise Wrong(checked, expected=expected, got=got, cause="return the labels as they were given: int64")  # fmt: skip
    if not torch.equal(numbers, expected):
        raise Wrong(checked, expected=expected, got=got, cause="the label of an image has the same index")  # fmt: skip


def judge_ends(ends, seed):
    """The first and the last image of the second data set."""
    images, labels = a_data_set(*MANY, seed + 1)
    normal = truth(images)
    for index, (got, label) in zip((0, len(images) - 1), ends):
        if not near(got, normal[index], 1e-4):
            told = parted(normal[index], got, rtol=1e-4, atol=1e-4)
            raise Wrong(f"a second data set, of {MANY[0]:,} images of {MANY[1]} × {MANY[1]}: the image of dataset[{index}]",
                        expected=told[0], got=told[1],
                        cause="mean and deviation are those of all images of this data set, not of some of them, and not "
                        "of another data set")  # fmt: skip
        judge_labels(f"a second data set: the label of dataset[{index}]", label, labels[index])  # fmt: skip


def cause_of_images(got, expected, images):
    numbers = images.float()
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return "an image has the shape (1, height, width), and is float32"
    if got.dtype != torch.float32:
        return "images are float32"
    if abs(got.mean() - got.new_tensor(0)) < 1e-3 and len(expected) < len(images):
        return "mean and deviation are those of all images, not of one image or one batch"
    if near(got * numbers.std(), expected * numbers.std() + numbers.mean(), 1e-3):
        return "subtract the mean before you divide"
    return "subtract the mean over all images, and divide by their standard deviation"
