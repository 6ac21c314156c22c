"""Memory: six ways to train one network, what each rank keeps of it, and what it
sends.
"""

import itertools
import json
import os
import re
import resource
import shutil
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from ddp_course import UsageError, lesson12
from ddp_course.checkpoints import sharded as sharded_checkpoints
from ddp_course.data.text import load_text
from ddp_course.estimates import memory
from ddp_course.models import dtensors, six_ways, zero
from ddp_course.models.gpt import GPT
from ddp_course.models.recipe import learning_rate, loss_of, parameter_groups
from ddp_course.models.recompute import recompute
from ddp_course.models.sharded import Sharded, gather, whole_parameters
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch, start_server

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
        for name, way in six_ways.WAYS.items():
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
    optimizer = torch.optim.AdamW(alone.parameters(), **six_ways.ADAM)
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
        launch(train_in_all_ways, torch.float64, nproc=nproc, timeout=600)
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


def ddp_with_buckets(whole, device):
    model = DistributedDataParallel(whole)
    return model, torch.optim.AdamW(whole.parameters(), **six_ways.ADAM)


def observe_ways():
    """What each way keeps and shares, and has in use, in bytes per parameter."""
    parameters = sum(value.numel() for value in network(SHAPE).parameters())
    text = torch.zeros(1, 8, dtype=torch.long)

    def build(way):
        return way(network(SHAPE), CPU)

    def step(model, optimizer):
        lesson12.train_one_epoch(model, [(text, text)], optimizer, CPU)

    with process_group():
        ways = six_ways.WAYS | {"buckets": ddp_with_buckets}
        return {
            name: watch.observe(partial(build, way), step, parameters)
            for name, way in ways.items()
        }


@pytest.mark.parametrize("n", [2, 4] if THOROUGH else [4])
def test_what_a_rank_keeps_and_sends_is_what_the_formulas_say(n):
    """All of it from one run, which takes its time."""
    of_ranks = launch(observe_ways, nproc=n, timeout=600)
    keeps_its_share(n, of_ranks)
    peaks_a_few_blocks_higher(n, of_ranks)
    sends_as_the_paper_says(n, of_ranks)
    for seen in of_ranks:  # buckets of DDP's own are another 4 bytes per parameter
        assert seen["buckets"].in_use[-1] == pytest.approx(20, rel=0.03)
        assert seen["ddp"].in_use[-1] == pytest.approx(16, rel=0.03)


def sum_kept(observed):
    return sum(observed.kept.values())


def keeps_its_share(n, of_ranks):
    """Of the rank that keeps most, where whole parameters are dealt out; within 3 %."""
    for way, stage in STAGES.items():
        expected = memory.states(1, n, stage, "fp32")
        largest = max((seen[way] for seen in of_ranks), key=sum_kept)
        kept = list(largest.kept.values())
        assert kept == pytest.approx(list(expected), rel=0.03), way
        # and nothing else is there
        assert largest.in_use[-1] == pytest.approx(sum(expected), rel=0.03), way
        for seen in of_ranks:
            assert sum_kept(seen[way]) <= sum(kept) <= 1.03 * sum(expected)


def peaks_a_few_blocks_higher(n, of_ranks):
    """fully_shard as the formula says; by hand, nothing is gathered ahead."""
    parameters = sum(value.numel() for value in network(SHAPE).parameters())
    block = sum(value.numel() for value in network(SHAPE).blocks[0].parameters())
    rest = parameters - SHAPE["layers"] * block
    expected = memory.fsdp_peak(block, rest, SHAPE["layers"], n) / parameters
    for seen in of_ranks:
        assert max(seen["fsdp"].in_use) == pytest.approx(expected, rel=0.03)
        ahead = 4 * block / parameters
        assert expected - 1.5 * ahead < max(seen["fsdp-by-hand"].in_use) < expected


def sends_as_the_paper_says(n, of_ranks):
    """ZeRO-1 on top of DDP sends half as much again: its all-reduce does too much."""
    for seen in of_ranks:
        shared = {way: seen[way].shared for way in STAGES}
        assert shared["ddp"] == pytest.approx({"allreduce": 4})
        for way in ("zero1", "zero1-by-hand"):
            assert shared[way] == pytest.approx({"allreduce": 4, "broadcast": 4})
        assert shared["zero2-by-hand"] == pytest.approx({"reduce": 4, "broadcast": 4})
        by_hand = {"allgather": 8, "reduce_scatter": 4}
        assert shared["fsdp-by-hand"] == pytest.approx(by_hand, rel=1e-3)
        # what is left of the model when all blocks are wrapped is gathered once
        assert shared["fsdp"] == pytest.approx(by_hand, rel=0.03)
        for way, stage in STAGES.items():
            if stage != 1:
                sent = watch.sent_in_a_ring(shared[way], n)
                assert sent == pytest.approx(memory.sent(1, n, stage), rel=0.03), way


