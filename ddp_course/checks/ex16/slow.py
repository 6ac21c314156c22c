"""The three slow programs, as the exercise gives them: answers are timed beside them."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import Dataset


def update(model, micro_batches, optimizer):
    optimizer.zero_grad()
    parameters, losses = [p for p in model.parameters() if p.requires_grad], []
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients):
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size() * len(micro_batches)
            if parameter.grad is not None:
                gradient = parameter.grad + gradient
            parameter.grad = gradient
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    optimizer.step()
    return losses


class Pixels(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        images = self.images.float()
        images = (images - images.mean()) / images.std()
        return images[index][None], self.labels[index]


def evaluate(model, loader):
    model.eval()
    correct, losses = 0, []
    for inputs, labels in loader:
        for one, label in zip(inputs, labels):
            output = model(one[None])[0]
            losses.append(F.cross_entropy(output, label).item())
            if output.argmax() == label:
                correct += 1
    model.train()
    return correct / len(losses), sum(losses) / len(losses)
