"""Pipelines: every schedule, by hand and torch's, trains as the network in one piece;
how long a step takes, and what the ranks keep; the program.
"""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_course import UsageError, lesson12, lesson18
from ddp_course.estimates import pipeline as plans
from ddp_course.models import clocked, pipeline, tensor_parallel, torch_pipelines
from ddp_course.models.gpt import GPT
from ddp_course.models.pipeline import token_loss
from ddp_course.models.torch_pipelines import V_SHAPED
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch, start_server

CPU = torch.device("cpu")
SHAPE = {"vocabulary": 29, "context": 6, "layers": 9, "heads": 2, "width": 8}


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server("torch.distributed.pipelining.schedules")


# ---- schedules as data ----

SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 24)]


def formula(name, ranks, m):
    if name == "zb-h1":
        return plans.zero_bubble(ranks, m)
    return plans.bubble(ranks, m, chunks=2 if name == "interleaved" else 1)


@pytest.mark.parametrize("name", plans.PLANS)
@pytest.mark.parametrize("ranks, m", SIZES)
def test_the_slots_in_which_ranks_wait_are_those_of_the_formula(name, ranks, m):
    spans = plans.schedule(name, ranks, m)
    busy = [sum(length for *_, length in of) for of in spans]
    assert busy == [3 * m] * ranks
    assert plans.idle(spans) == pytest.approx(formula(name, ranks, m), abs=1e-12)


@pytest.mark.parametrize("name", plans.PLANS)
@pytest.mark.parametrize("ranks, m", [(2, 4), (4, 8), (8, 24)])
def test_what_ranks_keep_is_what_the_schedules_are_known_for(name, ranks, m):
    kept = [plans.kept_at_most(of) for of in plans.PLANS[name](ranks, m)]
    down = range(ranks - 1, -1, -1)
    known = {
        "gpipe": [m] * ranks,
        "1f1b": [rank + 1 for rank in down],
        "zb-h1": [ranks] * ranks,  # as much as the first rank of 1F1B
        "interleaved": [ranks + 1 + 2 * rank for rank in down],  # half-stages
    }
    assert kept == known[name]


@pytest.mark.parametrize("name", plans.PLANS)
@pytest.mark.parametrize("ranks, m", [(2, 1), (4, 2), (3, 5)])
def test_fewer_micro_batches_than_ranks_and_rests_are_played_or_refused(name, ranks, m):
    if name == "interleaved":
        with pytest.raises(ValueError, match=f"{m} micro-batches are no multiple of"):
            plans.schedule(name, ranks, m)
        return
    spans = plans.schedule(name, ranks, m)
    halves = [("F", 1), ("I", 1), ("W", 1)] if name == "zb-h1" else [("F", 1), ("B", 2)]
    for rank, of in enumerate(spans):
        done = sorted((kind, stage, i, length) for kind, stage, i, _, length in of)
        assert done == sorted((k, rank, i, u) for k, u in halves for i in range(m))


def test_an_action_begins_when_its_rank_is_free_and_what_it_needs_is_there():
    down, up = [("F", 0), ("F", 1)], [("B", 1), ("B", 0)]
    plan = [[(kind, rank, i) for kind, i in down + up] for rank in range(2)]
    first, last = plans.play(plan, unit=10)
    assert [begin for *_, begin, _ in first] == [0, 10, 50, 70]
    assert [begin for *_, begin, _ in last] == [10, 20, 30, 50]
    slow_first, _ = plans.play(plan, unit=10, slowness={0: 3})
    assert [length for *_, length in slow_first] == [30, 30, 60, 60]


def test_a_deadlock_is_told_with_who_waits_for_what():
    plan = plans.one_f_one_b(2, 3)
    first, second, *rest = plan[1]
    plan[1] = [second, first, *rest]  # a backward before its forward
    with pytest.raises(plans.Deadlock) as error:
        plans.play(plan)
    assert error.value.waiting == {
        0: (("B", 0, 0), [("B", 1, 0)]),
        1: (("B", 1, 0), [("F", 1, 0)]),
    }
    told = "rank 0 cannot do B of micro-batch 0 in stage 0 before B of micro-batch 0"
    assert told in str(error.value)