# ---- shards ----


def shards_of():
    with process_group() as (rank, world_size):
        whole = network()
        before = {name: value.clone() for name, value in whole.named_parameters()}
        model, *_ = six_ways.fsdp_by_hand(whole, CPU)
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
        model = Sharded(module) if sharded else DistributedDataParallel(module)
        torch.manual_seed(rank)
        outputs, x = [], torch.randn(3, 5, requires_grad=True)
        for _ in range(2):  # gradients add up, as without shards
            outputs.append(model(x, 2.0))
            outputs[-1].pow(2).mean().backward()
        with torch.no_grad():
            outputs.append(model(x, 1.0))
        if sharded:
            gradients = model.views(gather(model.shard.grad))
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


class Submodule(nn.Module):
    """A network that has "module" in its names, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.submodule = nn.Linear(3, 2)
        self.module = nn.ModuleDict({"module": nn.Linear(2, 2)})

    def forward(self, x):
        return self.module["module"](self.submodule(x))


def names_of_whole_parameters():
    with process_group():
        plain = Submodule()
        expected = {name: value.clone() for name, value in plain.state_dict().items()}
        plain.submodule = Sharded(plain.submodule)
        dist.barrier()
        return expected, whole_parameters(Sharded(plain))


def test_whole_parameters_have_the_names_of_the_plain_network():
    (expected, _), *_ = launched = launch(names_of_whole_parameters)
    for _, found in launched:
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def shard_two_dtypes():
    with process_group():
        layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).to(torch.bfloat16))
        Sharded(layers)


def test_two_dtypes_in_one_sharded_module_are_refused():
    with pytest.raises(RankError, match="takes parameters of one dtype only"):
        launch(shard_two_dtypes, nproc=1)


# ---- owners ----


def test_every_rank_gets_about_as_much_and_the_largest_come_first():
    sizes = [value.numel() for value in network(SHAPE).parameters()]
    for world_size in (1, 2, 4, 8):
        owners = zero.deal(sizes, world_size)
        loads = [
            sum(s for s, owner in zip(sizes, owners) if owner == rank)
            for rank in range(world_size)
        ]
        assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= max(sizes)
    assert zero.deal([1, 5, 1, 3], 2) == [1, 0, 1, 1]
    assert zero.deal([2], 3) == [0]


def train_with_an_empty_share():
    with process_group() as (rank, world_size):
        weight = nn.Parameter(torch.ones(2))
        optimizer = zero.ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)
        weight.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone(), weight.grad is None


def test_a_rank_that_owns_nothing_gets_what_the_others_have_updated():
    for weight, freed in launch(train_with_an_empty_share, nproc=3):
        assert weight.tolist() == [0.5, 0.5] and freed


# ---- the program ----


def program(folder, *flags):
    """Run the program within a process group that is there, on one rank of it."""
    few = ["--train-samples", "40", "--batch-size", "4", "--out", str(folder)]
    args = lesson12.arguments([*few, *flags])
    run = lesson12.prepare(args, dist.get_rank(), dist.get_world_size(), CPU)
    lesson12.train(run)
    return lesson12.report(run)


def programs(runs):
    """Run the program several times: [(folder, flags)]. A refusal comes as its text."""
    results = []
    with process_group():
        for folder, flags in runs:
            try:
                results.append(program(folder, *flags))
            except UsageError as error:
                results.append(str(error))
            dist.barrier()
    return results


def test_the_program_tells_what_it_kept_and_all_ways_end_alike(tmp_path):
    ways = ["ddp", "zero2-by-hand", "fsdp"]
    runs = [(tmp_path / way, ["--sharding", way]) for way in ways]
    on_rank_0, on_rank_1 = launch(programs, runs, timeout=600)
    for way, result, other in zip(ways, on_rank_0, on_rank_1):
        stored = json.loads((tmp_path / way / "result.json").read_text())
        assert stored == {
            name: value for name, value in result.items() if name != "losses"
        }
        assert len((tmp_path / way / "metrics.jsonl").read_text().splitlines()) == 5
        expected = memory.states(stored["parameters"], 2, STAGES[way], "fp32")
        kept = [stored[f"{part}_bytes"] for part in ("weight", "gradient", "optimizer")]
        assert kept == pytest.approx(list(expected), rel=0.03)
        assert result["params_sha256"] == other["params_sha256"]
        torch.testing.assert_close(
            result["losses"], on_rank_0[0]["losses"], rtol=1e-5, atol=1e-6
        )


def test_a_resumed_run_ends_as_an_undisturbed_one_with_fsdp_and_with_ddp(tmp_path):
    begun, resumed = ["--epochs", "2"], ["--epochs", "3", "--resume"]
    runs = [
        (tmp_path / "undisturbed", ["--epochs", "3"]),
        (tmp_path / "fsdp", begun),
        (tmp_path / "fsdp", resumed),
        (tmp_path / "ddp", begun),
        (tmp_path / "ddp", [*resumed, "--sharding", "ddp"]),
    ]
    undisturbed, _, fsdp, _, ddp = launch(programs, runs, timeout=600)[0]
    assert fsdp["params_sha256"] == undisturbed["params_sha256"]
    assert fsdp["losses"] == undisturbed["losses"][-5:]
    assert ddp["losses"] == pytest.approx(fsdp["losses"], rel=1e-5)
    for way in ("fsdp", "ddp"):
        assert os.listdir(tmp_path / way / "checkpoints") == ["epoch-0003"]


def interrupted(folder, last, *more):
    """An undisturbed run of ten updates, and runs that stop after update `last`, as fsdp
    and as ddp, which fsdp resumes. The results, and the checkpoints that were there.
    """
    flags = ["--epochs", "2", "--save-every", "3", "--recipe", "--warmup", "4", *more]
    resumed, found = [*flags, "--resume"], {}
    with process_group():
        found["undisturbed"] = program(folder / "undisturbed", *flags)
        for way in ("fsdp", "ddp"):
            with stopping_after(last), pytest.raises(KeyboardInterrupt):
                program(folder / way, *flags, "--sharding", way)
            there = sorted(os.listdir(folder / way / "checkpoints"))
            dist.barrier()
            found[way] = there, program(folder / way, *resumed)
    return found


@contextmanager
def stopping_after(number):
    """Within: the program stops before it does more than this number of updates."""
    original, count = lesson12.update, itertools.count()

    def update(*args):
        if next(count) == number:
            raise KeyboardInterrupt
        return original(*args)

    lesson12.update = update
    try:
        yield
    finally:
        lesson12.update = original


@pytest.mark.parametrize("more", ["", "--optimizer muon --schedule wsd"])
def test_a_run_that_stops_in_the_middle_of_an_epoch_is_resumed_exactly(more, tmp_path):
    found = launch(interrupted, tmp_path, 8, *more.split(), timeout=600)[0]
    undisturbed = found["undisturbed"]
    there, fsdp = found["fsdp"]
    # of update 6: two ranks, batches of 4
    assert there == ["epoch-0001-samples-00000008"]
    assert fsdp["params_sha256"] == undisturbed["params_sha256"]
    assert fsdp["losses"] == undisturbed["losses"][6:]
    assert len(undisturbed["losses"]) == 10
    rounding = 2e-4 if more else 1e-5  # Muon's products are in bf16
    assert found["ddp"][1]["losses"] == pytest.approx(fsdp["losses"], rel=rounding)
    for way in ("fsdp", "ddp"):
        assert os.listdir(tmp_path / way / "checkpoints") == ["epoch-0002"]


def stopped(folder, last):
    with process_group(), stopping_after(last), pytest.raises(KeyboardInterrupt):
        program(folder, "--save-every", "4")


def test_another_number_of_ranks_resumes_at_its_last_whole_update(tmp_path):
    """32 of 40 samples are seen: of three ranks' updates of 12, two are whole."""
    launch(stopped, tmp_path, 4)
    assert os.listdir(tmp_path / "checkpoints") == ["epoch-0000-samples-00000032"]
    shutil.copytree(tmp_path, copy := tmp_path / "copy")
    resume = [(tmp_path, ["--resume"])]
    for [after] in launch(programs, resume, nproc=3):
        assert len(after["losses"]) == 2  # of 4, the last with one sample per rank
    # with fewer samples than were seen, an epoch is over
    fewer = [(copy, ["--resume", "--train-samples", "16", "--epochs", "2"])]
    for [after] in launch(programs, fewer, nproc=2):
        assert len(after["losses"]) == 2


