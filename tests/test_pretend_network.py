"""The pretend network: gloo's numbers, at the cost of slower links, and without a core."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_course import UsageError
from ddp_course.ranks import pretend_network
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import CannotLaunch, launch
from ddp_course.ranks.links import Link, Network, as_text, from_text
from ddp_course.ranks.pretend_network import End, machines_of

SLOW = (0.05, 20e6)  # 50 ms, and 20 MB per second
MEGABYTE = 250_000  # elements of float32


def numbers_of_all_collectives():
    """What each collective gives on this rank, as one list of tensors."""
    with process_group() as (rank, n):
        mine = torch.arange(6.0) + 10 * rank
        summed = mine.clone()
        dist.all_reduce(summed)
        told = mine.clone()
        dist.broadcast(told, src=n - 1)
        gathered = [torch.empty(6) for _ in range(n)]
        dist.all_gather(gathered, mine)
        in_one = torch.empty(6 * n)
        dist.all_gather_into_tensor(in_one, mine)
        shard = torch.empty(6)
        dist.reduce_scatter_tensor(shard, torch.arange(6.0 * n) + rank)
        objects = [None] * n
        dist.all_gather_object(objects, f"from {rank}")
        dist.barrier()
        pieces = [torch.zeros(2) for _ in range(n)]
        if torch.__version__ >= "2.13":  # before, gloo had no all-to-all of lists
            dist.all_to_all(pieces, [mine[other : other + 2] for other in range(n)])
        exchanged = torch.empty(6 * n)
        dist.all_to_all_single(exchanged, torch.arange(6.0 * n) + 100 * rank)
        rows = torch.empty(n * rank + n, 2)  # rank r receives r + 1 rows of each
        sizes = list(range(1, n + 1))
        source = torch.arange(n * (n + 1.0)).view(-1, 2) + 100 * rank
        dist.all_to_all_single(rows, source, [rank + 1] * n, sizes)
        exchanges = [*pieces, exchanged, rows]
        return [summed, told, *gathered, in_one, shard, *exchanges], objects


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_collectives_give_what_gloo_gives(nproc):
    pretended = launch(numbers_of_all_collectives, nproc=nproc, network=(1e-4, 1e9))
    real = launch(numbers_of_all_collectives, nproc=nproc)
    for (tensors, objects), (expected, expected_objects) in zip(pretended, real):
        assert objects == expected_objects
        for tensor, other in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, other)


class OlderGloo:
    """The real gloo, by the names alone that it has with torch 2.13."""

    def __init__(self, gloo):
        self.gloo = gloo

    def __getattr__(self, name):
        if name in pretend_network.BEFORE:
            raise AttributeError(name)
        return getattr(self.gloo, name)


def numbers_and_names(older):
    with process_group() as (rank, n):
        group = dist.group.WORLD
        if older:
            group.gloo = OlderGloo(group.gloo)
        gathered, shard, exchanged = torch.empty(2 * n), torch.empty(2), torch.empty(n)
        dist.all_gather_into_tensor(gathered, torch.full((2,), 1.0 + rank))
        dist.reduce_scatter_tensor(shard, torch.arange(2.0 * n) + rank)
        dist.all_to_all_single(exchanged, torch.arange(1.0 * n) + 10 * rank)
        names = [name for name, *_ in carried()["inside"]]
        return gathered.tolist(), shard.tolist(), exchanged.tolist(), names


def test_collectives_are_found_and_told_by_one_name_with_older_versions_too():
    network = (1e-5, 1e9)
    today, before = (
        launch(numbers_and_names, older, nproc=2, network=network)
        for older in (False, True)
    )
    assert today == before
    assert [*dict.fromkeys(today[0][3])] == ["allgather", "reduce_scatter", "alltoall"]


def numbers_of_all_messages():
    """What the ranks of a ring send each other, in four ways."""
    with process_group() as (rank, n):
        mine, after, before = torch.arange(6.0) + rank, (rank + 1) % n, (rank - 1) % n
        blocking, batched, large = torch.empty(6), torch.empty(6), torch.empty(MEGABYTE)
        if rank == 0:
            dist.send(mine, after)
            source = dist.recv(blocking)  # from any rank
        else:
            source = dist.recv(blocking)
            dist.send(mine, after)
        both = [
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, batched, before),
        ]
        # in this order nobody would receive, if a message had to wait for its turn
        sent = dist.isend(torch.full([MEGABYTE], float(rank)), after)
        received = dist.irecv(large, before)
        for work in [sent, received, *dist.batch_isend_irecv(both)]:
            work.wait()
        assert source == before
        return torch.cat([blocking, batched, large])


@pytest.mark.parametrize("nproc", [2, 3])
def test_messages_give_what_gloo_gives(nproc):
    pretended = launch(numbers_of_all_messages, nproc=nproc, network=(1e-4, 1e9))
    for got, expected in zip(pretended, launch(numbers_of_all_messages, nproc=nproc)):
        assert torch.equal(got, expected)


def ddp_parameters():
    with process_group() as (rank, _):
        torch.manual_seed(rank)  # DDP starts all ranks from rank 0's parameters
        model = DDP(nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=data)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]


def test_ddp_trains_on_it_as_on_gloo():
    real = launch(ddp_parameters)
    for parameters in launch(ddp_parameters, network=(1e-3, 1e8)):
        for parameter, expected in zip(parameters, real[0], strict=True):
            assert torch.equal(parameter, expected)


def seconds_of_one_megabyte():
    """The seconds and CPU seconds until an asynchronous all_reduce of 1 MB was begun,
    and until it was done, with no work in between.
    """
    with process_group():
        tensor = torch.ones(MEGABYTE)
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        work = dist.all_reduce(tensor, async_op=True)
        begun = time.perf_counter() - begin
        done_at_once = work.is_completed()
        work.wait()
        done = time.perf_counter() - begin
        return (
            begun,
            done,
            time.process_time() - begin_cpu,
            done_at_once,
            tensor[0].item(),
        )


def test_a_transfer_takes_its_time_and_hardly_any_of_a_core():
    latency, bandwidth = SLOW
    least = 2 * (latency + 4 * MEGABYTE / 2 / bandwidth)  # a ring of two ranks
    for begun, done, cpu, done_at_once, value in launch(
        seconds_of_one_megabyte, network=SLOW
    ):
        assert value == 2.0
        assert begun < done / 2 and not done_at_once, "async_op does not wait"
        assert done >= least
        assert cpu < done / 2
    # and gloo itself takes a small part of that: the time is the pretend network's
    for _, done, *_ in launch(seconds_of_one_megabyte):
        assert done < least


def two_transfers_and_their_spans():
    with process_group():
        works = [dist.all_reduce(torch.ones(MEGABYTE), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        return dist.group.WORLD.spans


def test_one_transfer_waits_for_the_one_before():
    for spans in launch(two_transfers_and_their_spans, network=SLOW):
        (_, first_end), (second_begin, _) = spans[-2:]
        assert second_begin >= first_end


# ---- two links ----

INSIDE, BETWEEN = Link(1e-3, 1e9), Link(0.2, 1e8)


def carried():
    """What this rank's ends have carried: {link: [(name, seconds, begin)]}."""
    ends = dist.group.WORLD.ends
    return {
        link: [(name, end - begin, begin) for name, begin, end in ends[link].carried]
        for link in ends
    }