def slots_of(plans_by_name, units, slowness=()):
    with process_group() as (rank, _):
        return {
            name: clocked.count_slots(plan, rank, units, slowness)
            for name, plan in plans_by_name.items()
        }


@pytest.mark.parametrize("ranks, m", [(2, 4), (3, 6), (4, 8)])
def test_real_ranks_take_the_slots_that_a_plan_is_played_with(ranks, m):
    of = all_plans(ranks, m)
    found = launch(slots_of, of, plans.UNITS, nproc=ranks)
    for name, plan in of.items():
        counted = [of_rank[name] for of_rank in found]
        assert counted == plans.play(plan)
        assert plans.idle(counted) == pytest.approx(formula(name, ranks, m), abs=1e-12)


def test_real_ranks_wait_for_a_slow_stage_as_long_as_a_plan_is_played_with():
    of, slowness = all_plans(2, 4), {0: 1.5, 1: 0.5}
    found = launch(slots_of, of, plans.UNITS, slowness, nproc=2)
    for name, plan in of.items():
        counted = [of_rank[name] for of_rank in found]
        assert counted == plans.play(plan, slowness=slowness) != plans.play(plan)


def orders_of_torch(ranks, m):
    """What torch's schedules have ranks do, asked without ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    names = torch_pipelines.TWO_STAGES
    return {name: torch_pipelines.plan_of(name, ranks, m) for name in names}


def test_torchs_schedules_are_played_as_well_and_run_by_the_executor():
    [of] = launch(orders_of_torch, 4, 8, nproc=1)
    played = {name: plans.play(plan) for name, plan in of.items()}
    assert of["Interleaved1F1B"] == plans.interleaved(4, 8)
    idle = {name: round(plans.idle(spans), 4) for name, spans in played.items()}
    halved = round(plans.zero_bubble(4, 8, chunks=2), 4)
    assert idle == {
        "Interleaved1F1B": round(plans.bubble(4, 8, chunks=2), 4),
        "LoopedBFS": round(plans.bubble(4, 8, chunks=2), 4),
        **dict.fromkeys(
            ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"], halved
        ),
    }
    kept = {n: [plans.kept_at_most(actions) for actions in p] for n, p in of.items()}
    assert kept == {
        "Interleaved1F1B": [11, 9, 7, 5],
        "LoopedBFS": [16] * 4,
        "InterleavedZeroBubble": [8] * 4,
        "ZBVZeroBubble": [8] * 4,
        "DualPipeV": [9] * 4,
    }
    counted = launch(slots_of, of, plans.UNITS, nproc=4)
    for name, spans in played.items():
        assert [of_rank[name] for of_rank in counted] == spans


# ---- by hand, and torch's, against the network in one piece ----


def whole(seed=0):
    torch.manual_seed(seed)
    return GPT(**SHAPE).double()


def batch_of(samples):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(29, (2, samples, 6), generator=generator)


def in_one_piece(samples):
    """Loss and gradients by name."""
    network, (tokens, targets) = whole(), batch_of(samples)
    loss = token_loss(network(tokens), targets)
    loss.backward()
    return loss.item(), [value.grad for value in network.parameters()]


def gradients_in_a_whole(parts, owners, group):
    """All gradients, where a network in one piece has them. On all ranks."""
    filled = whole(seed=1)
    with torch.no_grad():
        for part in parts.values():
            for value in part.parameters():
                value.copy_(value.grad)
    pipeline.gather(filled, parts, owners, group)
    return [value.detach() for value in filled.parameters()]


def by_hand(plans_by_name, m, replicas=1, channels=False):
    """For each plan: loss, gradients, and what this rank kept at most."""
    with process_group() as (rank, world_size):
        ranks, found = world_size // replicas, {}
        row, column = divmod(rank, ranks)
        mesh = dist.init_device_mesh(
            "cpu", (replicas, ranks), mesh_dim_names=("replica", "stage")
        )
        across = mesh.get_group("replica") if replicas > 1 else None
        batch = batch_of(2 * m * replicas)
        mine = [part.chunk(replicas)[row].chunk(m) for part in batch]
        for name, plan in plans_by_name.items():
            owners = pipeline.owners_of(plan, mesh.mesh[row].tolist())
            parts = pipeline.place(whole(), owners)
            ways = pipeline.channels_of(owners) if channels else ()
            pipe = pipeline.Pipeline(parts, owners, SHAPE["width"], channels=ways)
            if channels:
                pipe.tag = lambda *_: 0
                borders = {s for s in range(max(owners)) if owners[s] != owners[s + 1]}
                own = {s for s in borders if rank in (owners[s], owners[s + 1])}
                both = {(s, s + 1) for s in own} | {(s + 1, s) for s in own}
                assert set(ways) == both and len(set(map(id, ways.values()))) == len(
                    both
                )
            losses = pipe.run(plan[column], *mine)
            pipeline.Shared(parts, owners, across).gradients()
            group = mesh.get_group("stage")
            gradients = gradients_in_a_whole(parts, owners, group)
            found[name] = float(sum(losses)) / m, gradients, pipe.most
        return found


def assert_equal(found, expected, replicas=1):
    """That all ranks have these gradients, and the losses of the last stages are right."""
    loss, gradients = expected
    for _, of_rank, *_ in found:
        torch.testing.assert_close(of_rank, gradients, rtol=1e-12, atol=1e-14)
    assert sum(one for one, *_ in found) / replicas == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_by_hand_loss_and_gradients_are_those_of_the_network_in_one_piece(ranks):
    m = 12 if ranks == 3 else 8
    assert_plans_are_equal(all_plans(ranks, m), ranks, m)


def all_plans(ranks, m):
    return {name: schedule(ranks, m) for name, schedule in plans.PLANS.items()}


def assert_plans_are_equal(of, ranks, m, **how):
    """That they compute what the network in one piece does, and keep what is known."""
    found = launch(by_hand, of, m, nproc=ranks, **how)
    expected = in_one_piece(2 * m)
    for name, plan in of.items():
        of_name = [of_rank[name] for of_rank in found]
        assert_equal(of_name, expected)
        kept = [plans.kept_at_most(actions) for actions in plan]
        assert [most for *_, most in of_name] == kept


def test_the_executor_runs_torchs_schedules_too_with_both_ends_on_one_rank():
    [of] = launch(orders_of_torch, 2, 4, nproc=1)
    assert_plans_are_equal(of, 2, 4)


def test_with_a_group_per_channel_messages_need_no_tags():
    """As on GPUs: in each group, messages are received in the order they are sent."""
    of = all_plans(2, 4)
    assert_plans_are_equal(of, 2, 4, channels=True)
    for plan in [*of.values(), *all_plans(4, 8).values(), plans.interleaved(2, 4, 3)]:
        for stage in range(plans.stages_of(plan) - 1):
            owners = pipeline.owners_of(plan, range(len(plan)))
            here, there = plan[owners[stage]], plan[owners[stage + 1]]
            for kinds in ("F", "BI"):
                sent = [i for kind, s, i in here if kind in kinds and s == stage]
                back = [i for kind, s, i in there if kind in kinds and s == stage + 1]
                assert sent == back


def test_two_pipelines_of_two_ranks_are_the_network_in_one_piece():
    found = launch(by_hand, all_plans(2, 4), 4, 2, nproc=4)
    expected = in_one_piece(16)
    for name in plans.PLANS:
        assert_equal([of_rank[name] for of_rank in found], expected, replicas=2)


def with_tensor_ranks(name, m):
    """Two stages of two tensor ranks: the losses, and gradients put together."""
    with process_group() as (rank, _):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
        row, column = mesh.get_coordinate()
        group = mesh.get_group("tensor")
        network = tensor_parallel.cut(whole(), group)
        plan = plans.PLANS[name](2, m)
        owners = pipeline.owners_of(plan, mesh.mesh[:, column].tolist())
        parts = pipeline.place(network, owners)
        pipe = pipeline.Pipeline(parts, owners, SHAPE["width"])
        losses = pipe.run(plan[row], *[part.chunk(m) for part in batch_of(2 * m)])
        pipeline.Shared(parts, owners).gradients()
        names = {value: name for name, value in network.named_parameters()}
        return sum(map(float, losses)) / m, {
            names[value]: tensor_parallel.whole(value, group, value.grad)
            for value in pipeline.parameters(parts)
        }


@pytest.mark.parametrize("name", plans.PLANS)
def test_stages_of_tensor_ranks_are_the_network_in_one_piece(name):
    """PP x TP on 2 x 2 ranks: each rank has some heads of some blocks."""
    alone = whole()
    tokens, targets = batch_of(8)
    loss = token_loss(alone(tokens), targets)
    loss.backward()
    expected = {name: value.grad for name, value in alone.named_parameters()}
    of_ranks = launch(with_tensor_ranks, name, 4, nproc=4, timeout=600)
    assert sum(found for found, _ in of_ranks) / 2 == pytest.approx(
        loss.item(), rel=1e-12
    )
    seen = set()
    for _, gradients in of_ranks:
        for each, value in gradients.items():
            torch.testing.assert_close(value, expected[each], rtol=1e-9, atol=1e-14)
        seen |= set(gradients)
    assert seen == set(expected)


def by_torch(names, m):
    with process_group() as (rank, ranks):
        found = {}
        for name in names:
            owners = torch_pipelines.owners_with(name, ranks)
            parts, last = pipeline.place(whole(), owners), len(owners) - 1
            schedule = torch_pipelines.build(name, parts, last + 1, m, CPU)
            tokens, targets = batch_of(2 * m)
            losses = []
            ends = {"target": targets, "losses": losses} if last in parts else {}
            schedule.step(*[tokens] * (0 in parts), **ends)
            pipeline.Shared(parts, owners).gradients()
            loss = sum(each.item() for each in losses)
            found[name] = loss, gradients_in_a_whole(parts, owners, None)
        return found


def strides_of_the_logits():
    with process_group():
        network, (tokens, _) = whole(), batch_of(2)
        as_they_were = network(tokens).is_contiguous()
        torch_pipelines.stages_of({0: network}, 1, CPU)
        return as_they_were, network(tokens).is_contiguous()


def test_a_stage_of_torch_gives_the_strides_that_it_announces():
    """A padded head's logits are a view, which torch 2.11 refuses."""
    assert launch(strides_of_the_logits, nproc=1) == [(False, True)]


