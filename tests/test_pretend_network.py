"""The pretend network: gloo's numbers, at the cost of a slower link, and without a core."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import CannotLaunch, launch

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
        return [summed, told, *gathered, in_one, shard], objects


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_collectives_give_what_gloo_gives(nproc):
    pretended = launch(numbers_of_all_collectives, nproc=nproc, network=(1e-4, 1e9))
    real = launch(numbers_of_all_collectives, nproc=nproc)
    for (tensors, objects), (expected, expected_objects) in zip(pretended, real):
        assert objects == expected_objects
        for tensor, other in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, other)


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


def test_an_error_of_gloo_reaches_the_rank():
    def gather_into_too_few():
        with process_group():
            dist.all_gather([torch.empty(2)], torch.ones(2))

    with pytest.raises(Exception, match="(?i)output|tensor"):
        launch(gather_into_too_few, network=(1e-3, 1e9), timeout=20)


def test_a_rank_that_does_not_come_is_a_timeout():
    def rank_one_stays_away():
        with process_group(timeout=2) as (rank, _):
            if rank == 0:
                dist.all_reduce(torch.ones(1))
            else:
                time.sleep(10)

    with pytest.raises(Exception, match="(?i)timed out|timeout|did not finish"):
        launch(rank_one_stays_away, network=(1e-3, 1e9), timeout=8)


@pytest.mark.parametrize("network", [3, (1,), (1e-3, 0), (-1, 1e9), ("a", "b")])
def test_what_is_no_network_is_refused_in_one_line(network):
    with pytest.raises(CannotLaunch, match="network"):
        launch(numbers_of_all_collectives, network=network)
