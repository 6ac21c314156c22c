"""Memory: six ways to train one network, what each rank keeps of it, and what it
sends.
"""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import THOROUGH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_course import lesson12
from ddp_course.lesson10 import loss_of
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch, start_server
from ddp_course.scenery import memory
from ddp_course.scenery.models import GPT

CPU = torch.device("cpu")
SHAPE = {"vocabulary": 256, "context": 64, "layers": 6, "heads": 4, "width": 128}
UNEVEN = {
    "vocabulary": 31,
    "context": 7,
    "layers": 3,
    "heads": 2,
    "width": 10,
}  # 2, 3 and 4 ranks leave a rest
STAGES = {
    "ddp": 0,
    "zero1-by-hand": 1,
    "zero1": 1,
    "zero2-by-hand": 2,
    "fsdp-by-hand": 3,
    "fsdp": 3,
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server()


def network(shape=UNEVEN, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return GPT(**shape).to(dtype)


def batches(world_size, rank=None, steps=4, each=2):
    """Random tokens and targets; all of a step's, or one rank's part of them."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(31, (steps, 2, world_size * each, 7), generator=generator)
    return [
        tuple(part if rank is None else part.chunk(world_size)[rank] for part in step)
        for step in numbers
    ]


def train_in_all_ways(dtype):
    """For each way: (the losses of some steps, the parameters at the end)."""
    with process_group() as (rank, world_size):
        results = {}
        for name, way in lesson12.WAYS.items():
            # on rank 1 another beginning: all ways have to take rank 0's, but for
            # fully_shard, which trusts
            model, optimizer, parameters_of_all = way(
                network(seed=0 if name == "fsdp" else rank, dtype=dtype), CPU
            )
            losses = lesson12.train_one_epoch(
                model, batches(world_size, rank), optimizer, CPU
            )
            results[name] = (
                losses,
                {key: value.clone() for key, value in parameters_of_all().items()},
            )
        return results


def train_alone(world_size, dtype):
    alone = network(dtype=dtype)
    optimizer = torch.optim.AdamW(alone.parameters(), **lesson12.ADAM)
    losses = []
    for tokens, targets in batches(world_size):
        optimizer.zero_grad()
        losses.append(loss_of(alone, tokens, targets, torch.float32, CPU))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses], alone.state_dict()


@pytest.mark.parametrize("nproc", [2, 3])
def test_all_six_ways_train_as_one_process_with_the_joined_batch_does(nproc):
    losses, expected = train_alone(nproc, torch.float64)
    for rank, results in enumerate(
        launch(train_in_all_ways, torch.float64, nproc=nproc, timeout=100)
    ):
        assert results.keys() == STAGES.keys()
        for way, (of_ranks, parameters) in results.items():
            torch.testing.assert_close(
                of_ranks, losses, rtol=1e-5, atol=1e-6, msg=f"{way}, rank {rank}"
            )
            assert {*expected} - {*parameters} <= {"head.weight"}, (
                way
            )  # by hand, what is tied comes once
            for name, value in parameters.items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-5, atol=1e-6, msg=f"{way}, {name}"
                )


# ---- what is kept ----


def fsdp_as_one(whole, device):
    fully_shard(whole, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return whole, torch.optim.AdamW(whole.parameters(), **lesson12.ADAM)


def ddp_with_buckets(whole, device):
    return DistributedDataParallel(whole), torch.optim.AdamW(
        whole.parameters(), **lesson12.ADAM
    )


def observe_bytes():
    """For each way, per parameter: what is held, what is in use after a step, and at
    its peak, and what it shares.
    """
    with process_group():
        parameters = sum(value.numel() for value in network(SHAPE).parameters())
        text, seen = torch.zeros(1, 8, dtype=torch.long), {}
        for name, way in {
            **lesson12.WAYS,
            "one block": fsdp_as_one,
            "buckets": ddp_with_buckets,
        }.items():
            with watch.memory_timeline() as timeline:
                model, optimizer, *_ = way(network(SHAPE), CPU)
                train = partial(
                    lesson12.train_one_epoch, model, [(text, text)], optimizer, CPU
                )
                train()
                begin = len(timeline)
                train()
                step = [used / parameters for used in timeline[begin:]]
            shared = {
                kind: size / parameters
                for kind, size in watch.count_bytes(train).items()
                if size > 1000
            }
            held = [part / parameters for part in lesson12.held(model, optimizer)]
            seen[name] = {
                "held": held,
                "after": step[-1],
                "peak": max(step),
                "shared": shared,
            }
        return seen


@pytest.mark.parametrize("n", [2, 4] if THOROUGH else [4])
def test_what_a_rank_keeps_and_sends_is_what_the_formulas_say(n):
    """All of it from one run, which takes its time."""
    of_ranks = launch(observe_bytes, nproc=n, timeout=200)
    keeps_its_share(n, of_ranks)
    peaks_a_few_blocks_higher(n, of_ranks)
    sends_as_the_paper_says(n, of_ranks)
    for seen in of_ranks:  # buckets of DDP's own are another 4 bytes a parameter
        assert seen["buckets"]["after"] == pytest.approx(20, rel=0.03)
        assert seen["ddp"]["after"] == pytest.approx(16, rel=0.03)


def keeps_its_share(n, of_ranks):
    """Of the rank that keeps most, where whole parameters are dealt out; within 3 %."""
    for way, stage in STAGES.items():
        expected = memory.states(1, n, stage, "fp32")
        largest = max(
            (seen[way] for seen in of_ranks), key=lambda seen: sum(seen["held"])
        )
        assert largest["held"] == pytest.approx(list(expected), rel=0.03), way
        assert largest["after"] == pytest.approx(sum(expected), rel=0.03), (
            way
        )  # and nothing else is there
        for seen in of_ranks:
            assert (
                sum(seen[way]["held"]) <= sum(largest["held"]) <= 1.03 * sum(expected)
            )


def peaks_a_few_blocks_higher(n, of_ranks):
    """FSDP; where the whole model is one block, it peaks with all weights and all
    gradients.
    """
    block = sum(value.numel() for value in network(SHAPE).blocks[0].parameters())
    block *= 4 / sum(value.numel() for value in network(SHAPE).parameters())
    for seen in of_ranks:
        for way in ("fsdp-by-hand", "fsdp"):
            assert 16 / n + 2 * block < seen[way]["peak"] < 16 / n + 4.5 * block, way
        assert 12 / n + 8 <= seen["one block"]["peak"] <= 16 / n + 8.3
        assert seen["one block"]["after"] == pytest.approx(16 / n, rel=0.03)


def sends_as_the_paper_says(n, of_ranks):
    paper = {
        way: memory.sent(1, n, stage, "fp32") * n / (n - 1)
        for way, stage in STAGES.items()
    }
    for seen in of_ranks:
        assert seen["ddp"]["shared"] == pytest.approx({"allreduce": 4})
        assert 2 * seen["ddp"]["shared"]["allreduce"] == pytest.approx(paper["ddp"])
        for way in (
            "zero1",
            "zero1-by-hand",
        ):  # the second half of the all-reduce is not needed
            assert seen[way]["shared"] == pytest.approx(
                {"allreduce": 4, "broadcast": 4}
            )
        assert seen["zero2-by-hand"]["shared"] == pytest.approx(
            {"reduce": 4, "broadcast": 4}
        )
        assert sum(seen["zero2-by-hand"]["shared"].values()) == pytest.approx(
            paper["zero2-by-hand"]
        )
        assert seen["fsdp-by-hand"]["shared"] == pytest.approx(
            {"allgather": 8, "reduce_scatter": 4}, rel=1e-3
        )
        assert sum(seen["fsdp-by-hand"]["shared"].values()) == pytest.approx(
            paper["fsdp-by-hand"], rel=1e-3
        )
        # what is left of the model when all blocks are wrapped is gathered once
        assert seen["fsdp"]["shared"] == pytest.approx(
            {"allgather": 8, "reduce_scatter": 4}, rel=0.03
        )


# ---- shards ----


def shards_of():
    with process_group() as (rank, world_size):
        whole = network()
        before = {name: value.clone() for name, value in whole.named_parameters()}
        model, *_ = lesson12.fsdp_by_hand(whole, CPU)
        emptied = [
            value.numel() for value in model.parameters() if not value.requires_grad
        ]
        shards = [
            value.detach().clone()
            for value in model.parameters()
            if value.requires_grad
        ]
        return before, emptied, shards


def test_the_shards_of_all_ranks_are_the_model_and_nothing_else_is_left_of_it():
    of_ranks = launch(shards_of, nproc=3)
    before = of_ranks[0][0]
    numbers = torch.cat([value.flatten() for value in before.values()]).sort().values
    for _, emptied, shards in of_ranks:
        assert not any(emptied) and len(emptied) == len(before)
        assert len(shards) == UNEVEN["layers"] + 1
        assert [len(shard) for shard in shards] == [
            len(shard) for shard in of_ranks[0][2]
        ]
    joined = torch.cat([shard for _, _, shards in of_ranks for shard in shards])
    padding = len(joined) - len(numbers)
    assert 0 < padding < 3 * len(of_ranks[0][2])  # less than a row for each
    rest = joined[joined != 0].sort().values
    torch.testing.assert_close(rest, numbers[numbers != 0], rtol=0, atol=0)


class Odd(nn.Module):
    """What comes up in real models: dropout, an input that needs a gradient, a layer
    that is used twice, one frozen.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale):
        return self.layer(self.dropout(self.frozen(torch.tanh(self.layer(x))))) * scale


def train_odd(sharded):
    with process_group() as (rank, world_size):
        torch.manual_seed(0)
        module = Odd()
        names = [name for name, _ in module.named_parameters()]
        frozen = [
            name for name, value in module.named_parameters() if not value.requires_grad
        ]
        model = lesson12.Sharded(module) if sharded else DistributedDataParallel(module)
        torch.manual_seed(rank)
        outputs, x = [], torch.randn(3, 5, requires_grad=True)
        for _ in range(2):  # gradients add up, as without shards
            outputs.append(model(x, 2.0))
            outputs[-1].pow(2).mean().backward()
        with torch.no_grad():
            outputs.append(model(x, 1.0))
        if sharded:
            gradients = model.views(lesson12.gather(model.shard.grad))
            assert model.again is None  # nothing is left of what was gathered
        else:
            gradients = dict(zip(names, [value.grad for value in module.parameters()]))
        return (
            [output.detach() for output in outputs],
            x.grad,
            {
                name: value.clone()
                for name, value in gradients.items()
                if name not in frozen
            },
        )


def test_a_sharded_module_computes_what_ddps_does_and_adds_up_gradients():
    for of_shards, of_ddp in zip(launch(train_odd, True), launch(train_odd, False)):
        torch.testing.assert_close(of_shards, of_ddp)


# ---- owners ----


def test_every_rank_gets_about_as_much_and_the_largest_come_first():
    sizes = [value.numel() for value in network(SHAPE).parameters()]
    for world_size in (1, 2, 4, 8):
        owners = lesson12.deal(sizes, world_size)
        loads = [
            sum(s for s, owner in zip(sizes, owners) if owner == rank)
            for rank in range(world_size)
        ]
        assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= max(sizes)
    assert lesson12.deal([1, 5, 1, 3], 2) == [1, 0, 1, 1]
    assert lesson12.deal([2], 3) == [0]


def train_with_an_empty_share():
    with process_group() as (rank, world_size):
        weight = nn.Parameter(torch.ones(2))
        optimizer = lesson12.ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)
        weight.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone(), weight.grad is None