# before, a rank with two neighbouring stages sent itself a message, which gloo refuses
V_ON_CPUS = torch.__version__ >= "2.13"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_torchs_loss_and_gradients_are_those_of_the_network_in_one_piece(ranks):
    m = 12 if ranks == 3 else 8
    names = [n for n in torch_pipelines.NAMES if V_ON_CPUS or n not in V_SHAPED]
    found, expected = launch(by_torch, names, m, nproc=ranks), in_one_piece(2 * m)
    for name in names:
        assert_equal([of_rank[name] for of_rank in found], expected)


def stages_with_batch_norm(ranks):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(ranks)]
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 16, 4, generator=generator, dtype=torch.float64)
    return [stage.double() for stage in stages], *batch


def normalised(way, m):
    """A rank's gradients, and the running mean of its norm, after m micro-batches."""
    with process_group() as (rank, ranks):
        stages, inputs, targets = stages_with_batch_norm(ranks)
        own, loss = {rank: stages[rank]}, nn.functional.mse_loss
        if way == "by hand":
            plan = plans.one_f_one_b(ranks, m)
            pipe = pipeline.Pipeline(own, pipeline.owners_of(plan), loss=loss)
            pipe.run(plan[rank], inputs.chunk(m), targets.chunk(m))
        else:
            schedule = torch_pipelines.build("1F1B", own, ranks, m, CPU, loss=loss)
            ends = {"target": targets} if rank == ranks - 1 else {}
            schedule.step(*[inputs] * (rank == 0), **ends)
        means = stages[rank][1].running_mean
        return [value.grad for value in stages[rank].parameters()], means


