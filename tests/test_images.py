"""The data sets: what they hold, that they are verified, and that they are had whole or
not at all.
"""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from conftest import descendants, no_network, remember_that_there_is_no_mnist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import UsageError
from ddp_course.data import images
from ddp_course.ranks.launch import launch


def test_digits_are_scikit_learns():
    """Each of the 1,797 images once, with its label, in one of the two parts."""
    from sklearn.datasets import load_digits

    theirs = load_digits()
    expected = sorted(
        (image.tobytes(), label)
        for image, label in zip(theirs.images.astype("uint8"), theirs.target)
    )
    import numpy as np

    with np.load(Path(images.__file__).with_name("digits.npz")) as file:
        ours = sorted(
            (image.tobytes(), label)
            for image, label in zip(file["images"], file["labels"])
        )
    assert ours == expected


def test_digits_are_split_for_good_and_scaled():
    train, test = images.load_images("digits", train_samples=1437)
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape == (1437, 28, 28) and train.images.dtype == torch.uint8
    assert train.images.min() == 0 and train.images.max() == 255
    assert train.labels.dtype == torch.int64 and set(train.labels.tolist()) == set(
        range(10)
    )
    assert (
        test.labels[:10].tolist()
        == images.load_images("digits")[1].labels[:10].tolist()
    )


def test_one_image_is_found_as_in_a_list():
    test = images.load_digits()[1]
    every = [
        (image, int(label)) for image, label in test
    ]  # ends with an IndexError, as for all sequences
    assert len(every) == len(test) == 360
    for index in (0, -1, -360, torch.tensor(359)):
        image, label = test[index]
        assert torch.equal(image, every[index][0]) and label == every[index][1]
    for index in (360, -361):
        with pytest.raises(IndexError):
            test[index]


def test_the_training_set_is_normalised():
    train, _ = images.load_images("digits", train_samples=1437)
    batch, _ = next(iter(DataLoader(train, batch_size=1437)))
    assert abs(batch.mean()) < 1e-3 and abs(batch.std() - 1) < 1e-3


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda images: DataLoader(images, batch_size=10),
        lambda images: DataLoader(
            images,
            batch_size=10,
            sampler=DistributedSampler(images, 1, 0, shuffle=False),
        ),
        lambda images: DataLoader(Subset(images, range(len(images))), batch_size=10),
        lambda images: DataLoader(images, batch_size=10, num_workers=1),
    ],
    ids=["plain", "DistributedSampler", "Subset", "a worker process"],
)
def test_an_ordinary_loader_gives_whole_batches(make_loader):
    few = images.load_images("digits", train_samples=25)[0]
    batches = list(make_loader(few))
    assert [tuple(batch.shape) for batch, _ in batches] == [
        (10, 1, 28, 28),
        (10, 1, 28, 28),
        (5, 1, 28, 28),
    ]
    assert batches[0][0].dtype == torch.float32
    assert torch.equal(torch.cat([labels for _, labels in batches]), few.labels)
    image, label = few[3]
    assert torch.equal(image, batches[0][0][3]) and label == few.labels[3]


def test_mnist_equals_torchvisions_bit_for_bit(mnist):
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    for ours, is_train in zip(
        images.load_images("mnist", train_samples=60000), (True, False)
    ):
        theirs = datasets.MNIST(mnist, train=is_train, transform=transform)
        assert len(ours) == len(theirs) == (60000 if is_train else 10000)
        assert torch.equal(ours.labels, theirs.targets) and torch.equal(
            ours.images, theirs.data
        )
        order = torch.randperm(len(ours))[:256].tolist()
        fast, slow = (
            next(iter(DataLoader(set_, batch_size=256, sampler=order)))
            for set_ in (ours, theirs)
        )
        assert torch.equal(fast[0], slow[0]) and torch.equal(fast[1], slow[1])


def test_a_subset_is_taken_on_a_cpu_and_all_on_a_gpu(mnist, monkeypatch):
    monkeypatch.setattr(images.Images, "to", lambda self, device: self)
    assert len(images.load_images("mnist")[0]) == 4096
    assert len(images.load_images("mnist", device="cuda")[0]) == 60000
    assert len(images.load_images("mnist", train_samples=100)[0]) == 100


def test_an_unknown_data_set_is_refused():
    with pytest.raises(
        UsageError, match="there is no data set 'cifar': choose digits, mnist or auto"
    ):
        images.load_images("cifar")


def test_more_samples_than_there_are_are_refused():
    with pytest.raises(
        UsageError, match="--train-samples 1438 is more than digits has: 1437"
    ):
        images.load_images("digits", train_samples=1438)


# ---- damaged files ----


@pytest.fixture
def copy(mnist, tmp_path, monkeypatch):
    """A copy of MNIST that may be damaged: its folder of files."""
    shutil.copytree(mnist / "MNIST", tmp_path / "MNIST")
    monkeypatch.setenv("DDP_COURSE_DATA", str(tmp_path))
    for name, value in no_network().items():
        monkeypatch.setenv(name, value)
    return tmp_path / images.RAW


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


CURE = "start again to download it, or use --data digits"


@pytest.mark.parametrize("name", images.MNIST_FILES)
@pytest.mark.parametrize("how", ["auto", "mnist"])
def test_a_changed_byte_is_found_and_the_file_named(copy, name, how):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(
        UsageError, match=f"{name} is damaged, its checksum is not that of MNIST"
    ) as error:
        images.load_images(how)
    assert CURE in one_line(error)


