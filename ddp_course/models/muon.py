"""Muon, an optimizer for matrices: by hand, in one process and on ranks.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; for
large models J. Liu et al., "Muon is Scalable for LLM Training", 2025.
"""

import itertools
import math

import torch
import torch.distributed as dist

from ddp_course.models.zero import deal

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # K. Jordan's, of each Newton-Schulz iteration


def orthogonalised(matrix, steps=5, dtype=torch.bfloat16):
    """Nearly the nearest matrix whose singular values are all 1, of the same shape.

    If the matrix is U S V^T, the result is U S' V^T. A Newton-Schulz iteration puts
    each singular value s through a s + b s^3 + c s^5, by products of matrices only.
    Five of them bring most values to between 0.7 and 1.2: near enough for an update.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    is_tall = len(x) > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)  # then no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T  # the small square: it needs all rows and all columns
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon in one process, like torch.optim.Muon with adjust_lr_fn="match_rms_adamw".

    matrices: parameters with two dimensions. dtype: of the Newton-Schulz iterations.
    With the factor 0.2 sqrt(longer side), of Liu et al., the elements of an update are
    about as large as AdamW's, so both can use the same learning rate.
    """

    def __init__(
        self, matrices, lr=1e-3, momentum=0.95, weight_decay=0.1, dtype=torch.bfloat16
    ):
        self.dtype = dtype
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrix in group["params"]:
                self.update(matrix, group)

    def update(self, matrix, group):
        """Update one matrix with its gradient. Only its owner keeps its average."""
        if not self.state[matrix]:
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        average, momentum = self.state[matrix]["momentum_buffer"], group["momentum"]
        average.lerp_(matrix.grad, 1 - momentum)
        ahead = matrix.grad.lerp(average, momentum)  # Nesterov's momentum
        direction = orthogonalised(ahead, dtype=self.dtype)
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * math.sqrt(max(matrix.shape))
        matrix.add_(direction, alpha=-group["lr"] * scale)


class OwnedMuon(Muon):
    """Muon on ranks that hold the same matrices, each with gradients of its own data.

    Each matrix has an owner. It gets the mean of the gradients, it alone keeps the
    momentum and iterates, and it broadcasts the new matrix. A ring sends as many bytes
    for a reduce and a broadcast as for the all-reduce of DDP.
    """

    @torch.no_grad()
    def step(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        groups = [group for group in self.param_groups for _ in group["params"]]
        matrices = [each for group in self.param_groups for each in group["params"]]
        owners = owners_of(matrices, ranks)
        wait_for_all(
            dist.reduce(matrix.grad, owner, async_op=True)
            for matrix, owner in zip(matrices, owners)
        )
        for matrix, owner, group in zip(matrices, owners, groups):
            if owner == rank:
                matrix.grad /= ranks
                self.update(matrix, group)
            else:
                matrix.grad = None  # a part of a sum, of no use to anyone
        wait_for_all(
            dist.broadcast(matrix.detach(), owner, async_op=True)
            for matrix, owner in zip(matrices, owners)
        )


def owners_of(matrices, ranks):
    """The rank that owns each matrix, so that all ranks have about as much to do."""
    costs = [min(matrix.shape) * matrix.numel() for matrix in matrices]
    return deal(costs, ranks)


def wait_for_all(works):
    for work in list(works):  # a list: all of them are under way before the first wait
        work.wait()


def hidden_matrices(model):
    """The parameters of a GPT that Muon updates: the matrices of its blocks.

    Embeddings, the head, norms and biases are left to AdamW.
    """
    return [value for value in model.blocks.parameters() if value.dim() == 2]


class Together:
    """Several optimizers that a training loop uses like one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        groups = (optimizer.param_groups for optimizer in self.optimizers)
        return list(itertools.chain(*groups))

    @property
    def state(self):
        states = (optimizer.state.items() for optimizer in self.optimizers)
        return dict(itertools.chain(*states))

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
