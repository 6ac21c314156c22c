"""MNIST on one device: the program that the rest of the course distributes.

python ddp_course/lesson01.py
python -m ddp_course.lesson01 --data digits --epochs 2 --device cpu
torchrun ddp_course/lesson01.py --train-samples 1000
"""

import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import UsageError, runs
from ddp_course.data.images import load_images
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import choose_device, torchrun_environment


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step for each batch; return the losses, a list of floats."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # not .item(): a GPU would stop and wait for that
    losses = torch.stack(losses)
    runs.check_finite(losses)
    return losses.tolist()


@torch.no_grad()
def evaluate(model, loader, device):
    """Return how many samples the model gets right, and how many there are."""
    model.eval()
    correct = seen = 0
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct += (predictions == labels.to(device)).sum().item()
        seen += len(labels)
    return correct, seen


def arguments(argv=()):
    return runs.parser(__file__, __doc__).parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    if torchrun_environment().world_size > 1:
        raise UsageError("lesson 01 is for one process, lesson 04 for many")
    device = choose_device(
        args.device, collectives=False, deterministic=args.deterministic
    )

    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size=1)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)

    torch.manual_seed(args.seed)
    model = ConvNet(dropout=not args.no_dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses, seconds = [], 0.0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        losses += train_one_epoch(model, train_loader, optimizer, device)
        seconds += time.perf_counter() - begin
        correct, seen = evaluate(model, test_loader, device)
        accuracy = correct / seen
        log.info(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracy:.1%}")

    return runs.finish(args, device, model, train_set, losses, seconds, accuracy, seen)


if __name__ == "__main__":
    runs.start(main)
