"""Lesson 02: what the collectives move, the ring, and the line that says what a message
costs.
"""

import time

import pytest
import torch
import torch.distributed as dist

from ddp_course import lesson02
from ddp_course.estimates import traffic
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch


def join_often(times):
    sums = []
    for _ in range(times):
        with process_group() as (rank, _):
            mine = torch.tensor(rank)
            dist.all_reduce(mine)
            sums.append(mine.item())
    return sums


def test_ranks_may_leave_a_group_and_join_another():
    """Without a prefix of its own, the second finds the addresses of the first in the
    store: most of these failed.
    """
    for _ in range(3):
        assert launch(join_often, 4, nproc=3) == [[3, 3, 3, 3]] * 3


def observe():
    with process_group() as (_, n):
        both = [
            lesson02.before_and_after(collective) for collective in lesson02.COLLECTIVES
        ]
        return {
            c.__name__: [lesson02.named(side, n) for side in pair]
            for c, pair in zip(lesson02.COLLECTIVES, both)
        }


EXPECTED = {  # what ranks 0, 1 and 2 of 3 hold afterwards
    "broadcast": ["A0 A1 A2", "A0 A1 A2", "A0 A1 A2"],
    "scatter": ["A0", "A1", "A2"],
    "gather": ["A0 B1 C2", "B1", "C2"],
    "all_gather": ["A0 B1 C2", "A0 B1 C2", "A0 B1 C2"],
    "reduce": ["A0+B0+C0 A1+B1+C1 A2+B2+C2", "-", "-"],
    "all_reduce": ["A0+B0+C0 A1+B1+C1 A2+B2+C2"] * 3,
    "reduce_scatter": ["A0+B0+C0", "A1+B1+C1", "A2+B2+C2"],
    "all_to_all": ["A0 B0 C0", "A1 B1 C1", "A2 B2 C2"],
    "send_and_receive": ["C2", "A0", "B1"],
}


def test_each_collective_leaves_what_its_picture_shows():
    observed = launch(observe, nproc=3)
    assert {
        name: [rank[name][1] for rank in observed] for name in observed[0]
    } == EXPECTED


def where_the_chunks_are(out):
    def probe(chunks, rank, n):
        raise RuntimeError(f"the chunks are on {chunks.device}")

    lesson02.choose_device = lambda *_, **__: torch.device("meta")
    lesson02.COLLECTIVES[0] = probe
    lesson02.main(["--out", str(out)])


def test_the_program_moves_tensors_on_its_device(tmp_path):
    """nccl has no backend for those of the CPU."""
    with pytest.raises(RankError, match="the chunks are on meta"):
        launch(where_the_chunks_are, tmp_path)


def order_of_transfers():
    """What this rank begins with when all ranks pass on."""
    begun, originals = [], (dist.isend, dist.irecv)

    def noted(name, begin):
        def noting(*args):
            begun.append(name)
            return begin(*args)

        return noting

    dist.isend, dist.irecv = (
        noted(name, begin) for name, begin in zip(("send", "receive"), originals)
    )
    with process_group() as (rank, n):
        received = torch.empty(1)
        lesson02.pass_on(torch.tensor([float(rank)]), received, rank, n)
    return begun, received.item()


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_not_all_ranks_send_first(nproc):
    """nccl does what a rank asks for one after the other: all would wait for all."""
    ranks = launch(order_of_transfers, nproc=nproc)
    assert [received for _, received in ranks] == [
        (rank - 1) % nproc for rank in range(nproc)
    ]
    assert {begun[0] for begun, _ in ranks} == {"send", "receive"}
    if nproc == 2:
        assert ranks[0][0] == ranks[1][0][::-1]


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_all_collectives_run_on_any_number_of_ranks(nproc):
    observed = launch(observe, nproc=nproc)
    whole_sum = " ".join(
        "+".join(f"{chr(ord('A') + rank)}{i}" for rank in range(nproc))
        for i in range(nproc)
    )
    assert all(rank["all_reduce"][1] == whole_sum for rank in observed)


def counted(collective, tensor):
    """Run it; return the bytes that went out through isend and send, counted where they
    go out.
    """
    sent = 0
    originals = dist.isend, dist.send

    def count_and(send):
        def counting(tensor, *args, **kwargs):
            nonlocal sent
            sent += tensor.numel() * tensor.element_size()
            return send(tensor, *args, **kwargs)

        return counting

    dist.isend, dist.send = map(count_and, originals)
    try:
        collective(tensor)
    finally:
        dist.isend, dist.send = originals
    return sent


def compare_with_torch(collective, length, dtype):
    """What a rank claims to have sent, what it did send, and whether the sum is
    right.
    """
    with process_group() as (rank, _):
        torch.manual_seed(rank)
        ours = torch.randint(-30, 30, (length,)).to(dtype)
        theirs = ours.clone()
        dist.all_reduce(theirs)
        claims = []
        sent = counted(lambda tensor: claims.append(collective(tensor)), ours)
        return claims[0], sent, bool(torch.allclose(ours, theirs))


