"""Handwritten digits with transformers' Trainer: the loop of train.py is Trainer's.

python -m ddp_course.data.images digits.pt
torchrun --standalone --nproc_per_node 2 train_trainer.py
python train_trainer.py
"""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import StackDataset
from transformers import Trainer, TrainingArguments


class Network(nn.Module):
    """Trainer calls a model by the names of its inputs, and wants a dict back."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, images):
        return {"logits": self.layers(images)}


def mean_loss(outputs, labels, num_items_in_batch):
    total = F.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / num_items_in_batch


def accuracy(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean()}


def main():
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.cuda.device_count() >= local_world_size  # one per rank
    settings = TrainingArguments(
        "checkpoints", use_cpu=not gpu, num_train_epochs=3,
        per_device_train_batch_size=64, per_device_eval_batch_size=250,
        lr_scheduler_type="constant", max_grad_norm=0.0, seed=0, data_seed=0,
        eval_strategy="epoch", save_strategy="no", report_to="none",
        label_names=["labels"], ddp_find_unused_parameters=False,
    )  # fmt: skip
    digits = torch.load("digits.pt")  # python -m ddp_course.data.images digits.pt
    train_images, train_labels, test_images, test_labels = digits
    train_set = StackDataset(images=train_images, labels=train_labels)
    test_set = StackDataset(images=test_images, labels=test_labels)

    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip

    model = Network(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(
        model, settings, train_dataset=train_set, eval_dataset=test_set,
        compute_loss_func=mean_loss, compute_metrics=accuracy,
        optimizers=(optimizer, None),
    )  # fmt: skip
    torch.manual_seed(settings.process_index)  # every rank draws its own dropout
    trainer.train()
    if settings.process_index == 0:
        torch.save(layers.state_dict(), "model.pt")


if __name__ == "__main__":  # workers of a DataLoader import this file, too
    main()
