"""Training of small networks, with which the checks compare ranks and one process
precisely.
"""

import torch
from torch import nn

from ddp_course.judge.answer import trying

LEARNING_RATE = 0.05


def fill(module, seed):
    """Give a module random parameters and buffers, those of BatchNorm too, in 64 bits;
    return it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.double().state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
        if name.endswith("running_var"):
            value.abs_().add_(0.5)
    return module


class Chain(nn.Sequential):
    """`layers` layers of equal size, `width` squared weights of 8 bytes each, and no
    biases.
    """

    def __init__(self, width, layers, seed):
        parts = [(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)]
        super().__init__(*(module for part in parts for module in part))
        fill(self, seed)


def a_batch(samples, width, seed):
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def state(module):
    """A copy of its parameters and buffers, {name: tensor}."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def gradients_of(module):
    """A copy of its gradients, {name: tensor or None}: some answers reuse their memory
    in the next step.
    """
    return {
        name: None if value.grad is None else value.grad.detach().clone() for name, value in module.named_parameters()
    }


def unwrapped(model):
    """The network within any wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


@torch.no_grad()
def descend(network, learning_rate=LEARNING_RATE):
    """A step of SGD, without torch.optim, which takes two seconds for its imports."""
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter -= learning_rate * parameter.grad
            parameter.grad = None


def take_steps(model, batches, finish=lambda: None):
    """SGD on the mean square of the outputs, one step per batch; return the `state`
    after each step, a list.

    finish: called between backward and step.
    """
    history = []
    for step, batch in enumerate(batches, 1):
        with trying(f"step {step} of training"):
            model(batch).pow(2).mean().backward()
            finish()
        descend(model)
        history.append(state(unwrapped(model)))
    return history


def equal(some, others):
    """Whether two states, {name: tensor}, agree to six digits."""
    return some.keys() == others.keys() and all(close(some[name], others[name]) for name in others)


def close(some, other):
    """Whether `some` is a tensor of the same shape with, to six digits, the same
    numbers.
    """
    if not isinstance(some, torch.Tensor) or some.shape != other.shape:
        return False
    return torch.allclose(some.double(), other.double(), rtol=1e-6, atol=1e-9)


def a_look(parameters):
    """The first parameter of a network, short enough to compare by eye."""
    name, value = next(iter(parameters.items()))
    return f"{name} {', '.join(f'{number:.5f}' for number in value.flatten()[:3].tolist())}, ..."
