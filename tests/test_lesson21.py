"""Lesson 21: the formulas of a step and of what a rank keeps, beside those that earlier
lessons have proven; constants beside published runs; a plan beside a rehearsed step.
"""

import csv
import json
import math
import random
import re
from contextlib import suppress
from dataclasses import replace

import mutants
import mutants.ex21
import psutil
import pytest

from ddp_course import UsageError, lesson21
from ddp_course.checks import ex21
from ddp_course.checks.claims import agree
from ddp_course.checks.ex21 import (
    job,
    plans_claims,
    planted,
    post,
    post_claims,
    small,
    small_job,
)
from ddp_course.cli import exercises
from ddp_course.estimates import memory, pipeline, published, rehearsal, step_time
from ddp_course.estimates.memory import Mesh
from ddp_course.estimates.transformer import (
    MODELS,
    Model,
    kept_by_run,
    kept_by_stage,
    kept_per_token,
    run_of,
    stage_parameters,
)
from ddp_course.judge.answer import Source
from ddp_course.ranks.launch import launch
from ddp_course.ranks.machines.machines import PRETENDED
from ddp_course.ranks.machines.namespaces import why_not

H100 = step_time.GPUS["h100"]
PLAIN = step_time.Constants(rate=1.0, attention=1.0, half=0.0, network=1.0)
LLAMA, MIXTRAL = MODELS["llama3-8b"], MODELS["mixtral-8x7b"]


def a_run(mesh=Mesh(), model=LLAMA, context=8192, batch=64, micro_batch=1, **how):
    return run_of(model, mesh, context, batch, micro_batch, **how)


def parts_of(run, constants=PLAIN, gpu=H100):
    return step_time.parts(run, gpu, constants)


# ---- models ----