def test_a_rank_that_owns_nothing_gets_what_the_others_have_updated():
    for weight, freed in launch(train_with_an_empty_share, nproc=3):
        assert weight.tolist() == [0.5, 0.5] and freed


# ---- the program ----


def test_the_program_tells_what_it_kept_and_all_ways_end_alike(tmp_path):
    results = {}
    for way in ("ddp", "zero2-by-hand", "fsdp"):
        flags = [
            "--sharding",
            way,
            "--train-samples",
            "40",
            "--batch-size",
            "4",
            "--out",
            str(tmp_path / way),
        ]
        results[way] = launch(lesson12.main, flags, nproc=2, timeout=100)
        stored = json.loads((tmp_path / way / "result.json").read_text())
        assert stored == {
            name: value for name, value in results[way][0].items() if name != "losses"
        }
        assert len((tmp_path / way / "metrics.jsonl").read_text().splitlines()) == 5
        expected = memory.states(stored["parameters"], 2, STAGES[way], "fp32")
        kept = [stored[f"{part}_bytes"] for part in ("weight", "gradient", "optimizer")]
        assert kept == pytest.approx(list(expected), rel=0.03)
        assert results[way][0]["params_sha256"] == results[way][1]["params_sha256"]
        torch.testing.assert_close(
            results[way][0]["losses"], results["ddp"][0]["losses"], rtol=1e-5, atol=1e-6
        )