def accumulated(ranks, m):
    """What one process has for each stage if it accumulates the same gradients."""
    stages, inputs, targets = stages_with_batch_norm(ranks)
    network = nn.Sequential(*stages)
    for one, target in zip(inputs.chunk(m), targets.chunk(m)):
        (nn.functional.mse_loss(network(one), target) / m).backward()
    return [
        ([value.grad for value in stage.parameters()], stage[1].running_mean)
        for stage in stages
    ]


@pytest.mark.parametrize("way", ["by hand", "by torch"])
def test_batch_norm_sees_micro_batches_as_it_does_when_gradients_accumulate(way):
    ranks, m = 2, 4
    found, expected = launch(normalised, way, m, nproc=ranks), accumulated(ranks, m)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for (gradients, means), (of_all, of_batch) in zip(found, accumulated(ranks, 1)):
        assert (gradients[0] - of_all[0]).norm() > 0.1 * of_all[0].norm()
        assert (means - of_batch).norm() > 0.1 * of_batch.norm()


class OrderKept(nn.Module):
    """A stage that logs what is done with it, in order: F and B, with numbers."""

    def __init__(self):
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), []
        self.register_full_backward_hook(lambda *_: self.note("B"))

    def note(self, kind):
        number = sum(entry[0] == kind for entry in self.log)
        self.log.append((kind, dist.get_rank(), number))

    def forward(self, x):
        self.note("F")
        return self.layer(x)