def test_a_truncated_file_is_found(copy):
    path = copy / "train-images-idx3-ubyte"
    os.truncate(path, 1_000_000)
    with pytest.raises(
        UsageError, match="truncated or half-downloaded, 1,000,000 bytes of 47,040,016"
    ) as error:
        images.load_images("mnist")
    assert CURE in one_line(error)


def test_an_empty_file_is_found(copy):
    (copy / "t10k-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(UsageError, match="half-downloaded, 0 bytes of 10,008"):
        images.load_images("mnist")


def test_a_wrong_header_is_found(copy):
    path = copy / "t10k-labels-idx1-ubyte"
    path.write_bytes(b"\x1f\x8b" + path.read_bytes()[2:])
    with pytest.raises(
        UsageError, match="it does not begin like t10k-labels-idx1-ubyte of MNIST"
    ):
        images.load_images("mnist")


def test_a_missing_file_is_found(copy):
    (copy / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(
        UsageError,
        match="MNIST is incomplete, .*t10k-images-idx3-ubyte is missing or no file",
    ) as error:
        images.load_images("mnist")
    assert CURE in one_line(error)


def test_a_pipe_in_place_of_a_file_is_found_and_not_waited_for(copy):
    (copy / "t10k-images-idx3-ubyte").unlink()
    os.mkfifo(copy / "t10k-images-idx3-ubyte")
    with pytest.raises(
        UsageError, match="t10k-images-idx3-ubyte is missing or no file"
    ):
        images.load_images("mnist")


def test_undamaged_files_pass_the_same_checks(copy):
    assert [len(part) for part in images.load_images("mnist", train_samples=60000)] == [
        60000,
        10000,
    ]


# ---- downloading ----


def test_without_a_network_mnist_is_refused_in_one_line(workplace):
    with pytest.raises(
        images.Unreachable,
        match="MNIST could not be downloaded: .*; connect to the network, put its files",
    ) as error:
        images.load_images("mnist")
    one_line(error)
    assert not (workplace / "data" / "MNIST").exists()


def test_without_a_network_auto_is_digits_and_says_why_and_does_not_try_again(
    workplace, capsys
):
    assert images.load_images("auto")[0].name == "digits"
    assert capsys.readouterr().out.startswith(
        "data: digits (MNIST could not be downloaded: "
    )
    begin = time.monotonic()
    assert images.load_images("auto")[0].name == "digits"
    assert (
        time.monotonic() - begin < 10
    )  # the refusal is remembered: nothing is asked for again


def test_other_ranks_than_the_first_do_not_say_it_again(workplace, capsys, monkeypatch):
    remember_that_there_is_no_mnist(workplace)
    monkeypatch.setenv("RANK", "1")
    images.load_images("auto")
    assert capsys.readouterr().out == ""


def test_auto_is_mnist_where_it_is_on_the_disk(copy, capsys):
    assert images.load_images("auto", train_samples=10)[0].name == "mnist"
    assert capsys.readouterr().out.startswith("data: mnist (from ")


def test_a_data_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DDP_COURSE_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(
        UsageError,
        match="MNIST cannot be kept in .*: Not a directory; name another folder",
    ) as error:
        images.load_images("mnist")
    one_line(error)
    assert images.load_images("auto")[0].name == "digits"


def test_of_many_processes_one_downloads_and_all_find_it(mnist, tmp_path):
    def fetch(into, patience):
        with open(tmp_path / "fetched", "a") as file:
            file.write("x")
        time.sleep(1)
        shutil.copytree(mnist / "MNIST", into / "MNIST")

    def download():
        images.download_mnist(tmp_path, fetch=fetch)
        return len(images.load_mnist(tmp_path)[0])

    assert launch(download, nproc=4) == [60000] * 4
    assert (tmp_path / "fetched").read_text() == "x"
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.suffix != ".lock"
    ) == ["MNIST", "fetched"]


def test_a_download_that_fails_half_way_leaves_nothing_and_can_be_repeated(
    mnist, tmp_path
):
    def fails_half_way(into, patience):
        (into / images.RAW).mkdir(parents=True)
        (into / images.RAW / "train-images-idx3-ubyte").write_bytes(b"half")
        raise images.Unreachable("the line went dead")

    with pytest.raises(images.Unreachable, match="the line went dead"):
        images.download_mnist(tmp_path, fetch=fails_half_way)
    assert not (tmp_path / "MNIST").exists()
    with pytest.raises(
        images.Unreachable, match="the line went dead"
    ):  # others do not even try, for a while
        images.download_mnist(
            tmp_path, fetch=lambda into, patience: pytest.fail("tried again")
        )
    images.download_mnist(
        tmp_path,
        give_up_for=0,
        fetch=lambda into, patience: shutil.copytree(mnist / "MNIST", into / "MNIST"),
    )
    assert len(images.load_mnist(tmp_path)[1]) == 10000


def test_a_server_that_sends_nothing_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes calls, no more
        for name in no_network():
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(images.Unreachable, match="not within 5 s"):
            images.download_mnist(tmp_path, patience=5)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "nothing is left"
    assert not [child for child in descendants() if "MNIST" in str(child.cmdline())]


def test_all_ranks_come_to_the_same_choice(workplace, capsys):
    """No network, nothing remembered: digits, and one line."""
    assert launch(images.choose) == ["digits", "digits"]
    assert capsys.readouterr().out.count("data: digits") == 1