def use_both_links():
    """On two machines of two ranks. Returns the seconds of each transfer, by link; and
    how long this rank waited for messages on each link.
    """
    with process_group() as (rank, _):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        numbers = torch.ones(1000)  # 4 kB
        dist.all_reduce(numbers, group=mesh["tensor"].get_group())
        dist.all_reduce(numbers, group=mesh["data"].get_group())
        dist.all_reduce(numbers)
        dist.broadcast(numbers, group_src=0, group=mesh["data"].get_group())
        waited = []
        for peer in (rank ^ 1, rank ^ 2):
            begin = time.perf_counter()
            works = [dist.isend(numbers, peer), dist.irecv(torch.empty(1000), peer)]
            for work in works:
                work.wait()
            waited.append(time.perf_counter() - begin)
        sizes = [1000 * other for other in range(4)]  # nothing for rank 0
        parts = [1000 * rank] * 4
        output, source = torch.empty(sum(parts)), torch.ones(sum(sizes))
        dist.all_to_all_single(output, source, parts, sizes)
        seconds = {
            link: [(name, round(took, 9)) for name, took, _ in transfers]
            for link, transfers in carried().items()
        }
        return seconds, waited, numbers[0].item()


def seconds_of_pieces(link, rank, peers):
    """An all-to-all's messages: of 4 kB times the number of the rank that receives."""
    received = [rank for _ in peers if rank]
    messages = [peer for peer in peers if peer] + received
    return [("alltoall", link.message(4000 * count)) for count in messages]