def test_any_number_of_ranks_resumes(tmp_path):
    """Another number has other batches: the first loss shows what it starts from."""
    resume = [(tmp_path, ["--epochs", "2", "--resume"])]
    [before], _ = launch(programs, [(tmp_path, [])], nproc=2)
    for [after] in launch(programs, resume, nproc=3):
        assert after["losses"][0] < 0.9 * before["losses"][0]
        assert len(after["losses"]) == 4  # batches of 4, of 13 samples


def test_what_cannot_be_resumed_gives_one_line(tmp_path):
    resume = ["--epochs", "2", "--resume"]
    runs = [
        (tmp_path, resume),
        (tmp_path, []),
        (tmp_path, ["--resume"]),
        (tmp_path, [*resume, "--sharding", "zero1"]),
        (tmp_path, [*resume, "--shape", "medium"]),
    ]
    none, _, done, by_owner, larger = launch(programs, runs, nproc=1)[0]
    assert none == f"no checkpoint in {tmp_path}: start without --resume"
    assert done.endswith("is of epoch 1: --epochs 1 leaves nothing to do")
    assert by_owner == "--resume needs --sharding ddp, fsdp or hsdp"
    assert "epoch-0001 cannot be used: ValueError Size mismatch between" in larger
    [torn] = (tmp_path / "checkpoints" / "epoch-0001").glob("*.distcp")
    torn.write_bytes(torn.read_bytes()[:1000])
    [refused] = launch(programs, [(tmp_path, resume)], nproc=1)[0]
    assert "epoch-0001 cannot be used: " in refused and "\n" not in refused