@pytest.mark.parametrize(
    "name, parameters",  # as their model cards and checkpoints have them
    [
        ("smollm2-135m", 134_515_008),
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_a_model_has_the_parameters_that_it_is_known_for(name, parameters):
    assert MODELS[name].parameters() == parameters


def test_a_token_is_multiplied_by_all_but_an_embedding_and_unchosen_experts():
    assert LLAMA.multiplied() == LLAMA.parameters() - 128256 * 4096
    tied = MODELS["llama3-1b"]
    assert tied.multiplied() == tied.parameters()
    unchosen = 32 * 6 * 3 * 4096 * 14336  # six experts of eight, in each layer
    looked_up = 32000 * 4096
    assert MIXTRAL.multiplied() == MIXTRAL.parameters() - unchosen - looked_up


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tensor, stages, experts", [(1, 1, 1), (4, 2, 1), (2, 4, 4)])
def test_the_parts_of_a_model_are_the_model(model, tensor, stages, experts):
    """All ranks together have each parameter once; norms and routers are on each tensor
    rank, and a tied matrix is on the first and the last stage.
    """
    model = MODELS[model]
    mesh = Mesh(tensor=tensor, pipeline=stages, expert=min(experts, model.experts))
    layers = model.layers / stages
    total = 0
    for stage in range(stages):
        dense, of_experts = stage_parameters(model, mesh, stage, layers)
        total += tensor * (dense + of_experts * mesh.expert)
    whole = 2 * model.width + (model.experts > 1) * model.experts * model.width
    repeated = (tensor - 1) * (model.layers * whole + model.width)
    twice = model.embedding() if model.tied and stages > 1 else 0
    assert total == pytest.approx(model.parameters() + repeated + twice, rel=1e-12)


# ---- the seconds of a step ----


def test_flops_are_six_per_parameter_and_token_and_attentions():
    products, attention = step_time.flops(a_run(context=2048, batch=3))
    assert products == 6 * 7_504_924_672 * 3 * 2048
    assert attention == 12 * 32 * 4096 * 3 * 2048**2
    seconds = 2 * (products + attention) / H100.flops
    found = step_time.utilization(a_run(context=2048, batch=3), H100, seconds)
    assert found == pytest.approx(0.5)


@pytest.mark.parametrize("stages, m, chunks", [(2, 4, 1), (4, 4, 1), (8, 16, 2)])
def test_the_bubble_is_lesson_18s(stages, m, chunks):
    mesh = Mesh(pipeline=stages)
    found = parts_of(a_run(mesh, batch=m, chunks=chunks))
    computing = found.products + found.attention
    share = found.bubble / (computing + found.bubble)
    assert share == pytest.approx(pipeline.bubble(stages, m, chunks))


def test_stages_that_do_not_divide_the_layers_make_others_wait():
    """Six stages of 32 layers: two have six layers, and the others five."""
    found = parts_of(a_run(Mesh(pipeline=6), batch=1_000_000))
    computing = found.products + found.attention
    assert found.bubble / computing == pytest.approx(6 * 6 / 32 - 1, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_fsdp_sends_what_lesson_12_says(ranks):
    run = a_run(Mesh(data=ranks), batch=2 * ranks, stage=3)
    inside, between = step_time.sent_by_data(run, 1e9, ranks)
    assert inside == pytest.approx(2 * memory.sent(1e9, ranks, 3, "master"))
    assert between == 0


@pytest.mark.parametrize("stage, per_parameter", [(0, 8), (1, 6)])
def test_without_sharded_weights_gradients_travel_once_per_step(stage, per_parameter):
    """Four bytes each, twice in an all-reduce; or reduced, and then weights gathered."""
    for batch in (4, 64):
        run = a_run(Mesh(data=4), batch=batch, stage=stage)
        inside, _ = step_time.sent_by_data(run, 1e9, 4)
        assert inside == per_parameter * 1e9 * 3 / 4


def test_hybrid_sharding_gathers_in_its_groups_and_reduces_between_them():
    run = a_run(Mesh(data=32), batch=32, stage=3)._replace(shards=8)
    inside, between = step_time.sent_by_data(run, 1e9, 32)
    assert inside == 6 * 1e9 * 7 / 8
    assert between == 4 * 1e9 / 8 * 3 / 4  # an all-reduce of a shard, in 16 bits
    whole = parts_of(run._replace(shards=0, batch=32)).data
    assert parts_of(run).data < whole, "messages stay in the machine"


def test_experts_are_averaged_on_fewer_ranks_than_the_rest():
    mesh = Mesh(data=2, expert=8)
    run = a_run(mesh, MIXTRAL, stage=0)
    dense = run.parameters - run.experts
    sent = 8 * dense * 15 / 16 + 8 * run.experts / 8 * 1 / 2
    hops = 32 * 15 * H100.hop
    found = step_time.data_seconds(run, H100, PLAIN)
    assert found == pytest.approx(sent / 50e9 + hops)


def test_tensor_ranks_send_four_all_reduces_per_block_and_two_more():
    run = a_run(Mesh(data=2, tensor=4), batch=8)
    tokens = 8 * 8192 / 2
    all_reduce = 2 * 3 / 4 * tokens * 4096 * 2
    assert step_time.sent_by_tensor(run) == (4 * 32 + 2) * all_reduce
    again = run._replace(recompute="full")
    assert step_time.sent_by_tensor(again) == (6 * 32 + 2) * all_reduce
    assert step_time.sent_by_tensor(a_run()) == 0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_context_ranks_send_keys_and_values_as_in_lesson_19(n):
    """Both go on n - 1 times in forward and in backward, their gradients n times."""
    run = a_run(Mesh(context=n), batch=1)
    block = 2 * 8192 / n * 1024 * 2  # keys and values of the own tokens, in 16 bits
    rounds = 2 * (n - 1) + n if n > 1 else 0
    assert step_time.sent_by_context(run) == 32 * rounds * block


def test_expert_ranks_send_each_choice_there_and_back_twice():
    run = a_run(Mesh(expert=8), MIXTRAL)
    choices = 64 * 8192 / 8 * 2
    sent = 4 * choices * 7 / 8 * 4096 * 2
    assert step_time.sent_by_expert(run) == 32 * sent


def test_a_link_is_fast_inside_a_machine():
    inside, across = (parts_of(a_run(Mesh(tensor=n))).tensor for n in (8, 16))
    per_byte = [
        seconds / step_time.sent_by_tensor(a_run(Mesh(tensor=n)))
        for seconds, n in ((inside, 8), (across, 16))
    ]
    assert per_byte == pytest.approx([1 / 450e9, 1 / 50e9])
    mixed = parts_of(a_run(Mesh(tensor=4, context=4)))
    assert (
        mixed.context
        == step_time.sent_by_context(a_run(Mesh(tensor=4, context=4))) / 50e9
    )


def test_messages_of_sharded_weights_hide_behind_computing():
    usual = a_run(Mesh(data=64), batch=512, stage=3)
    assert parts_of(usual, step_time.FITTED["h100"]).data == 0
    short = a_run(Mesh(data=32, tensor=2), context=256, stage=3)
    found, sent = parts_of(short), step_time.data_seconds(short, H100, PLAIN)
    computing = found.products + found.attention
    assert found.data == pytest.approx(sent - computing) and computing < sent
    assert found.tensor > 0, "and not behind other messages"
    assert parts_of(a_run(Mesh(data=64), stage=0)).data > 0


def test_a_link_inside_a_machine_is_never_faster_than_its_data_sheet():
    for network, inside, across in ((0.5, 1.0, 0.5), (2.0, 2.0, 2.0)):
        constants = PLAIN._replace(network=network)
        for n, speed, factor in ((8, 450e9, inside), (16, 50e9, across)):
            run = a_run(Mesh(tensor=n))
            expected = factor * step_time.sent_by_tensor(run) / speed
            assert parts_of(run, constants).tensor == pytest.approx(expected)


def test_hops_count_between_machines_only():
    for n, hops in ((8, 0), (16, 3 * 32 * 15 * H100.hop)):
        run = a_run(Mesh(data=n), batch=n, stage=3)
        inside, _ = step_time.sent_by_data(run, run.parameters, n)
        found = step_time.data_seconds(run, H100, PLAIN)
        assert found == pytest.approx(inside / step_time.link(H100, n) + hops)
    shared = a_run(Mesh(data=64), stage=3)._replace(shards=16)
    sent = sum(step_time.sent_by_data(shared, shared.parameters, 64)) / H100.across
    found = step_time.data_seconds(shared, H100, PLAIN)
    assert found == pytest.approx(sent + 3 * 32 * 15 * H100.hop)


@pytest.mark.parametrize("name", step_time.Constants._fields)
def test_each_constant_changes_its_own_part(name):
    run = a_run(Mesh(data=2, tensor=2), batch=4)
    before = parts_of(run, step_time.Constants(0.5, 0.5, 500.0, 1.0))
    after = parts_of(
        run, step_time.Constants(0.5, 0.5, 500.0, 1.0)._replace(**{name: 2.0})
    )
    changed = {
        part for part in step_time.Parts._fields
        if getattr(before, part) != getattr(after, part)
    }  # fmt: skip
    expected = {
        "rate": {"products", "attention"},
        "attention": {"attention"},
        "half": {"products"},
        "network": {"tensor", "data"},
    }
    assert changed == expected[name]


def test_tensor_ranks_share_what_context_and_expert_ranks_send():
    for mesh, sent in (
        (Mesh(context=4), step_time.sent_by_context),
        (Mesh(expert=4), step_time.sent_by_expert),
    ):
        alone, shared = (
            sent(a_run(m, MIXTRAL)) for m in (mesh, replace(mesh, tensor=4))
        )
        assert shared == alone / 4


def test_experts_that_do_not_fit_into_a_machine_with_their_tensor_ranks_are_slow():
    runs = [a_run(Mesh(tensor=n, expert=8), MIXTRAL) for n in (1, 2)]
    links = [step_time.sent_by_expert(run) / parts_of(run).expert for run in runs]
    assert links == pytest.approx([450e9, 50e9])


# ---- published runs ----


@pytest.fixture(scope="module")
def runs():
    return published.published_runs()


def test_conventions_are_made_equal():
    run = a_run(Mesh(data=8))
    mfu = published.seconds_of(run, H100, 0.4, "MFU")
    teraflops = 0.4 * 989
    assert published.seconds_of(run, H100, teraflops, "TFLOP/s") == pytest.approx(mfu)
    counted = teraflops * 4 / 3, "TFLOP/s with recomputation"
    assert published.seconds_of(run, H100, *counted) == pytest.approx(mfu)
    tokens = 64 * 8192 / mfu / 8, "tokens/s"
    assert published.seconds_of(run, H100, *tokens) == pytest.approx(mfu)


def test_each_published_run_is_possible_and_has_a_source(runs):
    with open(published.FILE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs) == 256
    for row, each in zip(rows, runs):
        run = each.run
        assert run.gpus() == int(row["gpus"]), row
        # one batch of the file is no multiple: microbatches differ in size there
        assert run.micro_batches() >= 0.9, row
        used = step_time.utilization(run, step_time.GPUS[each.gpu], each.seconds)
        assert 0.05 < used < 0.75, row
        assert re.match(r"arXiv:\d{4}\.\d{5}, |github\.com/\S+, ", each.source)
        assert each.checked == ("copies" if "arXiv" in each.source else "file")


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_constants_are_fitted_to_all_runs(gpu, runs):
    found = published.fit([each for each in runs if each.gpu == gpu])
    assert list(found) == pytest.approx(list(step_time.FITTED[gpu]), rel=0.01)


def test_a_fit_finds_the_constants_that_made_the_times(runs):
    """Times that the formulas made, of real meshes: with other constants, no error."""
    made = step_time.Constants(0.5, 0.4, 900.0, 2.0)
    of_gpu = [each for each in runs if each.gpu == "a100"][::3]
    times = [
        step_time.seconds(each.run, step_time.GPUS["a100"], made) for each in of_gpu
    ]
    faked = [each._replace(seconds=t) for each, t in zip(of_gpu, times)]
    assert list(published.fit(faked)) == pytest.approx(list(made), rel=0.03)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_model_beats_both_baselines_on_runs_that_it_has_not_seen(gpu, runs):
    of_gpu = [each for each in runs if each.gpu == gpu]
    errors = {}
    for name, (formula, constants) in published.MODELS.items():
        found = published.held_out_errors(of_gpu, formula, constants)
        assert len(found) == len(of_gpu)
        errors[name] = published.median_error(found)
    assert errors["four constants"] < 0.06
    assert errors["four constants"] < 0.9 * min(
        errors["constant MFU"], errors["no communication"]
    )


def test_a_run_is_predicted_by_constants_that_were_not_fitted_to_it(runs):
    of_gpu = [each for each in runs if each.gpu == "h100"][:24]
    spoiled = [each._replace(seconds=1e6 * each.seconds) for each in of_gpu[::2]]
    mixed = [x for pair in zip(spoiled, of_gpu[1::2]) for x in pair]
    by_source = {each: guess for each, guess, _ in published.held_out_errors(mixed)}
    clean = {each: guess for each, guess, _ in published.held_out_errors(of_gpu)}
    for each in spoiled:
        assert by_source[each] == pytest.approx(
            clean[each._replace(seconds=each.seconds / 1e6)]
        )


# ---- what a rank keeps ----


def test_states_and_activations_of_fsdp_are_lesson_12s():
    run = a_run(Mesh(data=64), batch=64, stage=3)
    kept, known = kept_by_run(LLAMA, run), memory.plan(memory.LLAMA_3_8B, 64, 8192)
    assert kept.weights + kept.gradients + kept.optimizer == pytest.approx(known.state)
    assert kept.activations == pytest.approx(known.activations)
    for recompute in ("full", "selective"):
        again = kept_by_run(LLAMA, run._replace(recompute=recompute))
        known = memory.plan(memory.LLAMA_3_8B, 64, 8192, recompute)
        assert again.activations == pytest.approx(known.activations)


@pytest.mark.parametrize("stage, per_parameter", [(0, 18), (1, 6 + 12 / 8), (3, 2)])
def test_states_per_parameter(stage, per_parameter):
    kept = kept_by_run(LLAMA, a_run(Mesh(data=8), stage=stage))
    states = kept.weights + kept.gradients + kept.optimizer
    assert states / LLAMA.parameters() == pytest.approx(per_parameter)


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages():
    mesh = Mesh(pipeline=4)
    kept = [kept_by_stage(LLAMA, a_run(mesh), stage) for stage in range(4)]
    one = kept[3].activations
    assert [each.activations / one for each in kept] == [4, 3, 2, 1]
    few = kept_by_stage(LLAMA, a_run(mesh, batch=2), 0)
    assert few.activations == 2 * one
    chunks = kept_by_stage(LLAMA, a_run(mesh, chunks=2), 0)
    # Korthikanti et al., section 4.2.3: 1 + (p - 1) / (p m) times as much
    assert chunks.activations / (4 * one) == pytest.approx(1 + 3 / (4 * 2))


@pytest.mark.parametrize(
    "mesh", [Mesh(tensor=4), Mesh(context=4), Mesh(tensor=2, context=2)]
)
def test_ranks_that_share_tokens_share_activations(mesh):
    one, shared = (kept_by_run(LLAMA, a_run(m)) for m in (Mesh(), mesh))
    assert shared.activations == one.activations / 4
    assert shared.moment == one.moment / 4


def test_experts_keep_an_mlp_per_choice_and_are_shared_by_their_ranks():
    dense = Model(*MIXTRAL[:6])
    more = kept_by_run(MIXTRAL, a_run(model=MIXTRAL)).activations
    less = kept_by_run(dense, a_run(model=dense)).activations
    assert more - less == 2 * 64 / 64 * 8192 * 32 * (4096 + 4 * 14336)
    alone, shared = (
        kept_by_run(MIXTRAL, a_run(Mesh(expert=n), MIXTRAL)) for n in (1, 8)
    )
    of_experts = 32 * 8 * MIXTRAL.mlp()
    assert alone.weights - shared.weights == pytest.approx(2 * of_experts * 7 / 8)


def test_the_last_stage_has_the_logits_in_16_bits_and_twice_in_32():
    last, first = (
        kept_by_stage(
            LLAMA, a_run(Mesh(pipeline=2), context=1024, micro_batch=2), stage
        )
        for stage in (1, 0)
    )
    assert last.moment == 2 * 1024 * 128256 * (2 + 4 + 4 + 2)
    assert first.moment == 0


def test_a_recomputed_block_exists_for_a_moment():
    run = a_run(Mesh(pipeline=2), context=1024, recompute="full")
    block = 1024 * 2 * (7 * 4096 + 2 * 1024 + 4 * 14336)
    assert kept_by_stage(LLAMA, run, 0).moment == block


def test_the_fullest_stage_counts_which_may_be_the_last_one():
    few = a_run(Mesh(pipeline=2), batch=1)  # one micro-batch: stages keep equally many
    many = a_run(Mesh(pipeline=2), batch=64)
    for run, stage in ((few, 1), (many, 0)):
        assert kept_by_run(LLAMA, run) == kept_by_stage(LLAMA, run, stage)


# ---- all plans ----


def test_plans_are_possible_fit_and_come_in_order():
    found, unfit = lesson21.plans(LLAMA, 48, "h100", 8192, 96)
    assert len(found) > 20
    seconds = [plan.seconds() for plan in found]
    assert seconds == sorted(seconds)
    assert len({plan.run.mesh for plan in found}) == len(found)
    for plan in found:
        run, mesh = plan.run, plan.run.mesh
        assert run.gpus() == 48 and plan.fits("h100")
        assert LLAMA.groups() % mesh.tensor == 0 and mesh.tensor <= 8
        assert run.micro_batches() == int(run.micro_batches()) >= 1
        assert (
            mesh.expert == 1
            and 8192 / mesh.context >= lesson21.SHORTEST
            or mesh.context == 1
        )
        assert mesh.pipeline * run.chunks <= 32
        assert run.stage in ((0, 1) if mesh.pipeline > 1 else (0, 1, 3))
        if run.chunks > 1:
            assert run.micro_batches() % mesh.pipeline == 0
    assert not unfit.fits("h100")
    assert unfit.seconds() <= found[0].seconds()


def test_a_tenth_of_the_memory_stays_free():
    found, _ = lesson21.plans(LLAMA, 48, "h100", 8192, 96)
    fullest = found[0]._replace(kept=found[0].kept._replace(activations=71e9))
    small = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0, "moment": 0.0}
    assert fullest._replace(kept=fullest.kept._replace(**small)).fits("h100")
    small["moment"] = 2e9
    assert not fullest._replace(kept=fullest.kept._replace(**small)).fits("h100")


def test_tensor_ranks_divide_the_heads_of_keys_and_context_ranks_the_tokens():
    """Llama 3 has 32 heads and 8 of keys; SmolLM2 9 and 3. A context rank has two equal
    pieces of a text, for zigzag, which tensor ranks share.
    """
    sizes = {m.tensor for m in lesson21.meshes(MODELS["smollm2-135m"], 36, 9216)}
    assert sizes == {1, 3}
    sizes = {m.tensor for m in lesson21.meshes(LLAMA, 64, 8192, per_machine=64)}
    assert sizes == {1, 2, 4, 8}
    odd = lesson21.meshes(LLAMA, 8, 8192 + 2)
    assert {(m.context, m.tensor) for m in odd} == {(1, 1), (1, 2)}
    halves = lesson21.meshes(LLAMA, 8, 8192 + 4)
    assert (2, 2) not in {(m.context, m.tensor) for m in halves}


def test_nothing_that_fits_is_faster_than_the_first_plan():
    small = MODELS["llama3-1b"]
    found, _ = lesson21.plans(small, 16, "a100", 4096, 64)
    for mesh in lesson21.meshes(small, 16, 4096):
        for run in lesson21.runs_on(mesh, small, 4096, 64):
            plan = lesson21.plan_of(small, run, "a100")
            assert not plan.fits("a100") or plan.seconds() >= found[0].seconds()


def test_every_mesh_of_powers_of_two_is_tried():
    tried = set(lesson21.meshes(MIXTRAL, 64, 16384))
    for tensor in (1, 2, 4, 8):
        for stages in (1, 2, 4, 8, 16, 32):
            for ring in (1, 2, 4):
                for expert in (1, 2, 4, 8):
                    data, rest = divmod(64, tensor * stages * ring * expert)
                    if not rest and data:
                        assert Mesh(data, tensor, stages, ring, expert) in tried
    assert all(
        64 == a.data * a.tensor * a.pipeline * a.context * a.expert for a in tried
    )


def test_the_reason_is_the_part_that_grew_most():
    found, _ = lesson21.plans(LLAMA, 64, "h100", 8192, 512)
    assert lesson21.reason(found[0], found[0]) == "the best"
    parts = found[0].parts
    slower = found[0]._replace(
        parts=parts._replace(bubble=parts.bubble + 1.5, data=0.1)
    )
    assert lesson21.reason(slower, found[0]) == "+1.50 s bubble"


def test_days_are_steps_times_seconds():
    found, _ = lesson21.plans(LLAMA, 64, "h100", 8192, 512)
    steps = 1e12 / (512 * 8192)
    assert lesson21.days(found[0], 1e12) == pytest.approx(
        steps * found[0].seconds() / 86400
    )


# ---- the program ----


def test_the_program_writes_its_plans(tmp_path, capsys):
    flags = ["--model", "llama3-1b", "--gpus", "32", "--tokens", "1e11"]
    result = lesson21.main([*flags, "--out", str(tmp_path)])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["plan"] == result["plan"] and rows[0]["why"] == "the best"
    assert len(rows) > 5
    said = capsys.readouterr().out
    assert " 1. 32 data, micro-batch 1, ZeRO-3" in said and " 6. " not in said
    hours = result["gpu_hours"]
    assert hours == pytest.approx(result["days"] * 24 * 32, rel=0.05)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (
            "--model llama3-70b --gpus 4",
            "llama3-70b does not fit on 4 x h100: even 4 tensor, micro-batch 1, ZeRO-3, recomputing needs 289 GB",
        ),
        (
            "--gpus 37 --batch 7",
            "no mesh of 37 GPUs can share 7 sequences of 8192 tokens",
        ),
        ("--gpus 0", "argument --gpus: '0' is not a whole number"),
        ("--gpu v100", "argument --gpu: invalid choice: 'v100'"),
    ],
)
def test_what_cannot_be_planned_gives_one_line(flags, problem, tmp_path):
    with pytest.raises(UsageError) as error:
        lesson21.main([*flags.split(), "--out", str(tmp_path)])
    assert str(error.value).startswith(problem) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


