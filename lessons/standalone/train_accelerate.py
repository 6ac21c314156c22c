"""Handwritten digits with Accelerate: train.py after six edits.

python -m ddp_course.data.images digits.pt
torchrun --standalone --nproc_per_node 2 train_accelerate.py
python train_accelerate.py
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.cuda.device_count() >= local_world_size  # one per rank
    accelerator = Accelerator(  # 1: it joins the others, and chooses the device
        cpu=not gpu,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=0
        ),
    )
    digits = torch.load("digits.pt")  # python -m ddp_course.data.images digits.pt
    train_images, train_labels, test_images, test_labels = digits
    train_set = TensorDataset(train_images, train_labels)
    test_set = TensorDataset(test_images, test_labels)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )  # 2: it wraps the model, and gives each process its own batches
    torch.manual_seed(accelerator.process_index)  # 3: every rank draws its own dropout

    for epoch in range(3):
        model.train()
        for images, labels in train_loader:  # on the right device already
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # 4: in place of loss.backward()
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model(images).argmax(1)
                pairs = accelerator.gather_for_metrics((predicted, labels))  # 5
                correct += torch.eq(*pairs).sum().item()
        accuracy = correct / len(test_set)
        accelerator.print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")

    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")  # 6
    accelerator.end_training()


if __name__ == "__main__":  # workers of a DataLoader import this file, too
    main()