@pytest.mark.parametrize("nproc", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 1000, 1003])
def test_the_ring_equals_all_reduce_and_sends_no_more_than_it_must(nproc, length):
    """In all, 2 (n - 1) times the tensor's bytes: for each rank, 2 (n - 1) / n.
    Integers in doubles: exact.
    """
    outcomes = launch(
        compare_with_torch, lesson02.ring_all_reduce, length, torch.float64, nproc=nproc
    )
    assert all(right for _, _, right in outcomes)
    assert [claimed for claimed, _, _ in outcomes] == [sent for _, sent, _ in outcomes]
    assert sum(sent for _, sent, _ in outcomes) == 2 * (nproc - 1) * 8 * length


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_the_ring_takes_any_type(dtype):
    assert all(
        right
        for _, _, right in launch(
            compare_with_torch, lesson02.ring_all_reduce, 6, dtype, nproc=3
        )
    )


def everyone_to_everyone(tensor):
    """Planted: an all_gather in disguise. Right, but each rank sends the whole tensor
    to all others.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = tensor.clone()
    sending = [dist.isend(mine, other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            received = torch.empty_like(tensor)
            dist.recv(received, other)
            tensor += received
    for work in sending:
        work.wait()


def a_step_too_few(tensor):
    """Planted: the last pieces never arrive."""
    lesson02.ring_all_reduce(tensor, steps=2 * dist.get_world_size() - 3)


def test_the_checks_of_the_ring_catch_planted_faults():
    outcomes = launch(
        compare_with_torch, everyone_to_everyone, 1000, torch.float64, nproc=3
    )
    assert all(right for _, _, right in outcomes)
    assert sum(sent for _, sent, _ in outcomes) > 2 * 2 * 8 * 1000
    assert not all(
        right
        for _, _, right in launch(
            compare_with_torch, a_step_too_few, 1000, torch.float64, nproc=3
        )
    )


def test_rank_zero_goes_first():
    def moments():
        with process_group() as (rank, _):
            with lesson02.rank_zero_first():
                begin = time.time()
                time.sleep(0.2)
                return begin, time.time()

    (_, zero_ends), *others = launch(moments, nproc=3)
    assert all(begins >= zero_ends for begins, _ in others)


def test_the_cost_line_finds_the_line_that_is_there():
    sizes = [2**power for power in range(10, 23)]
    alpha, beta = traffic.fit_cost_line(sizes, [2e-4 + 5e-10 * size for size in sizes])
    assert abs(alpha - 2e-4) < 1e-9 and abs(beta - 5e-10) < 1e-15


@pytest.mark.parametrize("nproc", [2, 3])
def test_messages_and_all_reduces_are_timed_for_each_size(nproc):
    def measure():
        with process_group():
            sizes = [1024, 32 * 2**20]  # so far apart that no busy machine swaps them
            return (
                traffic.time_messages(sizes, rounds=20),
                traffic.time_all_reduce(sizes, rounds=20),
            )

    outcomes = launch(measure, nproc=nproc)
    messages = [messages for messages, _ in outcomes]
    assert messages == messages[:1] * nproc, "all ranks are told the same"
    for small, large in messages + [all_reduces for _, all_reduces in outcomes]:
        assert 0 < small < large


def test_on_a_pretend_network_the_cost_line_finds_its_latency_and_bandwidth():
    latency, bandwidth = 5e-3, 100e6

    def measure():
        with process_group():
            sizes = [1024, 2**20]
            return traffic.time_all_reduce(sizes, rounds=10)

    for small, large in launch(measure, network=(latency, bandwidth)):
        for size, seconds in ((1024, small), (2**20, large)):
            least = traffic.ring_seconds(size, 2, latency, 1 / bandwidth)
            assert least <= seconds < 3 * least + 0.1


def test_two_ranks_pay_the_same_by_star_and_tree_and_less_by_ring():
    alpha, beta, size = 1e-3, 1e-9, 100e6
    star = traffic.star_seconds(size, 2, alpha, beta)
    assert star == traffic.tree_seconds(size, 2, alpha, beta)
    assert traffic.ring_seconds(size, 2, alpha, beta) < star


def test_for_many_ranks_the_tree_wins_with_small_tensors_and_the_ring_with_large():
    alpha, beta = 1e-3, 1e-9
    costs = {
        size: [
            cost(size, 64, alpha, beta)
            for cost in (
                traffic.star_seconds,
                traffic.tree_seconds,
                traffic.ring_seconds,
            )
        ]
        for size in (4, 1e9)
    }
    star, tree, ring = costs[4]
    assert tree < ring <= star
    star, tree, ring = costs[1e9]
    assert ring < tree < star
    # a rank sends 2 (n - 1) / n of the tensor, so this hardly grows with n
    assert ring < 1.1 * 2 * 1e9 * beta + 2 * 63 * alpha


def test_a_ring_that_uses_its_links_fully_has_the_links_bandwidth():
    for n in (2, 8):
        seconds = traffic.ring_seconds(1e9, n, 0.0, 1 / 5e9)
        assert abs(traffic.bus_bandwidth(1e9, n, seconds) - 5e9) < 1
