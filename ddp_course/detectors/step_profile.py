"""When in a step its gradients become ready: what a model of the communication needs."""

import time
from typing import NamedTuple

import torch


class StepProfile(NamedTuple):
    """One step of one rank without communication. All times in seconds."""

    compute: float  # the whole step
    backward: float  # its backward pass
    gradients: list  # of each parameter: (when it is ready, bytes), in this order
    update: float = 0.0  # the optimizer's update, after backward


def profile_step(forward, parameters, update, rounds=7):
    """Take the StepProfile of a step: the round of median length.

    forward() returns the loss, update() is what follows backward. Give it a model that
    does not communicate: not wrapped, or inside `no_sync()`.
    """
    ready, found = [], []

    def now():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def note(parameter):
        ready.append((now(), parameter.grad.nbytes))

    hooks = [p.register_post_accumulate_grad_hook(note) for p in parameters]
    for _ in range(rounds):
        ready.clear()
        begin = now()
        loss = forward()
        middle = now()
        loss.backward()
        end = now()
        update()
        done = now()
        gradients = [(when - middle, size) for when, size in ready]
        found.append(StepProfile(done - begin, end - middle, gradients, done - end))
    for hook in hooks:
        hook.remove()
    return sorted(found)[rounds // 2]
