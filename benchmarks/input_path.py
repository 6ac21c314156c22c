"""How much faster whole batches of MNIST come than one image at a time, through the
same DataLoader and sampler.

python benchmarks/input_path.py
"""

import torch
from claims import claim, in_turn, report
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from ddp_course import UsageError
from ddp_course.data import images


class OneByOne(datasets.MNIST):
    """torchvision's MNIST, image by image with ToTensor and Normalize, over the images
    of one of our data sets.
    """

    def __init__(self, images):
        normalize = transforms.Normalize((images.mean,), (images.std,))
        self.data, self.targets = images.images, images.labels
        self.transform, self.target_transform = (
            transforms.Compose([transforms.ToTensor(), normalize]),
            None,
        )


def sixty_thousand_images():
    """MNIST's training set; the digits, repeated until they are as many, where MNIST
    cannot be had.
    """
    try:
        return images.load_images("mnist", 60_000)[0], "mnist"
    except UsageError:
        digits, _ = images.load_digits()
        again = torch.arange(60_000) % len(digits)
        digits.images, digits.labels = digits.images[again], digits.labels[again]
        return digits, "digits, repeated"


def epoch(dataset):
    """One epoch in batches of 128, shuffled, as one rank alone reads it."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
    return DataLoader(dataset, batch_size=128, sampler=sampler)


def read(dataset):
    for _ in epoch(dataset):
        pass


def main():
    torch.set_num_threads(1)  # as a rank has it
    whole, name = sixty_thousand_images()
    one_by_one = OneByOne(whole)
    differing = 0
    for (slow, slow_labels), (fast, fast_labels) in zip(
        epoch(one_by_one), epoch(whole), strict=True
    ):
        differing += not (
            torch.equal(slow, fast) and torch.equal(slow_labels, fast_labels)
        )
    medians = in_turn(
        5, one_by_one=lambda: read(one_by_one), whole_batches=lambda: read(whole)
    )
    report(
        [
            claim("batches that are not equal bit for bit", differing, at_most=0),
            claim(
                "an epoch of 60,000 images in whole batches against one by one, times faster",
                medians["one_by_one"] / medians["whole_batches"],
                at_least=40,
            ),
        ],
        data=name,
        batches=len(epoch(whole)),
        median_seconds=medians,
    )


if __name__ == "__main__":
    main()