# ---- rehearsed ----

# each dimension is a multiple of what 512 ranks cut it into
SMALL = Model(2, 3072, 8192, 32, 1536, 32768, tied=True)


def keeps_as_planned(counted, parameters, shards=1):
    return (
        counted.parameters == counted.gradients == parameters / shards
        and counted.optimizer == 2 * counted.parameters
    )


def planned_of_data(run, parameters, ranks):
    """Bytes with ZeRO-3: torch gathers what is outside of blocks once, not twice."""
    planned, _ = step_time.sent_by_data(run, parameters, ranks)
    gathered_once = SMALL.embedding() / run.mesh.tensor + SMALL.width
    return planned - run.micro_batches() * 2 * gathered_once * (ranks - 1) / ranks


@pytest.mark.parametrize(
    "data, tensor, m", [(64, 8, 2), (512, 1, 1), (32, 4, 1), (1, 8, 1)]
)
def test_rank_0_keeps_and_sends_what_is_planned(data, tensor, m):
    mesh = Mesh(data=data, tensor=tensor)
    run = run_of(SMALL, mesh, 512, m * data, 1, stage=3)
    counted = rehearsal.rehearse(SMALL, run)
    dense, _ = stage_parameters(SMALL, mesh, 0, SMALL.layers)
    assert keeps_as_planned(counted, dense, shards=data) and counted.in_flight == 1
    assert counted.sent.get("data", 0) == planned_of_data(run, dense, data)
    norms, of_loss = (2 * SMALL.layers + 1) * SMALL.width * 2, 3 * 512 * 4
    more = m * 2 * (tensor - 1) / tensor * (norms + of_loss) if tensor > 1 else 0
    assert counted.sent.get("tensor", 0) == step_time.sent_by_tensor(run) + more
    assert set(counted.sent) <= {"data", "tensor"}


