"""The images: scikit-learn's digits, which come with the course, and MNIST, verified.

Both are kept as bytes in memory, a GPU's where one trains, and normalised as they are
fetched, a whole batch at a time. An ordinary `DataLoader(images, batch_size, sampler=sampler)` then runs at the
speed of memory.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_course import UsageError, project_folder
from ddp_course.files import Unusable, content_of
from ddp_course.ranks.variables import DATA

MNIST_FILES = {  # name: (shape, MD5), of torchvision's unpacked files
    "train-images-idx3-ubyte": ((60000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ((60000,), "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ((10000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ((10000,), "27ae3e4e09519cfbb04c329615203637"),
}
RAW = Path("MNIST") / "raw"  # where torchvision keeps them
MOST_ON_A_CPU = 4096  # training samples, where nobody says how many


class Images(Dataset):
    """Grey images in memory, fetched as normalised float32 (1, 28, 28), with labels.

    images: uint8 (n, 28, 28). labels: int64 (n,), on the same device, on which batches
    come out. A DataLoader fetches whole batches; a collate_fn of one's own gets a list
    that holds one WholeBatch.
    """

    def __init__(self, name, images, labels, mean, std):
        self.name, self.images, self.labels = name, images, labels
        self.mean, self.std = mean, std

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        [(images, labels)] = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        """A whole batch at once: images float32 (b, 1, 28, 28), labels int64 (b,)."""
        every = range(len(self))
        indices = [every[index] for index in indices]  # -1 is the last
        indices = torch.tensor(indices, device=self.images.device)
        images = self.images.index_select(0, indices).unsqueeze(1).float().div_(255)
        images.sub_(self.mean).div_(self.std)
        return [WholeBatch((images, self.labels[indices]))]

    def first(self, count):
        """The first `count` images, as a data set of its own."""
        if count > len(self):
            there = f"{self.name} has: {len(self)}"
            raise UsageError(f"--train-samples {count} is more than {there}")
        images, labels = self.images[:count], self.labels[:count]
        return Images(self.name, images, labels, self.mean, self.std)

    def to(self, device):
        """The same images on a device; MNIST's 60,000 have 47 MB."""
        images, labels = self.images.to(device), self.labels.to(device)
        return Images(self.name, images, labels, self.mean, self.std)


class WholeBatch(tuple):
    """A batch that came whole: DataLoader's own collate function hands it on as it is."""


default_collate_fn_map[WholeBatch] = lambda batch, **_: batch[0]


class OneByOne(Dataset):
    """The same images, read the usual way, as torchvision.datasets.MNIST reads them."""

    def __init__(self, images):
        from torchvision import transforms  # which takes long to import

        normalize = transforms.Normalize((images.mean,), (images.std,))
        self.images, self.labels = images.images.numpy(), images.labels
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index])
        return self.transform(image), self.labels[index]


def load_images(name="auto", train_samples=None, device="cpu"):
    """The training set and the test set, two Images, both on the device.

    name: 'digits', 'mnist', or 'auto', which is mnist where it can be had.
    train_samples: how many to train on; None is all of them on a GPU, and at most 4096
    elsewhere. Raises UsageError for an unknown name, for too many samples, and for
    MNIST files that are damaged or cannot be had.
    """
    if name == "auto":
        name = choose()
    if name not in ("digits", "mnist"):
        raise UsageError(f"there is no data set {name!r}: choose digits, mnist or auto")
    train, test = load_digits() if name == "digits" else load_mnist()
    if train_samples is None and torch.device(device).type != "cuda":
        train_samples = min(MOST_ON_A_CPU, len(train))
    return train.first(train_samples or len(train)).to(device), test.to(device)


def load_digits():
    """1,437 and 360 of scikit-learn's digits, scaled from 8x8 pixels to 28x28."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels, labels = map(torch.from_numpy, (file["images"], file["labels"]))
    small = pixels.unsqueeze(1).float() * (255 / 16)  # a pixel is a number from 0 to 16
    large = F.interpolate(small, size=28, mode="bilinear").squeeze(1).round().byte()
    return tuple(
        Images("digits", large[part], labels.long()[part], mean=0.3054, std=0.3246)
        for part in (slice(0, 1437), slice(1437, None))
    )


def load_mnist(folder=None):
    """MNIST's 60,000 and 10,000 images, verified, and first downloaded if need be."""
    folder = Path(folder or data_folder())
    download_mnist(folder)
    files = [
        torch.from_numpy(read_verified(folder / RAW / name)) for name in MNIST_FILES
    ]
    return tuple(
        Images("mnist", images, labels.long(), mean=0.1307, std=0.3081)
        for images, labels in (files[:2], files[2:])
    )