def test_two_ranks_of_a_machine_use_its_link_and_all_others_the_one_between():
    network = Network(INSIDE, BETWEEN, ranks_per_machine=2)
    for rank, (seconds, waited, value) in enumerate(
        launch(use_both_links, nproc=4, network=network)
    ):
        assert value == 16.0
        [neighbour], others = [rank ^ 1], [peer for peer in range(4) if rank ^ peer > 1]
        messages = ["send", "recv"]
        expected = {
            "inside": [
                ("allreduce", INSIDE.ring(4000, 2, rounds=2)),
                *[(name, INSIDE.message(4000)) for name in messages],
                *seconds_of_pieces(INSIDE, rank, [neighbour]),
            ],
            "between": [
                ("allreduce", BETWEEN.ring(4000, 2, rounds=2)),
                ("allreduce", BETWEEN.ring(4000, 4, rounds=2)),
                ("broadcast", BETWEEN.message(4000)),
                *[(name, BETWEEN.message(4000)) for name in messages],
                *seconds_of_pieces(BETWEEN, rank, others),
            ],
        }
        for link, transfers in expected.items():
            rounded = sorted((name, round(took, 9)) for name, took in transfers)
            assert sorted(seconds[link]) == rounded, (rank, link)
        assert waited[0] >= INSIDE.message(4000)
        assert waited[1] >= BETWEEN.message(4000)


def test_an_end_sends_and_receives_at_once_but_one_transfer_each_way():
    end = End(BETWEEN)
    sent, received = end.carry("send", 100, "out"), end.carry("recv", 100, "in")
    assert received - sent < 50
    assert end.carry("send", 100, "out") == sent + 100
    assert end.carry("allreduce", 100, "out", "in") == sent + 200


def send_two_and_receive_two():
    with process_group() as (rank, n):
        works = [
            work
            for peer in range(n)
            if peer != rank
            for work in (
                dist.isend(torch.ones(2), peer),
                dist.irecv(torch.ones(2), peer),
            )
        ]
        for work in works:
            work.wait()
        return carried()["between"]


def test_a_rank_sends_one_message_after_the_other_and_so_receives():
    """All go between machines, for each rank has one of its own."""
    network = Network(INSIDE, BETWEEN, ranks_per_machine=1)
    for transfers in launch(send_two_and_receive_two, nproc=3, network=network):
        for way in ("send", "recv"):
            begins = sorted(begin for name, _, begin in transfers if name == way)
            assert len(begins) == 2
            # a sleep may end a moment early, by the other of two clocks
            assert begins[1] - begins[0] > 0.99 * BETWEEN.message(8)


def test_which_ranks_share_a_machine_is_said_by_torchrun_or_by_the_caller(monkeypatch):
    network = Network(INSIDE, BETWEEN)
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert machines_of([0, 1, 2, 3], 2, network) == [0, 0, 0, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert machines_of([0, 1, 2, 3], 2, network) == [0, 0, 1, 1]
    assert machines_of([1, 3], 3, network) == [0, 1]
    assert machines_of([0, 1, 2, 3], 2, network._replace(ranks_per_machine=3)) == [
        0,
        0,
        0,
        1,
    ]
    with pytest.raises(UsageError, match="equally many ranks per machine"):
        machines_of([0, 1, 2, 3], 1, network)


@pytest.mark.parametrize(
    "network, expected",
    [
        ((1e-3, 1e9), (INSIDE, INSIDE, None)),
        ((INSIDE, BETWEEN), (INSIDE, BETWEEN, None)),
        ([[1e-3, 1e9], [0.2, 1e8], 2], (INSIDE, BETWEEN, 2)),
        (Network(INSIDE, BETWEEN), (INSIDE, BETWEEN, None)),
    ],
)
def test_a_network_goes_through_the_environment_as_it_is(network, expected):
    assert from_text(as_text(network)) == expected


def test_an_error_of_gloo_reaches_the_rank():
    def gather_into_too_few():
        with process_group():
            dist.all_gather([torch.empty(2)], torch.ones(2))

    with pytest.raises(Exception, match="(?i)output|tensor"):
        launch(gather_into_too_few, network=(1e-3, 1e9), timeout=20)


@pytest.mark.parametrize("waits", [dist.all_reduce, dist.recv])
def test_a_rank_that_does_not_come_is_a_timeout(waits):
    def rank_one_stays_away():
        with process_group(timeout=2) as (rank, _):
            if rank == 0:
                waits(torch.ones(1))
            else:
                time.sleep(10)

    with pytest.raises(Exception, match="(?i)timed out|timeout|did not finish"):
        launch(rank_one_stays_away, network=(1e-3, 1e9), timeout=8)


@pytest.mark.parametrize(
    "network",
    [
        3,
        (1,),
        (1e-3, 0),
        (-1, 1e9),
        ("a", "b"),
        (INSIDE, (1e-3, 0)),
        (1e-3, 1e9, 2),
        (INSIDE, BETWEEN, 0),
        (INSIDE, BETWEEN, 1.5),
    ],
)
def test_what_is_no_network_is_refused_in_one_line(network):
    with pytest.raises(CannotLaunch, match="network"):
        launch(numbers_of_all_collectives, network=network)