@pytest.mark.parametrize("data, context, m", [(128, 4, 2), (64, 8, 1), (1, 2, 1)])
def test_a_context_rank_keeps_and_sends_what_is_planned(data, context, m):
    mesh, ranks = Mesh(data=data, context=context), data * context
    run = run_of(SMALL, mesh, 512, m * data, 1, stage=3)
    counted = rehearsal.rehearse(SMALL, run)
    dense, _ = stage_parameters(SMALL, mesh, 0, SMALL.layers)
    assert keeps_as_planned(counted, dense, shards=ranks)
    assert counted.sent == {
        "data": planned_of_data(run, dense, ranks),
        "context": step_time.sent_by_context(run),
    }


@pytest.mark.parametrize(
    "data, pipeline, m, chunks", [(128, 4, 8, 1), (2, 2, 1, 1), (1, 2, 4, 2)]
)
def test_a_pipeline_rank_keeps_and_sends_what_is_planned(data, pipeline, m, chunks):
    model = SMALL._replace(layers=8)
    mesh = Mesh(data=data, pipeline=pipeline)
    run = run_of(model, mesh, 512, m * data, 1, chunks=chunks)
    counted = rehearsal.rehearse(model, run)
    layers = step_time.layers_per_rank(run)
    dense, _ = stage_parameters(model, mesh, 0, layers)
    assert keeps_as_planned(counted, dense)
    # activations in the plan are those of so many micro-batches
    flying = kept_by_stage(model, run, 0).activations
    flying /= layers * 2 * kept_per_token(model, "none") * 512
    assert counted.in_flight == flying * chunks
    one = 512 * model.width * 2
    stages = chunks * pipeline
    of_rank_0 = [stage for stage in range(stages) if stage % pipeline == 0]
    messages = sum((stage < stages - 1) + (stage > 0) for stage in of_rank_0)
    planned, _ = step_time.sent_by_data(run, dense, data)
    expected = {"pipeline": m * messages * one, "tied": model.embedding() * 2}
    if data > 1:  # gradients in 16 bits here, in 32 in the plan
        expected["data"] = planned / 2
    assert counted.sent == expected