def order_of_torch(name, m):
    with process_group() as (rank, ranks):
        stage, ends = OrderKept(), {}
        loss = lambda y, _: y.sum()
        schedule = torch_pipelines.build(name, {rank: stage}, ranks, m, CPU, loss=loss)
        x = torch.randn(m, 4, requires_grad=True)
        for _ in range(2):  # in the first step shapes are inferred
            stage.log.clear()
            ends = {"target": x.detach()} if rank == ranks - 1 else {}
            schedule.step(*[x] * (rank == 0), **ends)
        return stage.log


@pytest.mark.parametrize("name, ranks, m", [("GPipe", 2, 3), ("1F1B", 3, 5)])
def test_torchs_gpipe_and_1f1b_do_what_our_lists_say(name, ranks, m):
    found = launch(order_of_torch, name, m, nproc=ranks)
    assert found == plans.PLANS[name.lower()](ranks, m)


# ---- the program ----

FLAGS = ["--train-samples", "64", "--batch-size", "4", "--eval-windows", "6"]


def run(folder, *flags, nproc=2, lesson=lesson18):
    return launch(lesson.main, [*FLAGS, *flags, "--out", str(folder)], nproc=nproc)


def assert_trained_alike(results, expected):
    """The losses of all ranks, to the rounding of 32 bits."""
    assert len({result["params_sha256"] for result in results}) == 1
    for result in results:
        torch.testing.assert_close(
            result["losses"], expected["losses"], rtol=1e-5, atol=0
        )
        for key in ("validation_loss", "parameters", "train_samples"):
            assert result[key] == pytest.approx(expected[key], abs=2e-4)


def test_with_any_schedule_the_program_trains_as_ddp_in_one_process(tmp_path):
    ddp = ["--sharding", "ddp", "--accumulate", "4"]
    [alone] = run(tmp_path / "ddp", *ddp, nproc=1, lesson=lesson12)
    results = []
    for name in plans.PLANS:
        results += run(tmp_path / name, "--schedule", name)
        stored = json.loads((tmp_path / name / "result.json").read_text())
        assert stored == {key: results[-2][key] for key in stored}
        assert stored["method"] == name and stored["updates"] == 4
        whole, pipelined = (
            load_file(tmp_path / folder / "model" / "model.safetensors")
            for folder in ("ddp", name)
        )
        torch.testing.assert_close(pipelined, whole, rtol=0, atol=1e-4)
    assert_trained_alike(results, alone)  # all of these with the same bits