def test_a_shallower_network_is_not_read_from_a_deeper_one(tmp_path):
    """torch would read the layers that it is asked for, and leave out the others."""

    def resume():
        with process_group():
            program(tmp_path)
            args = lesson12.arguments(["--resume", "--epochs", "2"])
            args.out, args.shape = tmp_path, "shallow"
            shape = lesson12.SHAPES["small"] | {"layers": 1}
            model, optimizer, _ = six_ways.fsdp(GPT(**shape), CPU)
            sharded_checkpoints.begin(args, model, optimizer)

    with pytest.raises(RankError, match="epoch-0001 is of --shape small"):
        launch(resume, nproc=1)


def test_a_disk_that_is_full_gives_one_line(tmp_path):
    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        with process_group():
            program(tmp_path)

    load_text("python")  # made once, which the limit would not allow
    with pytest.raises(RankError, match="UsageError: cannot write to .*checkpoints: "):
        launch(save, nproc=1)
    assert not list((tmp_path / "checkpoints").glob("epoch-*"))


# ---- the whole recipe ----

TINY = {"context": 16, "layers": 2, "heads": 2, "width": 32}
# a flag of newer versions of torch
CHUNKED = ["--chunked-loss"] if hasattr(nn, "LinearCrossEntropyOptions") else []
RECIPE = "--recipe --warmup 2 --max-norm 0.2 --batch-size 2 --train-samples 48".split()


def whole_recipe(folder, combinations):
    """For each combination of flags, on this rank: its losses, the gradients' norm in
    each update, and the loss at the end. Adam and clipping hide a wrong scale of all
    gradients from the losses, but the norms show it.
    """
    lesson12.SHAPES["tiny"] = TINY
    flags, found, norms = [*RECIPE, "--shape", "tiny", "--eval-windows", "4"], {}, []
    clip = nn.utils.clip_grad_norm_

    def noted(*args, **options):
        norms.append(clip(*args, **options))
        return norms[-1]

    with process_group(), patch.object(nn.utils, "clip_grad_norm_", noted):
        for name in combinations:
            norms.clear()
            result = program(folder, *flags, *name.split())
            own = [dtensors.full(norm).item() for norm in norms]
            assert len(own) == len(result["losses"]) > 0, "each update clips"
            found[name] = result["losses"], own, result["validation_loss"]
            dist.barrier()
    return found


def combinations(precisions, accumulations, more=""):
    """All that lesson 12's program can do with its recipe: lists of flags, as text."""
    ways = "ddp", "zero1", "fsdp", "hsdp", "fsdp --offload", "hsdp --offload"
    kept = "none", "selective", "full"
    return [
        f"--precision {precision} --accumulate {size} --recompute {what} "
        f"--sharding {way} {more}".strip()
        for precision in precisions
        for size in accumulations
        for what in kept
        for way in ways
    ]


def train_alike(found):
    """In fp32 within rounding; in bf16 autocast, which DDP uses, rounds in other places
    than the policy of fully_shard.
    """
    for name, (losses, norms, validation) in found.items():
        bf16, size = "bf16" in name, name.split("--accumulate ")[1][0]
        same = f"--precision {'bf16' if bf16 else 'fp32'} --accumulate {size} "
        expected, lengths, held_out = found[f"{same}--recompute none --sharding ddp"]
        assert losses == pytest.approx(expected, rel=1e-3 if bf16 else 2e-6), name
        assert norms == pytest.approx(lengths, rel=2e-2 if bf16 else 1e-5), name
        assert validation == pytest.approx(held_out, abs=2e-3 if bf16 else 2e-4), name


def test_the_whole_recipe_trains_alike_in_every_way(tmp_path):
    names = combinations(["fp32", "bf16"], [1, 2] if THOROUGH else [2])
    found = launch(whole_recipe, tmp_path, names, nproc=4, timeout=600)[0]
    assert len(found) == len(names)
    train_alike(found)


