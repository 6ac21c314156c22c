"""Handwritten digits with DistributedDataParallel: train.py after eight edits.

python -m ddp_course.data.images digits.pt
torchrun --standalone --nproc_per_node 2 train_ddp.py
python train_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # alone without torchrun
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.cuda.device_count() >= local_world_size  # one per rank
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)  # 1: each rank has its own
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(  # 2: join the other processes
        "nccl" if gpu else "gloo",
        device_id=device if gpu else None,
        **({} if "RANK" in os.environ else alone),
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = torch.load("digits.pt")  # python -m ddp_course.data.images digits.pt
    train_images, train_labels, test_images, test_labels = digits
    train_set = TensorDataset(train_images, train_labels)
    test_set = TensorDataset(test_images, test_labels)
    sampler = DistributedSampler(train_set)  # 3: every rank trains on its own samples
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    mine = range(rank, len(test_set), world_size)  # 4: and tests its own, each once
    test_loader = DataLoader(Subset(test_set, mine), batch_size=250)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    model.to(device)
    model = DistributedDataParallel(model)  # 5: backward() averages the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0 + rank)  # 6: every rank draws its own dropout

    for epoch in range(3):
        sampler.set_epoch(epoch)  # 7: a different shuffle in each epoch
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model.module(images.to(device)).argmax(1)
                correct += (predicted == labels.to(device)).sum()
        dist.all_reduce(correct)
        if rank == 0:  # 8: one rank prints and saves
            accuracy = correct.item() / len(test_set)
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")

    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":  # workers of a DataLoader import this file, too
    main()
