"""Question 2: a data set that does too much for each image."""

import torch
from torch.utils.data import DataLoader

from ddp_course.checks.differences import near, parted
from ddp_course.checks.ex16.work import Work
from ddp_course.school.judge import Wrong, question, trying

BATCH = 16
MOST = 8  # times the numbers of all images, per epoch


def a_data_set(count, side, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (count, side, side)
    images = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (count,), generator=generator)


def observed(pixels, count, side, seed):
    """What two epochs deliver, and what the second one computes."""
    images, labels = a_data_set(count, side, seed)
    given = images.clone()
    with trying("Pixels(images, labels)"):
        dataset = pixels(images, labels)
    kept = bytes_of(vars(dataset))
    with trying("an epoch of a DataLoader"):
        list(DataLoader(dataset, BATCH))
        with Work() as work:
            batches = [list(batch) for batch in DataLoader(dataset, BATCH)]
    with trying("dataset[3]"):
        one = list(dataset[3])
    return {
        "length": len(dataset), "batches": batches, "one": one, "numbers": work.numbers,
        "kept": max(kept, bytes_of(vars(dataset))), "changed": not torch.equal(images, given),
    }  # fmt: skip


def bytes_of(value):
    """The bytes of the tensors in an object's attributes."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


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
    """The batches are the slow class's; the numbers that are computed are counted."""
    count, side = draw.randint(90, 120), draw.randint(7, 12)
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
    if seen["kept"] > 1.1 * (images.nbytes + labels.nbytes) + 2048:  # a small table
        raise Wrong(f"{checked}: the bytes that the data set keeps", expected=f"{images.nbytes + labels.nbytes:,}",
                    got=f"{seen['kept']:,}",
                    cause="as float32 the images take four times the memory: keep them as uint8, and convert one when it "
                    "is asked for")  # fmt: skip
    times = seen["numbers"] / images.numel()
    if times > MOST:
        raise Wrong(f"{checked}: numbers that an epoch computes, for each number in the images",
                    expected=f"at most {MOST}", got=f"{times:.0f}", cause=cause_of_work(times, count))  # fmt: skip


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
    named = [
        (f"batch {i}", *pair) for i, pair in enumerate(zip(pairs, seen["batches"]))
    ]
    named.append(("dataset[3]", (normal[3], labels[3]), seen["one"]))
    for where, (expected, label), (got, got_label) in named:
        if not near(got, expected, 1e-4) or got.dtype != torch.float32:
            told = parted(expected, got, rtol=1e-4, atol=1e-4)
            raise Wrong(f"{checked}: images of {where}", expected=told[0], got=told[1],
                        cause=cause_of_images(got, expected, images))  # fmt: skip
        if not torch.equal(torch.as_tensor(got_label), label):
            raise Wrong(f"{checked}: labels of {where}", expected=label, got=got_label,
                        cause="the label of an image has the same index")  # fmt: skip


def cause_of_images(got, expected, images):
    numbers = images.float()
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return "an image has the shape (1, height, width), and is float32"
    if got.dtype != torch.float32:
        return "images are float32"
    if abs(got.mean() - got.new_tensor(0)) < 1e-3 and len(expected) < len(images):
        return (
            "mean and deviation are those of all images, not of one image or one batch"
        )
    if near(got * numbers.std(), expected * numbers.std() + numbers.mean(), 1e-3):
        return "subtract the mean before you divide"
    return "subtract the mean over all images, and divide by their standard deviation"