@pytest.mark.skipif(not THOROUGH, reason="compiles for a minute: make thorough")
def test_compiled_blocks_train_alike_in_every_way(tmp_path):
    names = combinations(["fp32", "bf16"], [2], "--compile")
    names += [
        name.removesuffix(" --compile")
        for name in names
        if "none --sharding ddp" in name
    ]
    found = launch(whole_recipe, tmp_path, names, nproc=4, timeout=600)[0]
    train_alike(found)


def compiled_recipe(folder, names):
    """As whole_recipe, compiled without a C compiler; and the graphs of each, counted."""
    found, graphs, compile_ = {}, {}, nn.Module.compile
    nn.Module.compile = lambda self: compile_(self, backend="aot_eager")
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found |= whole_recipe(folder, [name])
        graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found, graphs


def test_blocks_are_compiled_whatever_is_recomputed_and_sharded(tmp_path):
    """A block whose forward is a functools.partial of `checkpoint` is not, silently."""
    plain = "--precision fp32 --accumulate 2 --recompute none --sharding ddp"
    ways = "none fsdp", "selective fsdp", "full fsdp --offload", "full hsdp", "full ddp"
    names = [
        plain,
        plain.replace("none", "selective").replace("ddp", "zero1 --compile"),
    ]
    for what, way in (each.split(" ", 1) for each in ways):
        more = f"--recompute {what} --sharding {way} --compile"
        names.append(f"--precision fp32 --accumulate 2 {more}")
    job = partial(launch, compiled_recipe, tmp_path, names, nproc=4, timeout=600)
    found, graphs = job()[0]
    train_alike(found)
    assert graphs.pop(plain) == 0 and min(graphs.values()) >= 1, graphs


def test_a_few_of_the_ways_with_the_whole_recipe_train_alike(tmp_path):
    fp32 = "--precision fp32 --accumulate 2 --recompute"
    names = [
        f"{fp32} none --sharding ddp",
        f"{fp32} selective --sharding zero1",
        f"{fp32} full --sharding fsdp --offload",
        f"{fp32} selective --sharding hsdp {' '.join(CHUNKED)}",
    ]
    found = launch(whole_recipe, tmp_path, names, nproc=4, timeout=600)[0]
    train_alike(found)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.n_layer == TINY["layers"]


MUON = "--optimizer muon --schedule wsd --dropout 0.1"


def test_muon_wsd_dropout_and_the_model_of_today_train_alike_in_every_way(tmp_path):
    """Muon's products are in bf16. On the rows of a rank alone it would be off by 1e-3."""
    ways = "ddp", "zero1", "fsdp", "hsdp"
    names = [f"--sharding {way} {MUON}" for way in ways]
    names += [f"--sharding {way} --modern --dropout 0.1" for way in ways]
    found = launch(whole_recipe, tmp_path, [*names, "--sharding ddp"], nproc=4)[0]
    plain, *_ = found.pop("--sharding ddp")
    for name, (losses, norms, validation) in found.items():
        expected, lengths, held_out = found[names[0 if "muon" in name else 4]]
        rounding = 2e-4 if "muon" in name else 2e-6
        assert losses == pytest.approx(expected, rel=rounding), name
        assert norms == pytest.approx(lengths, rel=10 * rounding), name
        assert validation == pytest.approx(held_out, abs=2e-3), name
        assert losses[-1] != pytest.approx(plain[-1], rel=1e-3), (
            name
        )  # it does something


def bytes_of_optimizers(folder, way):
    lesson12.SHAPES["tiny"] = TINY
    flags = [*RECIPE, "--shape", "tiny", "--eval-windows", "4", *MUON.split()]
    flags += ["--sharding", way, "--out", str(folder)]
    return lesson12.main(flags)["optimizer_bytes"]


def test_zero1_deals_out_the_states_of_muon_and_of_adamw(tmp_path):
    whole, *_ = launch(bytes_of_optimizers, tmp_path, "ddp", nproc=2)
    parts = launch(bytes_of_optimizers, tmp_path, "zero1", nproc=2)
    assert sum(parts) == whole and max(parts) < 0.8 * whole


TOGETHER = {  # flags with DDP: those with other ways, and how equal
    "--dropout 0.1": (
        [
            "ddp --recompute full",
            "zero1 --recompute selective",
            "fsdp --recompute full",
        ],
        2e-6,
    ),
    f"{MUON} --accumulate 2": (
        ["zero1 --recompute full", "fsdp --offload", "hsdp --recompute selective"],
        2e-4,
    ),
    f"{MUON} --precision bf16": (["fsdp --recompute full", "hsdp --offload"], 2e-3),
    "--modern --precision bf16": (
        ["zero1 --recompute selective", "fsdp --recompute full --offload"],
        2e-3,
    ),
    " ".join(CHUNKED): (
        ["zero1 --recompute full", "fsdp --recompute selective --offload", "hsdp"],
        2e-6,
    ),
}


