"""Ranks and collectives: who is who, what a collective moves, and what it costs.

torchrun --nproc_per_node 2 ddp_course/lesson02.py
torchrun --nproc_per_node 4 ddp_course/lesson02.py --largest-mb 1
torchrun ddp_course/lesson02.py
python ddp_course/lesson02.py
"""

import statistics
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_course import runs
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    torchrun_environment,
)

# ---- who holds what ----
# A rank begins with n chunks. Chunk i of rank r is marked with a 1 at place (r, i) and 0 elsewhere:
# after any collective, sums included, the marks say what a rank holds and where it came from.


def marked_chunks(rank, n):
    """What rank `rank` of n begins with: float32 (n chunks, n * n marks)."""
    return torch.eye(n * n).view(n, n, n * n)[rank]


def broadcast(chunks, rank, n):
    dist.broadcast(chunks, src=0)
    return chunks


def scatter(chunks, rank, n):
    mine = torch.empty_like(chunks[0])
    dist.scatter(mine, list(chunks) if rank == 0 else None, src=0)
    return mine[None]


def gather(chunk, rank, n):
    gathered = [torch.empty_like(chunk[0]) for _ in range(n)] if rank == 0 else None
    dist.gather(chunk[0], gathered, dst=0)
    return torch.stack(gathered) if rank == 0 else chunk


def all_gather(chunk, rank, n):
    gathered = [torch.empty_like(chunk[0]) for _ in range(n)]
    dist.all_gather(gathered, chunk[0])
    return torch.stack(gathered)


def reduce(chunks, rank, n):
    dist.reduce(
        chunks, dst=0
    )  # on the other ranks, what is in `chunks` afterwards means nothing
    return chunks if rank == 0 else chunks[:0]


def all_reduce(chunks, rank, n):
    dist.all_reduce(chunks)
    return chunks


def reduce_scatter(chunks, rank, n):
    mine = torch.empty_like(chunks[0])
    dist.reduce_scatter(mine, list(chunks))
    return mine[None]


def all_to_all(chunks, rank, n):
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks)
    return received


def send_and_receive(chunk, rank, n):
    """Each rank sends to the next, and receives from the one before."""
    if n == 1:
        return chunk
    received = torch.empty_like(chunk)
    sending = dist.isend(chunk, (rank + 1) % n)  # with send, all would wait for all
    dist.recv(received, (rank - 1) % n)
    sending.wait()
    return received


ONE_CHUNK_EACH = [gather, all_gather, send_and_receive]
COLLECTIVES = [
    broadcast,
    scatter,
    gather,
    all_gather,
    reduce,
    all_reduce,
    reduce_scatter,
    all_to_all,
    send_and_receive,
]


def before_and_after(collective):
    """What this rank holds before and after a collective: two tensors (chunks, n * n
    marks).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = marked_chunks(rank, n)
    if collective in ONE_CHUNK_EACH:
        chunks = chunks[rank : rank + 1]
    elif collective in (broadcast, scatter) and rank != 0:
        chunks = torch.zeros_like(chunks)
    return chunks.clone(), collective(chunks.clone(), rank, n)


def named(chunks, n):
    """The marks in words: `A0 B1` are chunk 0 of rank 0 and chunk 1 of rank 1, `A0+B0`
    is a sum.
    """
    words = []
    for chunk in chunks:
        owners = [
            f"{chr(ord('A') + place // n)}{place % n}"
            for place in chunk.nonzero().flatten().tolist()
        ]
        words.append("+".join(owners) or "-")
    return " ".join(words) or "-"


@contextmanager
def rank_zero_first():
    """Let rank 0 through the `with` block alone; the others enter when it has left
    it.
    """
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


# ---- an all-reduce from send and receive ----


def ring_all_reduce(tensor, steps=None):
    """Sum a contiguous tensor over all ranks, in place, round a ring; return the bytes
    this rank sent.

    Each rank only ever sends to the next one. In the first n - 1 steps the pieces are
    summed as they go round, and each rank ends up with one finished piece; in the other
    n - 1 steps the finished pieces go round. All in all a rank sends 2 (n - 1) / n of
    the tensor's bytes, hardly more for many ranks than for few: Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    steps: stop after so many, to look inside.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = tensor.view(-1).tensor_split(n)
    sent = 0
    for step in range(2 * (n - 1) if steps is None else steps):
        outgoing, incoming = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        sending = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)
        sent += outgoing.numel() * outgoing.element_size()
    return sent