def choose():
    """'mnist' where it is on the disk or can be had within a few seconds, else 'digits'.

    Rank 0 says which, and why. All processes of a machine come to the same choice: one
    of them tries to download MNIST, and the others wait for the outcome.
    """
    folder = data_folder()
    try:
        download_mnist(folder, patience=10, give_up_for=3600)
        choice, reason = "mnist", f"from {os.path.relpath(folder)}"
    except Unreachable as error:
        choice, reason = "digits", str(error).partition(";")[0]
    if os.environ.get("RANK", "0") == "0":
        print(f"data: {choice} ({reason})")
    return choice


def data_folder():
    """Where MNIST is looked for: $DDP_COURSE_DATA, or `data/` in the course's folder."""
    return Path(os.environ.get(DATA) or project_folder() / "data")


def read_verified(path):
    """Read one of MNIST's IDX files; return its numbers, uint8, in their shape.

    The format: two zero bytes, 8 for 'unsigned bytes', the number of dimensions, each
    dimension as a big-endian int32, then the bytes (Y. LeCun, C. Cortes, C. Burges, The
    MNIST database). Raises UsageError where size, header or checksum are wrong.
    """
    shape, md5 = MNIST_FILES[path.name]
    header = bytes([0, 0, 8, len(shape)])
    header += b"".join(size.to_bytes(4, "big") for size in shape)
    expected = len(header) + int(np.prod(shape))
    fix = f"delete {path.parent} and start again to download it, or use --data digits"
    if not path.is_file():
        raise UsageError(f"MNIST is incomplete, {path} is missing or no file: {fix}")
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        problem = f"MNIST is incomplete, {path} cannot be read ({error.strerror})"
        raise UsageError(f"{problem}: {fix}") from None
    if len(content) != expected:
        problem = (
            f"is truncated or half-downloaded, {len(content):,} bytes of {expected:,}"
        )
    elif content[: len(header)].tobytes() != header:
        problem = f"is damaged, it does not begin like {path.name} of MNIST"
    elif hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        problem = "is damaged, its checksum is not that of MNIST"
    else:
        return content[len(header) :].reshape(shape)
    raise UsageError(f"{path} {problem}: {fix}")


class Unreachable(UsageError):
    """MNIST is not on the disk, and cannot be downloaded."""


def download_mnist(folder, patience=300, give_up_for=20, fetch=None):
    """Have torchvision download MNIST into `folder`, unless it is there already.

    It is there whole or not at all, downloaded by one process at a time. patience:
    seconds that the download may take. give_up_for: seconds after a failure in which no
    process tries again. fetch: what downloads MNIST into a folder, within a patience;
    None is torchvision. Raises Unreachable where MNIST cannot be had.
    """
    from filelock import FileLock  # comes with torch

    if all((folder / RAW / name).exists() for name in MNIST_FILES):
        return
    failure = folder / "mnist-not-downloaded.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "mnist.lock"):
            if any((folder / RAW / name).exists() for name in MNIST_FILES):
                return  # another process was faster; if some are missing, reading says so
            if failure.exists() and time.time() - failure.stat().st_mtime < give_up_for:
                raise Unreachable(content_of(failure).decode(errors="replace"))
            with tempfile.TemporaryDirectory(dir=folder, prefix="mnist-") as temporary:
                try:
                    (fetch or _fetch_with_torchvision)(Path(temporary), patience)
                except Unreachable as error:
                    failure.write_text(str(error))
                    raise
                (folder / RAW).mkdir(parents=True, exist_ok=True)
                for name in MNIST_FILES:
                    os.replace(Path(temporary) / RAW / name, folder / RAW / name)
            failure.unlink(missing_ok=True)
    except (OSError, Unusable) as error:
        reason = getattr(error, "strerror", error)
        problem = f"MNIST cannot be kept in {folder}: {reason}"
        fix = "name another folder in DDP_COURSE_DATA, or use --data digits"
        raise Unreachable(f"{problem}; {fix}") from None


FETCH = """
import socket, sys
from torchvision.datasets import MNIST

socket.setdefaulttimeout(15)  # seconds without a byte
MNIST(sys.argv[1], download=True)
"""


def _fetch_with_torchvision(folder, patience):
    """Download in a process of its own, which can be stopped when it takes too long.

    Besides, torchvision takes long to import.
    """
    command = [sys.executable, "-c", FETCH, str(folder)]
    try:
        options = {"capture_output": True, "text": True, "timeout": patience}
        done = subprocess.run(command, **options)
        if done.returncode == 0:
            return
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"not within {patience:g} s"
    files = f"put its files in {data_folder() / RAW}"
    fix = f"connect to the network, {files}, or use --data digits"
    raise Unreachable(f"MNIST could not be downloaded: {reason}; {fix}")


def save_digits(path):
    """Write the digits as a file for torch.load, for programs that know no more.

    A list of four tensors: training images, normalised float32 (n, 1, 28, 28), their
    labels, int64 (n,), and the same two of the test set.
    """
    parts = []
    for images in load_digits():
        parts += images.__getitems__(range(len(images)))[0]
    torch.save(parts, path)


if __name__ == "__main__":
    save_digits(*sys.argv[1:])
    print(f"{sys.argv[1]}: 1,437 images to train on, 360 to test")
