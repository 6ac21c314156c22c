"""Handwritten digits on one device: an ordinary training script, to be distributed.

python -m ddp_course.data.images digits.pt
python train.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(3):
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
                predicted = model(images.to(device)).argmax(1)
                correct += (predicted == labels.to(device)).sum()
        accuracy = correct.item() / len(test_set)
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":  # workers of a DataLoader import this file, too
    main()