# ---- what it costs ----


def measure_all_reduce(sizes, rounds=30, device="cpu"):
    """Time all_reduce of each size in bytes, over and over; return the shortest time of
    each (seconds).

    The shortest, since whatever else the machine does can only add.
    """
    tensors = [torch.zeros(size // 4, device=device) for size in sizes]
    shortest = [float("inf")] * len(sizes)
    for _ in range(rounds):
        for index, tensor in enumerate(tensors):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # a GPU has only been told to: wait until it is done
            shortest[index] = min(shortest[index], time.perf_counter() - begin)
    return shortest


def fit_cost_line(sizes, seconds):
    """Fit seconds = alpha + beta * bytes; return alpha (seconds) and beta (seconds a
    byte).

    Least squares of the relative error, since the sizes span several powers of ten. The
    model is Roger Hockney's ("The communication challenge for MPP", 1994): alpha is the
    latency of a message, 1 / beta the bandwidth.
    """
    seconds = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.stack(
        [torch.ones_like(seconds), torch.tensor(sizes, dtype=torch.float64)], dim=1
    )
    rows /= seconds[
        :, None
    ]  # then the right side is all ones, and every error is relative
    alpha, beta = torch.linalg.lstsq(
        rows, torch.ones_like(seconds)[:, None]
    ).solution.flatten()
    return alpha.item(), beta.item()


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains=None)
    parser.add_argument(
        "--largest-mb", type=int, default=4, help="the largest message that is timed"
    )
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    with process_group(backend_for(device)) as (rank, n):
        log = runs.open_folder(args.out)
        places = [None] * n
        dist.all_gather_object(places, torchrun_environment())
        for place in places:
            log.info(
                "rank %d of %d, local rank %d of %d",
                place.rank,
                n,
                place.local_rank,
                place.local_world_size,
            )

        for collective in COLLECTIVES:
            before, after = before_and_after(collective)
            held = [None] * n
            dist.all_gather_object(held, f"{named(before, n)} -> {named(after, n)}")
            log.info("%-18s%s", collective.__name__, " | ".join(held))

        torch.manual_seed(args.seed + rank)
        mine = torch.randn(1_000_003, dtype=torch.float64, device=device)
        by_torch, by_ring = mine.clone(), mine.clone()
        dist.all_reduce(by_torch)
        sent = ring_all_reduce(by_ring)
        torch.testing.assert_close(by_ring, by_torch)

        sizes = [
            2**power for power in range(10, 21) if 2**power <= args.largest_mb * 2**20
        ] + [args.largest_mb * 2**20]
        seconds = measure_all_reduce(sizes, device=device)
        alpha, beta = fit_cost_line(sizes[::2], seconds[::2])
        errors = [
            abs(alpha + beta * size - time) / time
            for size, time in zip(sizes[1::2], seconds[1::2])
        ]
        result = {
            "lesson": args.lesson,
            "world_size": n,
            "backend": dist.get_backend(),
            "device": device.type,
            "ring_equals_all_reduce": True,  # or assert_close would have raised
            "ring_bytes_sent_share": sent / (mine.numel() * mine.element_size()),
            "latency_us": round(alpha * 1e6),
            "bandwidth_gb_per_second": round(1 / beta / 1e9, 2),
            "held_out_error": round(statistics.median(errors), 2),
        }
        if rank == 0:
            runs.write_result(
                args.out,
                result,
                [
                    {"bytes": size, "seconds": time}
                    for size, time in zip(sizes, seconds)
                ],
            )
        return result


if __name__ == "__main__":
    runs.start(main)