def test_two_replicas_of_two_stages_train_as_ddp_on_two_ranks(tmp_path):
    flags = ["--accumulate", "2", "--epochs", "2", "--seed", "3"]
    expected, _ = run(tmp_path / "ddp", "--sharding", "ddp", *flags, lesson=lesson12)
    results = run(tmp_path, *flags, "--replicas", "2", nproc=4)
    assert [r["samples_per_update"] for r in results] == [16] * 4
    assert_trained_alike(results, expected)


def kept_in_an_update(folder, names):
    """For each schedule: what this rank has kept at most, what it is to keep, and the
    learning rate and the width of its model.
    """
    found = []
    with process_group() as (rank, ranks):
        for name in names:
            flags = ["--schedule", name, "--accumulate", "8", "--shape", "medium"]
            flags += ["--learning-rate", "0.25", "--out", folder, *FLAGS]
            flags += ["--batch-size", "1", "--train-samples", "8"]
            run = lesson18.prepare(lesson18.arguments(flags), rank, ranks, CPU)
            batches = list(run.loader)
            how = run.shared, run.actions, batches, run.optimizer, CPU
            lesson18.update(run.pipe, *how)
            most, rate = run.pipe.most, run.optimizer.param_groups[0]["lr"]
            lesson18.evaluate(run.pipe, run.held_out, CPU)
            expected = plans.kept_at_most(plans.PLANS[name](ranks, 8)[rank])
            width = run.pipe.width[0]
            found.append((most, expected, run.pipe.most, rate, width))
    return found


def test_each_flag_of_the_program_does_what_it_says(tmp_path):
    names = ["gpipe", "1f1b", "zb-h1"]
    of_ranks = launch(kept_in_an_update, str(tmp_path), names, nproc=4, timeout=600)
    for found in of_ranks:
        for most, expected, when_evaluating, rate, width in found:
            assert (most, when_evaluating) == (expected, 0)
            assert (rate, width) == (0.25, 256)
    kept = {tuple(of_rank[number][0] for of_rank in of_ranks) for number in range(3)}
    assert kept == {(8, 8, 8, 8), (4, 3, 2, 1), (4, 4, 4, 4)}


@pytest.mark.parametrize("samples, chunks", [(10, 4), (9, 4)])
def test_micro_batches_of_several_sizes_are_refused(samples, chunks):
    """Ten samples in four are 3, 3, 3 and 1, and nine are only three."""
    actions = [("F", 0, i) for i in range(4)]
    inputs = torch.zeros(samples, 6).chunk(chunks)
    with pytest.raises(ValueError, match="4 micro-batches of one size are needed"):
        pipeline.check_alike(actions, inputs)


def two_lengths():
    """The losses of two batches, the second one with shorter texts."""
    with process_group() as (rank, ranks):
        plan, found = plans.one_f_one_b(ranks, 4), []
        owners = pipeline.owners_of(plan)
        pipe = pipeline.Pipeline(
            pipeline.place(whole(), owners), owners, SHAPE["width"]
        )
        for tokens in (6, 4):
            texts = [part[:, :tokens].chunk(4) for part in batch_of(8)]
            found.append(sum(pipe.run(plan[rank], *texts)))
        return [float(loss) / 4 for loss in found]


def test_a_batch_may_have_another_shape_than_the_one_before():
    network, (inputs, targets) = whole(), batch_of(8)
    right = [
        token_loss(network(inputs[:, :tokens]), targets[:, :tokens]).item()
        for tokens in (6, 4)
    ]
    assert launch(two_lengths, nproc=2)[1] == pytest.approx(right, rel=1e-12)


def with_a_frozen_block(name):
    with process_group() as (rank, ranks):
        network, plan = whole(), plans.PLANS[name](ranks, 4)
        network.blocks[2].requires_grad_(False)
        owners = pipeline.owners_of(plan)
        parts = pipeline.place(network, owners)
        pipe = pipeline.Pipeline(parts, owners, SHAPE["width"])
        pipe.run(plan[rank], *[part.chunk(4) for part in batch_of(8)])
        pipeline.Shared(parts, owners).gradients()
        return [value.grad for value in pipeline.parameters(parts)]


