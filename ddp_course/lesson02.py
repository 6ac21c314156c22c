"""Ranks and collectives: who is who, what a collective moves, and what it costs.

torchrun --nproc_per_node 2 ddp_course/lesson02.py
torchrun --nproc_per_node 4 ddp_course/lesson02.py --largest-mb 1
torchrun ddp_course/lesson02.py
python ddp_course/lesson02.py
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from ddp_course import runs
from ddp_course.estimates.traffic import (
    bus_bandwidth,
    fit_cost_line,
    time_all_reduce,
    time_messages,
)
from ddp_course.estimates.traffic import ring_seconds as ring_seconds
from ddp_course.estimates.traffic import tree_seconds as tree_seconds
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    torchrun_environment,
)

# ---- who holds what ----
# A rank begins with n chunks. Chunk i of rank r is marked with a 1 at place (r, i) and
# 0 elsewhere. After any collective, also after sums, the marks say what a rank holds
# and where it came from.


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
    dist.reduce(chunks, dst=0)
    return chunks if rank == 0 else chunks[:0]  # the other ranks' chunks mean nothing


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
    pass_on(chunk, received, rank, n)
    return received


def pass_on(outgoing, received, rank, n):
    """Send a tensor to the next rank, and receive one from the rank before."""
    send = partial(dist.isend, outgoing, (rank + 1) % n)
    receive = partial(dist.irecv, received, (rank - 1) % n)
    # isend and irecv only begin; with send, all would wait for all. nccl does one after
    # the other, so not all ranks may send first
    both = [receive(), send()] if rank % 2 else [send(), receive()]
    for work in both:
        work.wait()


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


def before_and_after(collective, device="cpu"):
    """What this rank holds before and after a collective, on a device that the backend
    serves: two tensors (chunks, n * n marks).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = marked_chunks(rank, n).to(device)
    if collective in ONE_CHUNK_EACH:
        chunks = chunks[rank : rank + 1]
    elif collective in (broadcast, scatter) and rank != 0:
        chunks = torch.zeros_like(chunks)
    return chunks.clone(), collective(chunks.clone(), rank, n)


def named(chunks, n):
    """The marks in words: `A0 B1` are chunk 0 of rank 0 and chunk 1 of rank 1.

    `A0+B0` is a sum, and `-` is an empty chunk, or no chunk at all.
    """
    words = []
    for chunk in chunks:
        places = chunk.nonzero().flatten().tolist()
        words.append("+".join(f"{chr(ord('A') + p // n)}{p % n}" for p in places))
    return " ".join(word or "-" for word in words) or "-"


@contextmanager
def rank_zero_first():
    """Let rank 0 through the `with` block first, and then the others."""
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


# ---- an all-reduce from send and receive ----


def ring_all_reduce(tensor, steps=None):
    """Sum a contiguous tensor over all ranks, in place; return the bytes it sent.

    Each rank sends to the next rank only. In the first n - 1 steps the pieces are
    summed as they go round the ring, and each rank ends up with one finished piece; in
    the next n - 1 steps the finished pieces go round. A rank sends 2 (n - 1) / n of the
    tensor's bytes, always less than twice the tensor: P. Patarasuk and X. Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    steps: stop after this many, to look inside.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = tensor.view(-1).tensor_split(n)
    sent = 0
    for step in range(2 * (n - 1) if steps is None else steps):
        outgoing, incoming = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        pass_on(outgoing, received, rank, n)
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)
        sent += outgoing.numel() * outgoing.element_size()
    return sent


# ---- the program ----


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains=None)
    largest = "the largest message that is timed (4)"
    parser.add_argument("--largest-mb", type=runs.count, default=4, help=largest)
    return parser.parse_args(argv)


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    with process_group(backend_for(device), args.timeout) as (rank, n):
        log = runs.open_folder(args.out)
        places = [None] * n
        dist.all_gather_object(places, torchrun_environment())
        for place in places:
            here = f"local rank {place.local_rank} of {place.local_world_size}"
            log.info(f"rank {place.rank} of {n}, {here}")

        for collective in COLLECTIVES:
            before, after = before_and_after(collective, device)
            held = [None] * n
            dist.all_gather_object(held, f"{named(before, n)} -> {named(after, n)}")
            log.info(f"{collective.__name__:<18}{' | '.join(held)}")

        torch.manual_seed(args.seed + rank)
        mine = torch.randn(1_000_003, dtype=torch.float64, device=device)
        by_torch, by_ring = mine.clone(), mine.clone()
        dist.all_reduce(by_torch)
        sent = ring_all_reduce(by_ring)
        torch.testing.assert_close(by_ring, by_torch)

        result = {
            "lesson": args.lesson,
            "world_size": n,
            "backend": dist.get_backend(),
            "device": device.type,
            "ring_equals_all_reduce": True,  # or assert_close would have raised
            "ring_bytes_sent_share": sent / mine.nbytes,
        }
        rows = []
        if n > 1:
            largest = args.largest_mb * 2**20
            sizes = [2**p for p in range(10, 21) if 2**p < largest] + [largest]
            messages = time_messages(sizes, device=device)
            all_reduces = time_all_reduce(sizes, device=device)
            alpha, beta = fit_cost_line(sizes[::2], messages[::2])
            busbw = bus_bandwidth(largest, n, all_reduces[-1])
            result |= {
                "latency_us": round(alpha * 1e6),
                "bandwidth_gb_per_second": round(1 / beta / 1e9, 2),
                "all_reduce_busbw_gb_per_second": round(busbw / 1e9, 2),
            }
            columns = zip(sizes, messages, all_reduces)
            rows = [{"bytes": b, "message": m, "all_reduce": a} for b, m, a in columns]
        if rank == 0:
            runs.write_result(args.out, result, rows)
        return result


if __name__ == "__main__":
    runs.start(main)
