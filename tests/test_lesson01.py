"""Lesson 01: one device, honestly evaluated."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import lesson01
from ddp_course.data.images import load_images
from ddp_course.models.convnets import MLP, ConvNet

CPU = torch.device("cpu")


def test_the_network_is_that_of_the_tutorial():
    model = ConvNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_199_882
    log_probabilities = model(torch.randn(3, 1, 28, 28))
    assert log_probabilities.shape == (3, 10)
    torch.testing.assert_close(log_probabilities.exp().sum(dim=1), torch.ones(3))


def test_training_takes_one_step_a_batch_and_learns():
    torch.manual_seed(0)
    train_set, test_set = load_images("digits", 512)
    model = MLP(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        epoch = lesson01.train_one_epoch(
            model, DataLoader(train_set, 50), optimizer, CPU
        )
        assert len(epoch) == 11
        losses += epoch
    assert losses[-1] < 0.5 < losses[0]
    correct, seen = lesson01.evaluate(model, DataLoader(test_set, 100), CPU)
    assert seen == 360 and correct > 300


def test_the_gradients_of_a_step_are_of_its_batch_alone():
    """Planted: a loop without zero_grad ends elsewhere than the lesson's."""
    train_set, _ = load_images("digits", 128)

    def end(reset):
        torch.manual_seed(0)
        model = MLP(width=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if reset is None:
            lesson01.train_one_epoch(model, DataLoader(train_set, 32), optimizer, CPU)
        else:
            for images, labels in DataLoader(train_set, 32):
                if reset:
                    optimizer.zero_grad()
                F.nll_loss(model(images), labels).backward()
                optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(end(reset=None), end(reset=True))
    assert not torch.allclose(end(reset=None), end(reset=False))


def test_evaluation_counts_each_sample_once_whatever_the_batches():
    torch.manual_seed(0)
    _, test_set = load_images("digits")
    model = ConvNet()
    images, labels = next(iter(DataLoader(test_set, 360)))
    model.eval()
    expected = (model(images).argmax(dim=1) == labels).sum().item(), 360
    model.train()  # evaluate must switch dropout off by itself
    for batch_size in (1, 7, 64, 360, 1000):
        assert (
            lesson01.evaluate(model, DataLoader(test_set, batch_size), CPU) == expected
        )
    assert lesson01.evaluate(model, [], CPU) == (0, 0)
