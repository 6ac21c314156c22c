"""What a message and an all-reduce cost: measured, fitted to a line, and by formula."""

import math
import time

import torch
import torch.distributed as dist


def time_messages(sizes, rounds=30, device="cpu"):
    """Time a message of each of these sizes in bytes from rank 0 to rank 1.

    Rank 1 sends it back, and half of the time there and back counts. Returns the
    shortest of all rounds, in seconds, on all ranks: anything else that the machine
    does makes a round longer, never shorter.
    """
    rank, shortest = dist.get_rank(), [float("inf")] * len(sizes)
    for _ in range(rounds if rank < 2 else 0):
        for index, size in enumerate(sizes):
            tensor = torch.zeros(size // 4, device=device)
            begin = time.perf_counter()
            if rank == 0:
                dist.send(tensor, 1)
            dist.recv(tensor, 1 - rank)
            if rank == 1:
                dist.send(tensor, 0)
            tensor[0].item()  # on a GPU: wait until it is there
            seconds = (time.perf_counter() - begin) / 2
            shortest[index] = min(shortest[index], seconds)
    of_rank_zero = [shortest]
    dist.broadcast_object_list(of_rank_zero)
    return of_rank_zero[0]


def time_all_reduce(sizes, rounds=30, device="cpu"):
    """Time all_reduce of tensors of these sizes in bytes; the shortest of all rounds."""
    shortest = [float("inf")] * len(sizes)
    for _ in range(rounds):
        for index, size in enumerate(sizes):
            tensor = torch.zeros(size // 4, device=device)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()
            shortest[index] = min(shortest[index], time.perf_counter() - begin)
    return shortest


def fit_cost_line(sizes, seconds):
    """Fit seconds = alpha + beta * bytes; return alpha (s) and beta (s per byte).

    Least squares of the relative error, since the sizes span several powers of ten. The
    model is R. Hockney's, "The communication challenge for MPP", 1994: alpha is the
    latency of a message, 1 / beta the bandwidth.
    """
    seconds = torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones = torch.ones_like(seconds)
    rows = torch.cat([ones, torch.tensor(sizes, dtype=torch.float64)[:, None]], dim=1)
    # divided by the seconds, the right side is all ones, and every error is relative
    alpha, beta = torch.linalg.lstsq(rows / seconds, ones).solution.flatten()
    return alpha.item(), beta.item()


def star_seconds(size, n, alpha, beta):
    """An all-reduce in which all send to rank 0, one by one, and it sends to all."""
    return 2 * (n - 1) * (alpha + beta * size)


def tree_seconds(size, n, alpha, beta):
    """An all-reduce by pairs: half of the remaining ranks send per round; then back."""
    return 2 * math.ceil(math.log2(n)) * (alpha + beta * size)


def ring_seconds(size, n, alpha, beta):
    """A ring all-reduce of a tensor of this many bytes on n ranks.

    The formulas: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005.
    """
    return 2 * (n - 1) * (alpha + beta * size / n)


def bus_bandwidth(size, n, seconds):
    """The bytes per second that each link of a ring would have carried: "busbw"."""
    return 2 * (n - 1) / n * size / seconds