def test_a_frozen_block_gets_no_gradient_with_any_schedule():
    of = {
        name: launch(with_a_frozen_block, name, nproc=2) for name in ("1f1b", "zb-h1")
    }
    for found, expected in zip(of["zb-h1"], of["1f1b"]):
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    frozen = [[value is None for value in found] for found in of["zb-h1"]]
    assert any(map(any, frozen)) and not all(map(all, frozen))


@pytest.mark.parametrize(
    "flags, ranks, line",
    [
        (["--replicas", "2"], 3, "--replicas 2 does not divide 3 ranks"),
        (
            ["--schedule", "interleaved", "--accumulate", "3"],
            2,
            "3 micro-batches are no multiple of 2 ranks, as interleaving needs them: "
            "see --accumulate",
        ),
        (
            ["--schedule", "interleaved", "--accumulate", "3"],
            3,
            "4 blocks cannot fill 6 stages: use fewer ranks, or a larger --shape",
        ),
        (["--accumulate", "17"], 2, "--batch-size 68 is more than a rank's share, 64"),
        (
            ["--replicas", "2", "--accumulate", "1", "--batch-size", "33"]
            + ["--train-samples", "65"],
            2,
            "--batch-size 33 is more than a rank's share, 32 of 64 samples on 2 ranks",
        ),
    ],
)
def test_what_is_impossible_gives_one_line(flags, ranks, line, tmp_path):
    def refused():
        try:
            lesson18.main([*FLAGS, *flags, "--out", str(tmp_path)])
        except UsageError as error:
            return str(error)

    for told in launch(refused, nproc=ranks):
        assert line in told


# ---- what goes wrong ----


def without_the_sum(m):
    """This rank's gradient of the tied matrix, if nobody sums its two parts."""
    with process_group() as (rank, ranks):
        plan = plans.one_f_one_b(ranks, m)
        owners = pipeline.owners_of(plan)
        parts = pipeline.place(whole(), owners)
        pipe = pipeline.Pipeline(parts, owners, SHAPE["width"])
        pipe.run(plan[rank], *[part.chunk(m) for part in batch_of(2 * m)])
        others = list(pipeline.parameters(parts))
        tied = others.pop(0 if rank == 0 else -1)
        return tied.grad, [value.grad for value in others]


def test_without_the_sum_only_the_tied_matrix_is_wrong_and_nothing_says_so():
    (embedding, first), (head, last) = launch(without_the_sum, 4, nproc=2)
    [right, *others] = in_one_piece(8)[1]
    torch.testing.assert_close(embedding + head, right)
    for part in (embedding, head):
        assert (part - right).norm() > 0.1 * right.norm()
    torch.testing.assert_close(first + last, others, rtol=1e-12, atol=1e-14)


def not_divided(m):
    """This rank's gradients by place in the whole, of losses that nobody divides by m."""
    with process_group() as (rank, ranks):
        plan = plans.one_f_one_b(ranks, m)
        owners = pipeline.owners_of(plan)
        parts = pipeline.place(whole(), owners)
        pipe = pipeline.Pipeline(
            parts, owners, SHAPE["width"], loss=lambda *of: m * token_loss(*of)
        )
        pipe.run(plan[rank], *[part.chunk(m) for part in batch_of(2 * m)])
        pipeline.Shared(parts, owners).gradients()
        return gradients_in_a_whole(parts, owners, dist.group.WORLD)


def test_losses_that_are_not_divided_make_all_gradients_m_times_too_large():
    right = in_one_piece(8)[1]
    for found in launch(not_divided, 4, nproc=2):
        torch.testing.assert_close(found, [4 * gradient for gradient in right])


def few(m):
    with process_group() as (rank, ranks):
        parts = {rank: nn.Linear(1, 1)}
        torch_pipelines.build("1F1B", parts, ranks, m, CPU)


def test_with_fewer_micro_batches_than_stages_our_1f1b_trains_and_torchs_refuses():
    assert_plans_are_equal({"1f1b": plans.one_f_one_b(3, 2)}, 3, 2)
    said = r"Number of microbatches \(2\) must be greater than or equal to the number"
    with pytest.raises(RankError, match=said):
        launch(few, 2, nproc=3)