@pytest.mark.parametrize(
    "name, sizes, stage, chunks",
    [
        ("llama3-8b", (4, 1, 1, 1), 3, 1),
        ("llama3-1b", (16, 1, 1, 2), 3, 1),
        ("llama3-1b", (2, 4, 1, 2), 3, 1),
        ("llama3-8b", (8, 8, 1, 1), 0, 1),
        ("llama3-70b", (4, 4, 4, 8), 1, 4),
        ("llama3-70b", (8, 8, 8, 1), 1, 1),
        ("llama3-405b", (4, 8, 14, 1), 1, 1),
        ("smollm2-135m", (2, 3, 2, 1), 1, 5),
    ],
)
def test_rank_0_of_any_mesh_has_the_parameters_of_the_plan(name, sizes, stage, chunks):
    model, (data, tensor, pipeline, context) = MODELS[name], sizes
    mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline, context=context)
    run = run_of(model, mesh, 8192, 16 * data, 1, stage=stage, chunks=chunks)
    dense, _ = stage_parameters(model, mesh, 0, step_time.layers_per_rank(run))
    shards = data * context if stage == 3 else 1
    assert rehearsal.built(model, run) == dense / shards
    [claim] = plans_claims.as_built("x", model, run, dense // shards + 1)
    assert not agree(claim.got, claim.expected)


def test_where_stages_do_not_divide_the_layers_rank_0_has_at_most_what_is_planned():
    model, mesh = MODELS["llama3-8b"], Mesh(pipeline=3)
    for chunks in (1, 4):
        run = run_of(model, mesh, 8192, 12, 1, chunks=chunks)
        dense, _ = stage_parameters(model, mesh, 0, step_time.layers_per_rank(run))
        assert 0.8 * dense < rehearsal.built(model, run) <= dense


def test_torchs_tracker_sees_about_the_planned_peak():
    run = run_of(SMALL, Mesh(data=512), 2048, 512, 1, stage=3)
    ours, torchs = kept_by_run(SMALL, run), rehearsal.peak_by_torch(SMALL, run)
    assert ours.total() == pytest.approx(torchs["Total"], rel=0.2)


@pytest.mark.parametrize(
    "mesh, stage",
    [
        (Mesh(expert=2), 3),
        (Mesh(data=2), 0),
        (Mesh(pipeline=2), 3),
        (Mesh(tensor=2, context=2), 3),
        (Mesh(tensor=2, pipeline=2), 0),
    ],
)
def test_what_is_not_rehearsed_is_refused(mesh, stage):
    with pytest.raises(ValueError, match="^only tensor or context ranks with ZeRO-3"):
        rehearsal.rehearse(SMALL, run_of(SMALL, mesh, 512, 8, 1, stage=stage))


# ---- exercise 21's small run ----


def test_each_small_run_has_faults_that_can_be_told_from_their_likely_mistakes():
    for number in range(500):
        name = f"somebody {number}"
        run, true = planted.planted(name), planted.truth(name)
        attempt, _, first, last = run.slow
        done = run.lost[1] - 1 if attempt == 0 else true["reached"]
        assert 1 <= first < last - 1 < done and true["redone"] > 1
        assert 1 <= run.nan[2] < run.lost[1]
        for finding, pairs in small.mistakes(name).items():
            assert all(value != true[finding] for value, _ in pairs), (name, finding)


def a_row(step, seconds=1.0):
    times = {"compute": seconds, "wait": 0.1}
    return {"attempt": 0, "step": step, "norm": 1.0, "mean_norm": 1.0} | times


def test_pages_in_which_nothing_happened_do_not_tell_mistakes_apart():
    """The post-mortem then runs its jobs again, slower; see the next test for the end."""
    uneventful = [[a_row(step) for step in range(12)] for _ in range(3)]
    assert not post_claims.all_differ([uneventful])


def blurred(pages, draw):
    """What a machine makes of them that is busy with many other things."""
    return [
        [
            row | {name: draw.lognormvariate(0, 1) for name in ("compute", "wait")}
            for row in page
        ]
        for page in pages
    ]


def test_where_a_busy_machine_blurs_all_times_those_that_were_planned_are_judged():
    """A wrong answer, which takes the first run of slow steps, has passed on such a machine."""
    for seed in range(3):
        jobs = job.jobs_of(random.Random(seed))
        of_ranks = launch(job.run_jobs, jobs, 0.1, nproc=job.RANKS)
        draw = random.Random(seed)
        cases = [blurred(pages, draw) for pages in zip(*of_ranks)]
        planned = [job.with_planned_times(*pair) for pair in zip(jobs, cases)]
        assert post_claims.all_differ(planned)
        for pages, of_it in zip(cases, planned):
            for name in ("nan", "redone"):  # which do not rest on times
                right, *_ = post_claims.FINDINGS[name]
                assert right(pages) == right(of_it)


def busy_jobs(jobs, stretch):
    """As job.run_jobs, on a machine that is busy with many other things."""
    of_jobs = job.run_jobs(jobs, stretch / 10)
    return blurred(of_jobs, random.Random(stretch))


@pytest.mark.parametrize("name", ["first_run", "as_the_text_says"])
def test_on_a_busy_machine_the_check_judges_as_on_a_quiet_one(name, monkeypatch):
    monkeypatch.setattr(post, "run_jobs", busy_jobs)
    [given] = [
        each
        for each in mutants.CANDIDATES
        if (each.question, each.name) == ("post_mortem", name)
    ]
    verdict = str(ex21.check_post_mortem.judge(*given.answers, seed=1))
    assert ("passed" in verdict) == (name == "as_the_text_says"), verdict
    assert given.pattern is None or re.search(given.pattern, verdict), verdict


def arguments_of(process):
    with suppress(psutil.Error):
        return process.cmdline()
    return []


OBSTACLE = why_not()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.mark.parametrize(
    "kind", [pytest.param("namespaces", marks=needs_namespaces), PRETENDED]
)
def test_the_pages_of_a_small_run_say_what_was_planted(kind, monkeypatch, capsys):
    if kind == PRETENDED:
        monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    name = f"somebody {random.randrange(10**9)}"
    pages, true = ex21.small_run(name), planted.truth(name)
    started = [each for each in psutil.process_iter() if name in arguments_of(each)]
    assert not started, "processes are left"
    found = {
        key: post_claims.FINDINGS[key][0](pages) for key in ("nan", "slow", "redone")
    }
    assert found == {key: true[key] for key in found}, name
    machine, step = true["lost"]
    last = {rank: page[-1]["step"] for rank, page in enumerate(pages)}
    assert set(last.values()) == {true["reached"]}
    for rank, page in enumerate(pages):
        rows = {row["step"]: row for row in page if row["attempt"] == 0}
        assert max(rows) == step - (rank // 2 == machine)
        assert step not in rows or rows[step]["mean_norm"] is None
        # attempt 1 begins with the weights of the checkpoint, and a NaN moves none
        [again] = [row for row in page if row["attempt"] == 1][:1]
        assert again["loss"] == rows[again["step"]]["loss"]
        bad = [[rank, row["step"]] for row in page if not math.isfinite(row["norm"])]
        assert bad == ([true["nan"]] if rank == true["nan"][0] else [])
    executions = {(row["attempt"], row["step"]) for page in pages for row in page}
    assert len(executions) == planted.BUDGET
    assert f"{planted.BUDGET} executions" in capsys.readouterr().out


def test_the_check_of_plans_counts_what_rank_0_of_each_has(monkeypatch):
    [task] = [t for t in exercises.questions_of("21") if t.name == "plans"]
    ours = Source("plans", task.preamble, exercises.answer_of(task.cell.source))
    monkeypatch.setattr(plans_claims, "stage_parameters", lambda *_: (1e6, 0))
    verdict = str(ex21.check_plans.judge(ours))
    assert "parameters of rank 0, built on a fake process group" in verdict


def test_a_small_run_that_fails_says_what_torchrun_has_printed(monkeypatch, capsys):
    monkeypatch.setenv("DDP_COURSE_MACHINES", PRETENDED)
    monkeypatch.setattr(small_job, "__name__", "no_such_module")
    with pytest.raises(RuntimeError, match="No module named no_such_module"):
        ex21.small_run("somebody")