@pytest.mark.parametrize(
    "flags", TOGETHER, ids=["dropout", "muon", "muon, bf16", "modern, bf16", "chunked"]
)
def test_more_flags_together_train_alike_in_other_ways(flags, tmp_path):
    ways, rounding = TOGETHER[flags]
    names = [f"--sharding {way} {flags}" for way in ("ddp", *ways)]
    found = launch(whole_recipe, tmp_path, names, nproc=4, timeout=600)[0]
    expected, lengths, held_out = found[names[0]]
    for name, (losses, norms, validation) in found.items():
        assert losses == pytest.approx(expected, rel=rounding), name
        assert norms == pytest.approx(lengths, rel=10 * rounding), name
        assert validation == pytest.approx(held_out, abs=2e-3), name


def test_the_recipe_clips_warms_up_and_spares_vectors_the_decay(tmp_path):
    """With one rank, against lesson 10's recipe by hand, on batches that are joined.
    Some gradients are clipped and some are not, or Adam would hide a factor of two.
    """
    flags = [*RECIPE, "--shape", "tiny", "--max-norm", "2.4", "--accumulate", "2"]

    def both():
        lesson12.SHAPES["tiny"] = TINY
        with process_group():
            args = lesson12.arguments([*flags, "--out", str(tmp_path)])
            run = lesson12.prepare(args, 0, 1, CPU)
            torch.manual_seed(0)
            model = GPT(256, **TINY)
            groups = parameter_groups(model, 0.1)
            optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
            run.loader.sampler.set_epoch(0)
            batches, losses, norms = list(run.loader), [], []
            for step in range(len(batches) // 2):
                pair = batches[2 * step : 2 * step + 2]
                optimizer.zero_grad()
                loss = model(*(torch.cat(part) for part in zip(*pair)))
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 2.4).item())
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, len(batches) // 2, args)
                optimizer.step()
                losses.append(loss.item())
            lesson12.train(run)
            off = [
                (whole.full_tensor() - mine).abs().max().item()
                for whole, mine in zip(run.model.parameters(), model.parameters())
            ]
            return losses, run.losses, norms, max(off)

    [(expected, found, norms, off)] = launch(both, nproc=1)
    assert min(norms) < 2.2 and max(norms) > 2.6, norms
    assert found == pytest.approx(expected, rel=1e-6) and off < 2e-5


@pytest.mark.parametrize(
    "flags, words",
    [
        ("fsdp-by-hand --recipe", "--sharding fsdp-by-hand does not take --recipe"),
        ("zero2-by-hand --accumulate 2", "does not take --accumulate"),
        ("zero1-by-hand --chunked-loss", "does not take --chunked-loss"),
        ("ddp --offload", "--offload needs --sharding fsdp or hsdp"),
        ("hsdp --replicas 0", "--replicas"),
        ("fsdp --optimizer muon", "--optimizer muon needs --recipe"),
    ],
)
def test_what_no_way_can_do_gives_one_line(flags, words):
    with pytest.raises(UsageError, match=words) as error:
        lesson12.arguments(["--sharding", *flags.split()])
    assert "\n" not in str(error.value)


def test_replicas_that_do_not_divide_the_ranks_give_one_line(tmp_path):
    flags = ["--sharding", "hsdp", "--replicas", "3"]
    [said, _] = launch(programs, [(tmp_path, flags)], nproc=2)
    assert said == ["--replicas 3 does not divide 2 ranks"]


def sent_per_update(folder, way, size):
    """Bytes of gradients that a rank hands over in an update of `size` micro-batches."""
    lesson12.SHAPES["tiny"] = TINY
    flags = [*RECIPE, "--shape", "tiny", "--sharding", way, "--accumulate", size]
    with process_group() as (rank, ranks):
        args = lesson12.arguments([*flags, "--out", str(folder)])
        run = lesson12.prepare(args, rank, ranks, CPU)
        groups = iter(lesson12.grouped(run.loader, args.accumulate))

        def update():
            lesson12.update(run.model, next(groups), run.optimizer, run.recipe, CPU)

        update()  # DDP makes its buckets anew after the first one
        shared = watch.count_bytes(update)
    return shared.get("reduce_scatter", 0) or shared["allreduce"]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_update_of_four_micro_batches_sends_the_gradients_of_one(way, tmp_path):
    one, four = (
        launch(sent_per_update, tmp_path, way, size, nproc=2)[0] for size in ("1", "4")
    )
    assert one == four