class Careless(pipeline.Pipeline):
    """It does not ask for the gradients of the activations that arrive."""

    def receive(self, kind, *where):
        arrived = super().receive(kind, *where)
        return arrived.detach() if kind == "F" and where[0] > 0 else arrived


def without_gradients_of_leaves(frozen):
    with process_group(timeout=5) as (rank, ranks):
        plan = plans.one_f_one_b(ranks, 2)
        parts = {rank: nn.Linear(4, 4)}
        if rank == 1:
            parts[rank].requires_grad_(not frozen)
        pipe = Careless(parts, pipeline.owners_of(plan), loss=nn.functional.mse_loss)
        pipe.run(plan[rank], *[part.chunk(2) for part in torch.randn(2, 4, 4)])


@pytest.mark.parametrize(
    "frozen, said",
    [
        (
            True,
            "element 0 of tensors does not require grad and does not have a grad_fn",
        ),
        (False, "'NoneType' object has no attribute 'contiguous'"),
    ],
)
def test_activations_that_arrive_have_to_ask_for_a_gradient(frozen, said):
    with pytest.raises(RankError, match=said):
        launch(without_gradients_of_leaves, frozen, nproc=2)


def longer_texts():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    with process_group(timeout=10) as (rank, ranks):
        stage = PipelineStage(nn.Linear(4, 4), rank, ranks, CPU)
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        for tokens in (5, 6):
            x = torch.randn(4, tokens, 4)
            schedule.step(x) if rank == 0 else schedule.step(target=x)


@pytest.mark.parametrize(
    "level, said",
    [
        ("DETAIL", "Stage 0 forward inputs.*shape"),
        ("OFF", "Received data size doesn't"),
    ],
)
def test_torch_refuses_a_batch_of_another_shape_only_where_it_is_asked_to_look(
    level, said
):
    with pytest.raises(RankError, match=said):
        launch(longer_texts, nproc=2, env={"TORCH_DISTRIBUTED_DEBUG": level})


def head_on(numbers):
    with process_group(timeout=2) as (rank, _):
        dist.send(torch.zeros(numbers), 1 - rank)
        dist.recv(torch.zeros(numbers), 1 - rank)


def test_two_ranks_that_both_send_first_wait_for_each_other_even_with_one_number():
    with pytest.raises(RankError, match="Timed out waiting 2000ms for send operation"):
        launch(head_on, 1, nproc=2)


def divided_by_torch(m, scale_grads):
    """With a V on two ranks: the tied matrix's gradient, on rank 0."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    with process_group() as (rank, ranks):
        owners = torch_pipelines.owners_with("ZBVZeroBubble", ranks)
        parts = pipeline.place(whole(), owners)
        own = torch_pipelines.stages_of(parts, 4, CPU)
        schedule = ScheduleZBVZeroBubble(
            own, m, loss_fn=token_loss, scale_grads=scale_grads
        )
        tokens, targets = batch_of(2 * m)
        schedule.step(*[tokens] * (rank == 0), **({} if rank else {"target": targets}))
        return next(pipeline.parameters(parts)).grad


@pytest.mark.skipif(not V_ON_CPUS, reason="needs torch 2.13")
def test_torch_divides_the_gradient_of_a_matrix_twice_that_two_stages_share():
    [right, *_] = in_one_piece(16)[1]
    scaled, _ = launch(divided_by_torch, 8, True, nproc=2)
    summed, _ = launch(divided_by_torch, 8, False, nproc=2)
    torch.testing.assert_close(summed / 8, right)
    assert scaled.norm() < right.norm() / 2


def test_an_unbalanced_stage_makes_all_ranks_wait():
    plan = plans.one_f_one_b(4, 8)
    even, uneven = plans.play(plan), plans.play(plan, slowness={2: 2})
    assert plans.slots(even) == 33
    assert plans.slots(uneven) >= 8 * 3 * 2  # what the slow one has to do
    assert plans.idle(uneven) > 0.4 > plans.idle(even)