def as_asked(folder, flags):
    """A model of the program for these flags, on this rank, after a forward pass."""
    lesson12.SHAPES["tiny"] = TINY
    args = lesson12.arguments([*RECIPE, "--shape", "tiny", *flags, "--out", folder])
    run = lesson12.prepare(args, dist.get_rank(), dist.get_world_size(), CPU)
    tokens = torch.zeros(8, 16, dtype=torch.long)
    with watch.memory_timeline() as timeline:
        loss = loss_of(run.model, tokens, tokens, run.recipe.autocast, CPU)
    loss.backward()
    return run, timeline[-1]


def observe_flags(folder):
    """All that equal losses cannot show: whether a flag does anything."""
    found = {}
    with process_group():
        for what in ("none", "selective", "full"):
            found[what] = as_asked(folder, ["--recompute", what])[1]
        run, _ = as_asked(folder, ["--offload", "--precision", "bf16", *CHUNKED])
        group = run.model._get_fsdp_state()._fsdp_param_group
        found["offload"] = type(group.offload_policy).__name__
        computed = []
        hook = lambda module, inputs, output: computed.append(str(output.dtype))
        run.model.blocks[0].register_forward_hook(hook)
        run.model(torch.zeros(1, 4, dtype=torch.long))
        found["computed in"] = computed[0]
        found["autocast"] = str(run.recipe.autocast)
        found["chunked"] = run.model.head.chunked
        run, _ = as_asked(folder, ["--sharding", "hsdp"])
        found["placements"] = str(run.model.norm.weight.placements)
        run, _ = as_asked(folder, ["--sharding", "ddp", "--precision", "bf16"])
        found["autocast of DDP"] = str(run.recipe.autocast)
        modern = ["--sharding", "ddp", "--modern", "--tokenizer", "bpe"]
        run, _ = as_asked(folder, modern)
        found["drawn"] = torch.rand(1).item()
        found["modern"] = type(run.model.module).__name__
        found["vocabulary"] = run.model.module.head.out_features
    return found


def test_each_flag_of_the_whole_recipe_does_what_it_says(tmp_path):
    of_ranks = launch(observe_flags, str(tmp_path), nproc=4, timeout=600)
    found = of_ranks[0]
    assert found["full"] < 0.7 * found["selective"] < 0.7 * found["none"]
    assert found["offload"] == "CPUOffloadPolicy"
    assert (found["computed in"], found["autocast"]) == (
        "torch.bfloat16",
        "torch.float32",
    )
    assert found["autocast of DDP"] == "torch.bfloat16"
    assert found["chunked"] == bool(CHUNKED)
    assert found["placements"] == "(Replicate(), Shard(dim=0))"
    assert (found["modern"], found["vocabulary"]) == ("ModernGPT", 2048)
    # each rank has other samples, and draws a dropout of its own
    assert len({of_rank["drawn"] for of_rank in of_ranks}) == 4


def blocks_of(flags):
    with process_group():
        model = network()
        lesson12.arrange(model, lesson12.arguments(flags), CPU)
        return [block._compiled_call_impl is not None for block in model.blocks]


@pytest.mark.parametrize("flags, compiled", [(["--compile"], True), ([], False)])
def test_each_block_is_compiled_where_that_is_asked_for(flags, compiled):
    """A block is compiled when it is called; here nothing is."""
    assert set(launch(blocks_of, flags, nproc=1)[0]) == {compiled}


def kept_and_computed(what):
    """Bytes that forward keeps, operations of a step, and gradients."""
    torch.manual_seed(0)
    model, tokens = network(SHAPE), torch.arange(64).view(2, 32)
    for block in model.blocks:
        recompute(block, what)
    with watch.memory_timeline() as timeline, FlopCounterMode(display=False) as flops:
        loss = model(tokens, tokens)
        kept = timeline[-1]
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return kept, flops.get_total_flops(), gradients


def test_selective_recomputing_computes_no_matrix_product_again():
    all_kept, once, expected = kept_and_computed("none")
    some_kept, selective, found = kept_and_computed("selective")
    assert selective == once and some_kept < 0.8 * all_kept
    assert all(map(torch.equal, found, expected))
    few_kept, more, found = kept_and_computed("full")
    assert 1.2 * once < more < 4 / 3 * once and few_kept < 0.2 * all_kept
    assert all(map(torch.equal, found, expected))


def train_on_a_nan():
    with process_group() as (rank, _):
        model, optimizer, _ = six_ways.zero2_by_hand(network(), CPU)
        if rank == 1:
            model.norm.weight.data.fill_(float("nan"))
        lesson12.train_one_epoch(model, batches(2, rank), optimizer, CPU)


def test_a_loss_that_is_no_number_ends_the_run():
    with pytest.raises(
        RankError, match="the loss is not a number in step 1 .* on rank 1"
    ):
        launch(train_on_a_nan)


# ---- what the lesson says of fully_shard in practice ----


def sharded(mesh_shape, **options):
    model = network(SHAPE)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), **six_ways.ADAM)


TEXT = torch.arange(8)[None]


def train_two_steps(model, optimizer):
    """Both losses, and the norm of the last gradient, whose scale Adam hides."""
    own = TEXT.roll(dist.get_rank())  # else a rank's own gradient would be the mean
    losses = lesson12.train_one_epoch(model, [(own, own)] * 2, optimizer, CPU)
    norm = nn.utils.get_total_norm([value.grad for value in model.parameters()])
    return [*losses, norm.full_tensor().item()]


def accumulate(model, optimizer, skip):
    optimizer.zero_grad()
    for number in range(4):
        model.set_requires_gradient_sync(number == 3 or not skip)
        loss_of(model, TEXT, TEXT, torch.float32, CPU).backward()
    optimizer.step()


class WithBuffer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("ones", torch.ones(3), persistent=False)


def buffer_after_to_empty():
    """With torch's aid to find what was never filled: it is filled with NaN."""
    with torch.device("meta"):
        model = WithBuffer()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.use_deterministic_algorithms(True)
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    return "ones" in model.state_dict(), model.ones.tolist()


def use_fully_shard():
    found = {}
    with process_group():
        found["alone"] = train_two_steps(*sharded((4,)))
        offload = CPUOffloadPolicy(pin_memory=False)
        found["offloaded"] = train_two_steps(*sharded((4,), offload_policy=offload))
        model, optimizer = sharded((2, 2))
        found["hybrid"] = train_two_steps(model, optimizer)
        found["kept"] = sum(watch.held(model, optimizer).values())
        found["placements"] = [str(part) for part in model.norm.weight.placements]
        model, optimizer = sharded((4,))
        for skip in (False, True):
            shared = watch.count_bytes(partial(accumulate, model, optimizer, skip))
            found[f"reduced, {skip}"] = shared["reduce_scatter"]
        found["buffer"] = buffer_after_to_empty()
        return found


@pytest.fixture(scope="module")
def used():
    return launch(use_fully_shard, nproc=4, timeout=600)[0]


def test_hybrid_sharding_cuts_for_two_of_four_ranks_and_trains_alike(used):
    parameters = sum(value.numel() for value in network(SHAPE).parameters())
    assert used["placements"] == ["R", "S(0)"]
    assert used["kept"] == pytest.approx(8 * parameters, rel=0.03)
    assert used["hybrid"] == pytest.approx(used["alone"], rel=1e-5)


def test_offloading_without_pinned_memory_trains_alike_on_a_cpu(used):
    assert used["offloaded"] == pytest.approx(used["alone"], rel=1e-5)


def test_four_micro_batches_reduce_gradients_once_where_they_are_told_to(used):
    assert used["reduced, False"] == 4 * used["reduced, True"]


def test_a_buffer_on_meta_is_in_no_checkpoint_and_nobody_fills_it(used):
    in_checkpoint, values = used["buffer"]
    assert not in_checkpoint and all(value != value for value in values)  # NaN


def configuration(column):
    """What the lesson's table says in the column of Accelerate, 1, or Trainer, 2."""
    notebook = json.loads((COURSE / "lessons" / "12_memory.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    [text] = [source for source in sources if "| Accelerate, " in source]
    return [line.split("|")[column] for line in text.splitlines() if "| `" in line]


def test_accelerate_knows_the_keys_that_the_lesson_shows():
    from accelerate.commands.launch import launch_command_parser

    keys = re.findall(r"`(fsdp_\w+):", "".join(configuration(1)))
    assert len(keys) == 7
    known = launch_command_parser()._option_string_actions
    assert not [key for key in keys if f"--{key}" not in known]


def test_trainer_makes_of_its_configuration_what_the_lesson_says(tmp_path):
    from transformers import TrainingArguments

    given = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
        "cpu_offload": False,
    }
    told = "".join(configuration(2))
    assert not [key for key in given if f'"{key}"' not in told]
    made = TrainingArguments(tmp_path, fsdp=True, fsdp_config=dict(given), use_cpu=True)
    plugin = made.fsdp_plugin_args
    assert plugin["fsdp_version"] == 2
    assert plugin["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert plugin["transformer_cls_names_to_wrap"] == "LlamaDecoderLayer"
    assert plugin["reshard_after_forward"] and plugin["activation_checkpointing"]
    assert plugin["state_dict_type"] == "SHARDED_STATE_DICT"
    default = TrainingArguments(tmp_path, fsdp=True, use_cpu=True).fsdp_plugin_args
    assert default["state_dict_type"] == "FULL_STATE_DICT"
