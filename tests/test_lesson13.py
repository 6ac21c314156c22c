"""DeepSpeed: its stages against DDP, its configuration, its checkpoints, its launcher,
and pipelines.
"""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH, descendants, python
from torch import nn

from ddp_course import UsageError, lesson12, lesson13, runs
from ddp_course.checkpoints import of_deepspeed
from ddp_course.checkpoints.deepspeed_configurations import BATCH, check_batch
from ddp_course.checks import ex13
from ddp_course.data.tokenizers import Bytes
from ddp_course.detectors.flight_record import flight_record
from ddp_course.files import Unusable, tensors_of
from ddp_course.models import gpt, six_ways
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.pipeline import token_loss
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

pytestmark = pytest.mark.skipif(
    not find_spec("deepspeed"), reason="DeepSpeed is not installed here"
)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
CPU = torch.device("cpu")
SHAPE = {"vocabulary": 61, "context": 16, "layers": 3, "heads": 2, "width": 32}
STEPS = 4


def batches(each=2, micro_batches=1):
    """Of this rank, for some steps: random tokens and targets."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, micro_batches, 2, dist.get_world_size() * each, 8)
    numbers = torch.randint(61, shape, generator=generator)
    mine = numbers.chunk(dist.get_world_size(), dim=3)[dist.get_rank()]
    return [tuple(pair) for step in mine for pair in step]


def configuration(*flags, **more):
    args = lesson13.arguments(
        ["--batch-size", "2", "--precision", "fp32", *map(str, flags)]
    )
    return lesson13.configuration(args, dist.get_world_size()) | more


def engine_for(*flags, **more):
    torch.manual_seed(0)
    return lesson13.start_engine(GPT(**SHAPE), configuration(*flags, **more), CPU)


def with_ddp():
    torch.manual_seed(0)
    model, optimizer, parameters_of_all = six_ways.ddp(GPT(**SHAPE), CPU)
    losses = lesson12.train_one_epoch(model, batches(), optimizer, CPU)
    norm = nn.utils.get_total_norm([value.grad for value in model.parameters()])
    return losses, parameters_of_all(), norm.item()


# ---- offload, and ZeRO++ ----


def train_and_count(stage, **zero):
    """Losses of four steps, with the last gradient's norm; and for each kind of message
    in a fifth step, the numbers of ranks that took part, each once.
    """
    config = configuration("--stage", stage)
    config["zero_optimization"] |= zero
    torch.manual_seed(0)
    engine = lesson13.start_engine(GPT(**SHAPE), config, CPU)
    losses = lesson13.train_one_epoch(engine, batches(), CPU)
    losses.append(float(engine.get_global_grad_norm()))  # Adam hides its scale
    before = len(flight_record()["entries"])
    lesson13.train_one_epoch(engine, batches()[:1], CPU)
    names = {
        name: dist.get_world_size(group)
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    calls = {}
    for entry in flight_record()["entries"][before:]:
        kind = entry["profiling_name"].partition(":")[2]
        calls.setdefault(kind, []).append(names[entry["process_group"][0]])
    return losses, calls, (engine.zero_use_cpu_optimizer(), engine.zero_offload_param())


def offload_and_zero_plus_plus():
    cpu = {"device": "cpu"}
    with process_group():
        found = {"2": train_and_count(2), "3": train_and_count(3)}
        found["2, offload"] = train_and_count(2, offload_optimizer=cpu)
        both = {"offload_optimizer": cpu, "offload_param": cpu}
        found["3, offload"] = train_and_count(3, **both)
        found["3, hpZ"] = train_and_count(3, zero_hpz_partition_size=2)
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            with pytest.raises((UsageError, ValueError)) as error:
                train_and_count(3, **{name: True})
            found[name] = str(error.value)
        return found


def test_offload_trains_alike_and_zero_plus_plus_is_for_gpus():
    """Four ranks. DeepSpeed 0.19 takes hpZ's line on a CPU, and gathers as before; what
    quantises messages ends with a message.
    """
    found = launch(offload_and_zero_plus_plus, nproc=4, timeout=600)[0]
    for name in ("2, offload", "3, offload", "3, hpZ"):
        assert found[name][0] == pytest.approx(found[name[0]][0], rel=1e-5)
    assert found["2, offload"][2][0] and found["3, offload"][2][0]  # it is on
    assert "cpu" in str(found["3, offload"][2][1]) and not found["3"][2][0]
    for name in ("3", "3, hpZ"):
        assert set(found[name][1]["all_gather"]) == {4}
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        assert "This op had not been implemented on CPU backend." in found[name]


def train_in_all_stages():
    """Losses, parameters, and the last gradient's norm, whose scale Adam hides: of DDP,
    of each stage, and of stage 2 with the same batch in two micro-batches.
    """
    with process_group():
        results = {"ddp": with_ddp()}
        for stage in range(4):
            engine = engine_for("--stage", stage)
            losses = lesson13.train_one_epoch(engine, batches(), CPU)
            norm = engine.get_global_grad_norm()
            results[stage] = losses, lesson13.whole_parameters(engine), norm
        engine = engine_for("--stage", 2, "--batch-size", 1, "--accumulate", 2)
        halves = [
            [part[None] for part in pair] for batch in batches() for pair in zip(*batch)
        ]
        losses = lesson13.train_one_epoch(engine, halves, CPU)
        losses = [
            sum(losses[place : place + 2]) / 2 for place in range(0, len(losses), 2)
        ]
        norm = engine.get_global_grad_norm()
        results["accumulated"] = losses, lesson13.whole_parameters(engine), norm
        return results


@pytest.mark.parametrize("nproc", [2, 3])
def test_each_stage_trains_as_ddp_does(nproc):
    for rank, results in enumerate(
        launch(train_in_all_stages, nproc=nproc, timeout=600)
    ):
        losses, expected, length = results.pop("ddp")
        assert len(results) == 5 and len(losses) == STEPS
        for name, (of_stage, parameters, norm) in results.items():
            # stage 0 computes none where it does not clip
            assert (
                norm is None
                if name == 0
                else float(norm) == pytest.approx(length, rel=1e-5)
            )
            torch.testing.assert_close(
                of_stage, losses, rtol=1e-5, atol=1e-5, msg=f"{name}, rank {rank}"
            )
            assert {*expected} - {*parameters} <= {"head.weight"}
            for (
                key,
                value,
            ) in (
                parameters.items()
            ):  # Adam makes much of the rounding of small gradients
                difference = (value - expected[key]).abs().max().item()
                assert difference < 0.2 * 1e-3, (name, key)


def train_in_fp16():
    """What DeepSpeed says where the processor cannot compute in fp16; else what each
    stage does with its loss scale.
    """
    with process_group():
        deepspeed = lesson13.load_deepspeed(CPU)
        if not deepspeed.get_accelerator().is_fp16_supported():
            with pytest.raises(UsageError) as error:
                engine_for("--precision", "fp16")
            return str(error.value)
        seen = {}
        for stage in (1, 2, 3):
            too_large = {"enabled": True, "initial_scale_power": 40}
            engine = engine_for("--stage", stage, "--precision", "fp16", fp16=too_large)
            before, rows = lesson13.whole_parameters(engine), []
            for batch in batches():
                lesson13.train_one_epoch(engine, [batch], CPU)
                rows.append((engine.optimizer.loss_scale, engine.skipped_steps))
            after = lesson13.whole_parameters(engine)
            seen[stage] = (
                rows,
                all(torch.equal(before[name], after[name]) for name in before),
            )
        with pytest.raises(UsageError) as error:
            engine_for("--stage", 0, "--precision", "fp16")
        seen["refused"] = str(error.value)
        for stage in (0, 1):  # what DeepSpeed makes of it, in one step
            config = configuration(
                "--stage",
                stage,
                "--precision",
                "fp16",
                optimizer={"type": "SGD", "params": {"lr": 1.0}},
            )
            torch.manual_seed(0)
            engine, *_ = deepspeed.initialize(
                model=GPT(**SHAPE),
                config=config | {"zero_allow_untested_optimizer": True},
            )
            before = lesson13.whole_parameters(engine)
            lesson13.train_one_epoch(engine, batches()[:1], CPU)
            after = lesson13.whole_parameters(engine)
            seen["moved", stage] = max(
                (after[name] - before[name]).abs().max().item() for name in before
            )
        return seen


def test_in_fp16_overflowing_steps_are_skipped_and_stage_0_is_refused():
    for seen in launch(train_in_fp16, nproc=2, timeout=600):
        if isinstance(seen, str):
            assert "fp16 is not supported on your device" in seen
            continue
        for stage in (1, 2, 3):  # the first overflow is forgiven
            assert seen[stage] == (
                [(2**40, 1), (2**39, 2), (2**38, 3), (2**37, 4)],
                True,
            )
        assert "does not scale the loss in stage 0: take stage 1" in seen["refused"]
        # if this fails, DeepSpeed scales the loss in stage 0: it need not be refused then
        assert seen["moved", 0] < seen["moved", 1] / 1000


def train_in_fp16_with_a_scale_that_fits():
    """The losses of eight updates in fp32; and of updates in fp16, with the scale after
    each, which may double every second time: with a first scale that fits, and with one
    that is too large. Nothing where the processor cannot compute in fp16.
    """
    found = {}
    with process_group():
        deepspeed = lesson13.load_deepspeed(CPU)
        if not deepspeed.get_accelerator().is_fp16_supported():
            return found
        moving = {"enabled": True, "loss_scale_window": 2, "hysteresis": 1}
        for stage in (1, 3):
            engine = engine_for("--stage", stage)
            losses = lesson13.train_one_epoch(engine, [*batches()] * 2, CPU)
            for power in (6, 20):
                scale = moving | {"initial_scale_power": power}
                engine = engine_for("--stage", stage, "--precision", "fp16", fp16=scale)
                rows = []
                for batch in [*batches()] * (2 if power == 6 else 3):
                    [loss] = lesson13.train_one_epoch(engine, [batch], CPU)
                    rows.append((loss, engine.optimizer.loss_scale))
                found[stage, power] = losses, rows, engine.skipped_steps
    return found


def test_in_fp16_a_scale_that_moves_trains_as_fp32_does():
    found = launch(train_in_fp16_with_a_scale_that_fits, nproc=2)[0]
    if not found:
        pytest.skip("this processor does not compute in fp16")
    for (_, power), (losses, rows, skipped) in found.items():
        in_fp16, scales = zip(*rows)
        if power == 6:
            assert skipped == 0 and in_fp16[:5] == pytest.approx(losses[:5], rel=2e-3)
            assert list(scales) == sorted(scales) and scales[-1] == 2**6 * 2**3
        else:  # it falls until the gradients fit; then the model trains, and it rises
            assert scales[:5] == (2**19, 2**18, 2**17, 2**16, 2**16) and skipped >= 4
            assert in_fp16[4:9] == pytest.approx(losses[:5], rel=2e-3)
            assert max(scales[5:]) > 2**16


def rates(twice=False):
    """The learning rates of eight updates; twice: the loop steps the schedule, too."""
    engine, used = engine_for("--warmup", 4), []
    for batch in [*batches(), *batches()]:
        used.append(engine.get_lr()[0])
        lesson13.train_one_epoch(engine, [batch], CPU)
        if twice:
            engine.lr_scheduler.step()
    return used


def updates(every):
    """How many updates 4 micro-batches make that accumulate 2, with a step every so
    many of them.
    """
    engine = engine_for("--accumulate", 2)
    for number, (tokens, targets) in enumerate(batches(), 1):
        engine.backward(token_loss(engine(tokens), targets))
        if number % every == 0:
            engine.step()
    return engine.global_steps


def first_updates():
    """Of two updates with a warm-up from 0: whether weights and averages have moved,
    and Adam's step counter.
    """
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}
    engine = engine_for(scheduler={"type": "WarmupLR", "params": schedule})
    before = lesson13.whole_parameters(engine)
    lesson13.train_one_epoch(engine, batches()[:2], CPU)
    after = lesson13.whole_parameters(engine)
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    [state] = engine.optimizer.optimizer.state.values()
    return moved, state["exp_avg"].any().item(), state["step"].item()


def defaults(deepspeed):
    """What DeepSpeed takes for keys that are left out."""
    config = deepspeed.DeepSpeedConfig({BATCH[1]: 1, "fp16": {"enabled": True}})
    zero, fp16 = config.zero_config, config.float16_config
    stage_3 = {BATCH[1]: 1, "zero_optimization": {"stage": 3}}
    overlap = [
        one.zero_config.overlap_comm
        for one in (config, deepspeed.DeepSpeedConfig(stage_3))
    ]
    flags = (zero.contiguous_gradients, zero.reduce_scatter, zero.allgather_partitions)
    scale = (fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window)
    return {
        "steps_per_print": config.steps_per_print,
        "flags": flags,
        "overlap_comm": overlap,
        "fp16": (*scale, fp16.hysteresis, fp16.min_loss_scale),
        "buckets": zero.reduce_bucket_size,
    }


def observe_the_rest():
    """What one launch is enough for: bytes, bf16, the schedule, clipping,
    configurations that are refused.
    """
    seen = {"bytes": {}, "bf16": {}, "refused": {}}
    with process_group():
        parameters = sum(value.numel() for value in GPT(**SHAPE).parameters())
        small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
        for precision in ("fp32", "bf16"):
            for stage in range(4):
                sharing = {"stage": stage, **small}
                if stage == 3:
                    few = {
                        "stage3_max_live_parameters": 1000,
                        "stage3_max_reuse_distance": 1000,
                    }
                    sharing |= (
                        lesson13.buffers("small", 3)
                        | few
                        | {"reduce_bucket_size": 1000}
                    )
                if stage == 1:
                    sharing["use_multi_rank_bucket_allreduce"] = False
                with watch.memory_timeline() as timeline:
                    engine = engine_for(
                        "--precision", precision, zero_optimization=sharing
                    )
                    lesson13.train_one_epoch(engine, batches(), CPU)
                shared = watch.count_bytes(
                    partial(lesson13.train_one_epoch, engine, batches()[:1], CPU)
                )
                shared = {
                    kind: size / parameters
                    for kind, size in shared.items()
                    if size > 100
                }
                seen["bytes"][precision, stage] = timeline[-1] / parameters, shared
                if precision == "bf16" and stage < 3:
                    state = next(iter(engine.optimizer.optimizer.state.values()))
                    seen["bf16"][stage] = state["step"].item()
                engine.destroy()

        for stage in range(1, 4):
            with watch.memory_timeline() as timeline:
                engine = engine_for("--stage", stage)
                lesson13.train_one_epoch(engine, batches(), CPU)
            seen["peak", stage] = max(timeline)
            engine.destroy()

        seen["rates"], seen["rates twice"] = rates(), rates(twice=True)
        seen["updates"] = [updates(every) for every in (1, 2)]
        seen["first updates"] = first_updates()
        seen["defaults"] = defaults(lesson13.load_deepspeed(CPU))

        config = configuration(
            "--stage", 0, optimizer={"type": "SGD", "params": {"lr": 0.1}}
        )
        del config["gradient_clipping"]
        torch.manual_seed(0)
        seen["clipping"] = lesson13.start_engine(
            GPT(**SHAPE), config, CPU
        ).gradient_clipping()

        wrong = {
            "stage 5": {"zero_optimization": {"stage": 5}},
            "unknown optimizer": {"optimizer": {"type": "Adamm", "params": {}}},
            "batch": {"train_batch_size": 15},
            "no object": {"zero_optimization": 2},
        }
        for name, more in wrong.items():
            try:
                engine_for(**more)
            except UsageError as error:
                seen["refused"][name] = str(error)
        own = nn.Linear(2, 2)
        config = configuration("--learning-rate", 1e-3)
        deepspeed = lesson13.load_deepspeed(CPU)
        engine, *_ = deepspeed.initialize(
            model=own,
            optimizer=torch.optim.AdamW(own.parameters(), lr=0.5),
            config=config,
        )
        seen["twice"] = engine.get_lr()[0]
        config = configuration()
        config["zero_optimisation"] = config.pop("zero_optimization")
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        seen["misspelt"] = engine.zero_optimization_stage()
    return seen


def test_what_the_stages_keep_and_send_and_what_deepspeed_does_without_a_word():
    n = 2
    seen, *_ = launch(observe_the_rest, nproc=n, timeout=600)
    bucket = 1000 / sum(value.numel() for value in GPT(**SHAPE).parameters())
    for (precision, stage), (kept, shared) in seen["bytes"].items():
        weight, copy = (4, 4 if stage else 0) if precision == "fp32" else (2, 4)
        expected = {
            0: weight + copy + 8,
            3: (2 * weight + copy + 8) / n + weight * bucket,
        }
        expected = expected.get(stage, weight + (copy + 8) / n)
        assert kept == pytest.approx(expected, rel=0.03), (precision, stage)
        kinds = {
            0: {"allreduce": weight},
            1: {"reduce": weight, "allgather": weight},  # of one owner each
            2: {
                "allreduce": weight,
                "allgather": weight,
            },  # of several owners, all-reduced together
            3: {"reduce_scatter": weight, "allgather": 2 * weight},
        }[stage]
        assert shared.keys() == kinds.keys()
        for kind, size in kinds.items():
            slack = (
                0.2 if kind == "allgather" and stage == 3 else 0.01
            )  # some are still there for backward
            assert shared[kind] == pytest.approx(size, rel=slack), (
                precision,
                stage,
                kind,
            )
    block = sum(
        value.numel() for value in GPT(**SHAPES["small"]).blocks[0].parameters()
    )
    for stage in range(1, 4):
        assert lesson13.buffers("small", stage)["reduce_bucket_size"] == block
        assert seen["peak", stage] < 10e6, (
            stage
        )  # bytes, where the default bucket has 2 GB
    # stage 0 counts a step that was none
    assert seen["bf16"] == {0: STEPS + 2, 1: STEPS + 1, 2: STEPS + 1}
    warm_up = [2.5e-4 + 7.5e-4 * min(1, step / 4) for step in range(2 * 2 * STEPS)]
    # the first two updates have the lowest rate
    assert seen["rates"] == pytest.approx([warm_up[0], *warm_up[:7]])
    assert seen["rates twice"] == pytest.approx([warm_up[0], *warm_up[1::2][:7]])
    assert seen["updates"] == [2, 1]
    assert seen["first updates"] == (False, True, 2)
    assert seen["defaults"] == {
        "steps_per_print": None,
        "flags": (True, True, True),
        "overlap_comm": [False, True],
        "fp16": (0, 16, 1000, 2, 1),
        "buckets": 5e8,
    }
    assert seen["clipping"] == 1.0
    assert "stage Input should be 0, 1, 2" in seen["refused"]["stage 5"]
    assert (
        "Adamm is not a supported DeepSpeed Optimizer"
        in seen["refused"]["unknown optimizer"]
    )
    assert "Check batch related parameters" in seen["refused"]["batch"]
    assert "DeepSpeed refuses the configuration: " in seen["refused"]["no object"]
    assert seen["twice"] == 0.5 and seen["misspelt"] == 0


# ---- the program ----


def run_programs(out):
    """The program in each stage; resumed, and undisturbed; in bf16; and lesson 12's
    DDP. All in one process group.
    """
    with process_group() as (rank, world_size):

        def program(lesson, name, *more):
            args = lesson.arguments(
                [
                    "--train-samples",
                    "32",
                    "--batch-size",
                    "4",
                    "--out",
                    f"{out}/{name}",
                    *more,
                ]
            )
            run = lesson.prepare(args, rank, world_size, CPU)
            lesson.train(run)
            return lesson.report(run)

        results = {
            f"stage {n}": program(lesson13, f"stage {n}", "--stage", str(n))
            for n in range(4)
        }
        results["ddp"] = program(lesson12, "ddp", "--sharding", "ddp")
        # 8 micro-batches each: two updates an epoch, and two micro-batches that are
        # left over
        resumed = [
            "--stage",
            "3",
            "--warmup",
            "3",
            "--accumulate",
            "3",
            "--train-samples",
            "64",
            "--epochs",
        ]
        program(lesson13, "resumed", *resumed, "1")
        if rank == 0:  # of an attempt that was killed; nobody waits for the pipe
            attempt = out / "resumed" / "checkpoints" / "epoch-2"
            attempt.mkdir()
            os.mkfifo(attempt / "zero_pp_rank_1_mp_rank_00_model_states.pt")
        results["resumed"] = program(lesson13, "resumed", *resumed, "2", "--resume")
        results["undisturbed"] = program(lesson13, "undisturbed", *resumed, "2")
        results["bf16"] = program(
            lesson13, "bf16", "--precision", "bf16", "--accumulate", "2"
        )
        with pytest.raises(UsageError) as error:
            program(lesson13, "stage 2", "--stage", "1", "--resume")
        results["another stage"] = str(error.value)
        with pytest.raises(UsageError) as error:
            program(lesson13, "NaN", "--learning-rate", "1e30")
        results["NaN"] = str(error.value)
        its_own = ["--deepspeed_config", f"{out}/stage 3/deepspeed.json"]
        results["its own configuration"] = program(lesson13, "again", *its_own)
        return results


def test_the_program_trains_as_lesson_12_resumes_exactly_and_its_shards_make_what_was_trained(
    tmp_path,
):
    """All of it from one launch, which takes its time."""
    results, *_ = launch(run_programs, tmp_path, nproc=2, timeout=600)
    trains_as_lesson_12(results)
    resumed_equals_undisturbed(results["resumed"], results["undisturbed"])
    for stage in (1, 2, 3):
        its_shards_make_what_was_trained(
            tmp_path / f"stage {stage}", results[f"stage {stage}"], stage
        )
    stages = "{.*'stage': 2.*}, not {.*'stage': 1.*}"
    pattern = f"checkpoints was made with zero_optimization {stages}"
    assert re.search(pattern, results["another stage"])
    assert re.match(r"the loss is not a number in step \d of the epoch", results["NaN"])
    again = results["its own configuration"]["params_sha256"]
    assert again == results["stage 3"]["params_sha256"]
    refusal, loss = launch(run_alone, tmp_path, nproc=1, timeout=600)[0]
    assert (
        "checkpoints was made with ranks 2, not 1: use that, or start anew" in refusal
    )
    assert loss < 5


def run_alone(out):
    """Nobody has launched this process: what lesson 13 needs to say of that must not
    stay for the next lesson.
    """
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    flags = ["--train-samples", "32", "--batch-size", "8", "--out"]
    with pytest.raises(UsageError) as error:
        lesson13.main([*flags, f"{out}/stage 2", "--stage", "2", "--resume"])
    return str(error.value), lesson12.main([*flags, f"{out}/alone"])["train_loss"]


def trains_as_lesson_12(results):
    for stage in range(4):
        result = results[f"stage {stage}"]
        assert result["losses"] == pytest.approx(results["ddp"]["losses"], rel=1e-5)
        assert (
            result["stage"] == stage
            and result["updates"] == 4
            and result["samples_per_update"] == 8
        )
    assert (
        results["bf16"]["updates"] == 2 and results["bf16"]["samples_per_update"] == 16
    )
    assert results["bf16"]["losses"][0] == pytest.approx(
        results["ddp"]["losses"][0], rel=0.01
    )


def resumed_equals_undisturbed(resumed, undisturbed):
    assert (
        len(resumed["losses"]) == 2 * 2 * 3
        and resumed["losses"] == undisturbed["losses"]
    )
    assert resumed["params_sha256"] == undisturbed["params_sha256"]
    assert resumed["updates"] == undisturbed["updates"] == 2 * 2


def its_shards_make_what_was_trained(folder, result, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    network = GPT(Bytes().vocabulary, **SHAPES["small"])
    network.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoints"))
    )
    assert runs.params_sha256(network) == result["params_sha256"]
    if stage == 3:
        [shard] = (folder / "checkpoints").rglob("zero_pp_rank_0*model_states.pt")
        with pytest.raises(
            RuntimeError, match=r"copying a param with shape torch.Size\(\[0\]\)"
        ):
            network.load_state_dict(torch.load(shard, weights_only=False)["module"])


def programs(*more, stage, out, nproc):
    """The program on ranks: 12 samples per update, 4 updates per epoch, with warm-up."""
    each = ["--batch-size", str(12 // nproc), "--train-samples", "48"]
    how = ["--stage", str(stage), "--warmup", "6", "--out", str(out)]
    return launch(lesson13.main, [*each, *how, *more], nproc=nproc, timeout=600)[0]


def to_universal(checkpoint):
    from deepspeed.checkpoint import ds_to_universal

    words = ["--input_folder", checkpoint, "--output_folder", f"{checkpoint}-universal"]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv = ["ds_to_universal.py", *words, "--inject_missing_state"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


@pytest.mark.parametrize("stage, nproc", [(2, 3), (3, 1)])
def test_a_universal_checkpoint_goes_on_with_another_number_of_ranks(
    stage, nproc, tmp_path
):
    whole = programs("--epochs", "2", stage=stage, out=tmp_path / "whole", nproc=2)
    out = tmp_path / "out"
    programs(stage=stage, out=out, nproc=2)
    launch(to_universal, str(out / "checkpoints" / "epoch-1"), nproc=1, timeout=600)
    more = ["--epochs", "2", "--resume"]
    where = {"stage": stage, "out": out, "nproc": nproc}
    if stage == 2:
        with pytest.raises(RankError, match="was made with"):
            programs(*more, **where)
    result = programs(*more, "--universal", **where)
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert result["updates"] == 8 and result["world_size"] == nproc
    assert result["learning_rate"] == pytest.approx(whole["learning_rate"])
    if stage == 2:  # and from there without further ado
        programs("--epochs", "3", "--resume", **where)


def stops_before_it_has_saved(out):
    def stopped(*_):
        raise KeyboardInterrupt

    lesson13.train_one_epoch = stopped
    lesson13.main(["--train-samples", "8", "--out", str(out)])


def test_settings_are_those_of_a_checkpoint_and_not_of_an_attempt(tmp_path):
    with pytest.raises((RankError, KeyboardInterrupt)):
        launch(stops_before_it_has_saved, tmp_path, nproc=1, timeout=600)
    assert (tmp_path / "checkpoints").is_dir()
    assert not (tmp_path / "checkpoints" / "settings.json").exists()


def load_elsewhere(folder, stage, **more):
    with process_group():
        engine = engine_for("--stage", stage, **more)
        path, _ = engine.load_checkpoint(folder)
        return path is not None


def save_here(folder, stage):
    with process_group():
        engine = engine_for("--stage", stage)
        lesson13.train_one_epoch(engine, batches(), CPU)
        engine.save_checkpoint(folder)


def test_a_universal_checkpoint_goes_from_stage_2_to_1_but_not_to_3(tmp_path):
    launch(save_here, str(tmp_path), 2, nproc=2, timeout=600)
    launch(to_universal, str(tmp_path / "global_step4"), nproc=1, timeout=600)
    universal = partial(load_elsewhere, checkpoint={"load_universal": True})
    assert launch(universal, str(tmp_path), 1, nproc=3, timeout=600) == [True] * 3
    with pytest.raises(RankError, match="check_ckpt_list"):
        launch(universal, str(tmp_path), 3, nproc=2, timeout=600)


@pytest.mark.parametrize("stage", [0, 2, 3] if THOROUGH else [0, 2])
def test_shards_load_on_as_many_ranks_only(stage, tmp_path):
    launch(save_here, str(tmp_path), stage, nproc=2, timeout=600)
    if stage == 0:  # nothing is sharded
        assert launch(load_elsewhere, str(tmp_path), 0, nproc=1, timeout=600) == [True]
        return
    with pytest.raises(RankError, match="used a DP world size of 2 but the current"):
        launch(load_elsewhere, str(tmp_path), stage, nproc=1, timeout=600)
    if stage == 2:
        assert launch(load_elsewhere, str(tmp_path), 1, nproc=2, timeout=600) == [
            True,
            True,
        ]
        with pytest.raises(RankError, match="check_ckpt_list"):
            launch(load_elsewhere, str(tmp_path), 3, nproc=2, timeout=600)


class LooksUp:
    """Pickled as Python 3.11.0 to 3.11.3 pickles a member of an enum."""

    def __init__(self, *place):
        self.place = place

    def __reduce__(self):
        return getattr, self.place


def test_a_stage_is_read_as_early_pythons_3_11_write_it_and_no_other_attribute(
    tmp_path,
):
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"zero_stage": LooksUp(ZeroStageEnum, "weights")}, tmp_path / "stage.pt")
    classes = of_deepspeed.classes_of_deepspeed()
    found = tensors_of(tmp_path / "stage.pt", classes)
    assert found == {"zero_stage": ZeroStageEnum.weights}
    for place in ((ZeroStageEnum, "__class__"), (of_deepspeed.Path, "home")):
        torch.save(LooksUp(*place), tmp_path / "other.pt")
        with pytest.raises(Unusable, match="holds more than tensors and numbers"):
            tensors_of(tmp_path / "other.pt", classes)


def test_a_wrong_configuration_and_a_missing_checkpoint_give_one_line(tmp_path):
    config = tmp_path / "config.json"

    def fails(text, *more):
        config.write_text(text)
        flags = [
            "--train-samples",
            "16",
            "--out",
            str(tmp_path / "out"),
            "--deepspeed_config",
            str(config),
        ]
        with pytest.raises(RankError, match="UsageError") as error:
            launch(lesson13.main, [*flags, *more], nproc=2, timeout=600)
        return str(error.value)

    assert f"{config}, line 1, is no JSON: " in fails("{train_batch_size: 4}")
    assert "must hold an object, in braces, and holds a list" in fails("[1, 2]")
    assert (
        "train_batch_size is 16, but micro batch 4 x accumulation 1 x 2 ranks = 8"
        in fails(json.dumps(dict(zip(BATCH, (16, 4, 1)))))
    )
    good = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    good["zero_optimization"] = {"stage": 1, **lesson13.buffers("small", 1)}
    without = {name: value for name, value in good.items() if name != "optimizer"}
    assert "the configuration must say which optimizer" in fails(json.dumps(without))
    assert "there is no checkpoint in" in fails(json.dumps(good), "--resume")
    with pytest.raises(
        RankError, match="cannot read .*nothing.json: No such file or directory"
    ):
        launch(
            lesson13.main,
            [
                "--out",
                str(tmp_path),
                "--deepspeed_config",
                str(tmp_path / "nothing.json"),
            ],
            nproc=1,
        )


def test_without_deepspeed_there_is_one_clear_line(tmp_path):
    program = """
import sys
sys.modules["deepspeed"] = None  # as where it is not installed
from ddp_course import lesson13, runs
runs.start(lambda _: lesson13.main(["--train-samples", "16", "--out", sys.argv[1]]))
"""
    done = python("-c", program, tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.endswith(
        "lesson 13 needs deepspeed, which is not here: pip install deepspeed"
    )


@pytest.mark.parametrize("ninja", [False, True] if THOROUGH else [True])
def test_without_a_compiler_there_is_one_clear_line(ninja, tmp_path):
    tools = tmp_path / "tools"  # all that is on the PATH
    tools.mkdir()
    if ninja:
        (tools / "ninja").symlink_to(Path(sysconfig.get_path("scripts"), "ninja"))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    variables = os.environ | {
        "PATH": str(tools),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    words = [
        "--train-samples",
        "16",
        "--out",
        tmp_path / "out",
        "--deepspeed_config",
        tmp_path / "config.json",
    ]
    done = python("ddp_course/lesson13.py", *words, env=variables)
    assert done.returncode == 2, done.stderr
    assert (
        "lesson13.py: DeepSpeed compiles its own optimizer"
        in done.stderr.strip().splitlines()[-1]
    )
    assert "Traceback" not in done.stderr


# ---- the arithmetic of a batch ----


@pytest.mark.parametrize(
    "given, ranks, expected",
    [
        ((64, 4, None), 4, (64, 4, 4)),
        ((64, None, 2), 4, (64, 8, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((None, 4, None), 4, (16, 4, 1)),
        ((64, None, None), 4, (64, 16, 1)),
        ((64, 4, 4), 4, (64, 4, 4)),
    ],
)
def test_two_numbers_of_a_batch_make_the_third_as_in_deepspeed(
    given, ranks, expected, monkeypatch
):
    config = {name: value for name, value in zip(BATCH, given) if value is not None}
    assert check_batch(config, ranks) == expected
    import deepspeed

    monkeypatch.setattr(
        deepspeed.runtime.config.dist, "get_world_size", lambda *_: ranks
    )
    monkeypatch.setattr(deepspeed.runtime.config.dist, "get_rank", lambda *_: 0)
    theirs = deepspeed.DeepSpeedConfig(config)
    assert tuple(getattr(theirs, name) for name in BATCH) == expected


@pytest.mark.parametrize(
    "given, ranks, message",
    [
        (
            (48, 4, 4),
            4,
            "train_batch_size is 48, but micro batch 4 x accumulation 4 x 4 ranks = 64",
        ),
        (
            (30, None, 4),
            2,
            "train_batch_size is 30, but micro batch 3 x accumulation 4 x 2 ranks = 24",
        ),
        ((16, 8, 1), 1, "was it started with python, and not with torchrun"),
        ((2, None, None), 4, "micro batch 0"),
        (
            (None, None, 4),
            2,
            "must say train_batch_size or train_micro_batch_size_per_gpu",
        ),
        (
            (64, "4", None),
            4,
            "train_micro_batch_size_per_gpu is '4', and must be a whole number from 1",
        ),
        ((64, 0, None), 4, "train_micro_batch_size_per_gpu is 0"),
    ],
)
def test_a_batch_that_does_not_fit_is_explained(given, ranks, message):
    config = {name: value for name, value in zip(BATCH, given) if value is not None}
    with pytest.raises(UsageError, match=message):
        check_batch(config, ranks)


def start_the_exercises_engines():
    """What DeepSpeed itself understands of the exercise's configurations, broken and
    repaired by the mutants' table.
    """
    from mutants.ex13 import by_a_table

    deepspeed, seen = None, {}
    with process_group():
        deepspeed = lesson13.load_deepspeed(CPU)
        for state in ("broken", "repaired"):
            for name, (_, config) in ex13.broken().items():
                config = by_a_table(name, config) if state == "repaired" else config
                config["optimizer"]["params"]["torch_adam"] = True
                for one in BATCH[: 1 if name != "arithmetic" else 0]:
                    config[one] //= ex13.RANKS // 2  # these are for 8 ranks
                try:
                    engine, *_ = deepspeed.initialize(
                        model=nn.Linear(4, 4), config=config
                    )
                except (AssertionError, ValueError) as error:
                    seen[state, name] = str(error)
                    continue
                stage, clipped = (
                    engine.zero_optimization_stage(),
                    engine.gradient_clipping(),
                )
                seen[state, name] = {
                    "stage": stage,
                    "clipping": clipped,
                    "rate": engine.get_lr()[0],
                }
    return seen


def test_deepspeed_sees_the_exercises_mistakes_and_repairs_as_the_check_does():
    seen = launch(start_the_exercises_engines, nproc=2, timeout=600)[0]
    good = {"stage": 2, "clipping": 0.0, "rate": pytest.approx(1e-6)}
    assert seen["broken", "memory"] == good | {"stage": 0}
    assert seen["broken", "clipping"] == good | {"clipping": 1.0}
    assert (
        "bfloat16 and fp16 modes cannot be simultaneously enabled"
        in seen["broken", "precision"]
    )
    assert seen["broken", "schedule"] == good | {"rate": 0.0}
    for name in ("memory", "clipping", "precision"):
        assert seen["repaired", name] == good, name
    assert 0 < seen["repaired", "schedule"]["rate"] < 3e-4
    # the batches are 8 ranks', and here are 2: told so, with the numbers
    assert "64 != 4 * 4 * 2" in seen["broken", "arithmetic"]
    assert "64 != 4 * 2 * 2" in seen["repaired", "arithmetic"]


# ---- Accelerate, Trainer, activation checkpointing ----


def with_accelerate(name_the_backend):
    """The losses of lesson 13's configuration in Accelerate, and how many processes it
    counts.
    """
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import DummyOptim

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as accelerate launch does
    with process_group():
        lesson13.load_deepspeed(CPU)
        plugin = DeepSpeedPlugin(hf_ds_config=configuration("--stage", 2))
        handlers = [InitProcessGroupKwargs(backend="gloo")] if name_the_backend else []
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)
        if not name_the_backend:
            return accelerator.num_processes
        torch.manual_seed(0)
        network = GPT(**SHAPE)
        pieces = batches()
        loader = torch.utils.data.DataLoader([0], batch_size=1)
        optimizer = DummyOptim(network.parameters())
        network, optimizer, _ = accelerator.prepare(network, optimizer, loader)
        losses = []
        for tokens, targets in pieces:
            loss = token_loss(network(tokens), targets)
            accelerator.backward(loss)  # steps the engine as well
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        assert type(network).__name__ == "DeepSpeedEngine"
        return losses, with_ddp()[0]


def test_accelerate_trains_with_the_configuration_if_it_is_told_the_backend():
    losses, expected = launch(with_accelerate, True, nproc=2, timeout=600)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert launch(with_accelerate, False, nproc=2, timeout=600) == [1, 1]


def with_trainer(path):
    from transformers import Trainer, TrainingArguments

    class TokenTrainer(Trainer):
        def compute_loss(self, model, inputs, *_, num_items_in_batch=None):
            return token_loss(model(inputs["tokens"]), inputs["targets"])

    adamw = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    config = dict.fromkeys([*BATCH, "gradient_clipping"], "auto")
    config["optimizer"] = {"type": "AdamW", "params": adamw}
    config["zero_optimization"] = {"stage": 2, **lesson13.buffers("small", 2)}
    settings = TrainingArguments(
        path, deepspeed=config, use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS,
        learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.0, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    lesson13.load_deepspeed(CPU)
    torch.manual_seed(0)
    rows = [dict(zip(("tokens", "targets"), pair)) for pair in zip(*same_batch())]
    trainer = TokenTrainer(GPT(**SHAPE), settings, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return type(trainer.model_wrapped).__name__, losses


def same_batch():
    """Four samples, the same in each step: tokens and targets."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(61, (2, 4, 8), generator=generator)


def with_ddp_on_the_same_batch():
    with process_group() as (rank, world_size):
        torch.manual_seed(0)
        model, optimizer, _ = six_ways.ddp(GPT(**SHAPE), CPU)
        mine = tuple(part.chunk(world_size)[rank] for part in same_batch())
        return lesson12.train_one_epoch(model, [mine] * STEPS, optimizer, CPU)


def test_trainer_fills_in_what_is_auto_and_trains_as_ddp(tmp_path):
    kind, losses = launch(with_trainer, str(tmp_path), nproc=2, timeout=600)[0]
    expected = launch(with_ddp_on_the_same_batch, nproc=2)[0]
    assert kind == "DeepSpeedEngine" and len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-3)


def kept_by_checkpointing(partition):
    """What is in use after forward with DeepSpeed's activation checkpointing, and the
    number of ranks over which it shards.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    with process_group():
        engine = engine_for("--stage", 1)
        deepspeed = lesson13.load_deepspeed(CPU)
        deepspeed.checkpointing.configure(None, partition_activations=partition)
        for block in engine.module.blocks:
            inner = block.forward
            block.forward = partial(deepspeed.checkpointing.checkpoint, inner)
        [(tokens, targets), *_] = batches()
        with watch.memory_timeline() as timeline:
            loss = token_loss(engine(tokens), targets)
            kept = timeline[-1]
        engine.backward(loss)
        return kept, checkpointing.mp_size


def test_deepspeeds_checkpointing_shards_nothing_over_data_parallel_ranks():
    [whole, *_] = launch(kept_by_checkpointing, False, nproc=2)
    [sharded, *_] = launch(kept_by_checkpointing, True, nproc=2)
    assert whole[1] == sharded[1] == 1
    assert sharded[0] >= whole[0]


# ---- the launcher ----


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def listening(processes):
    found = []
    for process in processes:
        try:
            found += [
                one.laddr
                for one in process.net_connections()
                if one.status == psutil.CONN_LISTEN
            ]
        except psutil.Error:
            pass  # it has just ended
    return found


def start(*words, out):
    """DeepSpeed's launcher, with the program of lesson 13."""
    program = [
        COURSE / "ddp_course/lesson13.py",
        "--stage",
        "0",
        "--train-samples",
        "16",
        "--batch-size",
        "4",
    ]
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        *words,
        *program,
        "--out",
        out,
    ]
    return subprocess.Popen(
        launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(launchers):
    """Wait for launchers to end: (exit codes, output of the first, addresses that they
    and their ranks listened on).
    """
    addresses, started = set(), set()
    while any(launcher.poll() is None for launcher in launchers):
        now = [child for launcher in launchers for child in descendants(launcher.pid)]
        started |= set(now)
        addresses |= {address.ip for address in listening(now)}
        time.sleep(0.05)
    assert not [
        child
        for child in started
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]
    outputs = [launcher.communicate()[0] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], outputs[0], addresses


def two_machines(folder):
    """Both are this one, under two names, and there is no ssh."""
    (folder / "hosts").write_text("left slots=1\nright slots=1\n")
    words = [
        "--hostfile",
        folder / "hosts",
        "--no_ssh",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        free_port(),
    ]
    return [start(*words, "--node_rank", rank, out=folder / "out") for rank in "01"]


@pytest.mark.parametrize("machines", [1, 2] if THOROUGH else [2])
def test_deepspeeds_launcher_starts_the_program_on_loopback_only_and_leaves_nothing(
    machines, tmp_path
):
    if machines == 1:
        launchers = [
            start("--num_gpus", "2", "--master_port", free_port(), out=tmp_path / "out")
        ]
    else:
        launchers = two_machines(tmp_path)
    codes, output, addresses = end(launchers)
    assert codes == [0] * machines, output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["world_size"] == 2 and result["updates"] == 2
    assert addresses == {"127.0.0.1"}
    if THOROUGH:
        wrong = start(
            "--num_gpus",
            "2",
            "--master_port",
            free_port(),
            out=tmp_path / "hosts" / "out",
        )
        (tmp_path / "hosts").write_text("in the way")
        [code], output, _ = end([wrong])
        assert code == 2
        assert "choose another folder" in output and "Traceback" not in output


# ---- pipelines ----


class Embedding(gpt.Embedding):
    """A GPT's first part, with embeddings of its own."""

    def __init__(self, vocabulary, context, width):
        tables = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        super().__init__(*tables, nn.Dropout(0.0))


class Head(nn.Sequential):
    """A GPT's last part, not tied to the embedding, which is on another rank."""

    def __init__(self, vocabulary, width):
        super().__init__(nn.LayerNorm(width), gpt.Head(width, vocabulary, bias=False))


def layers_of_gpt(vocabulary, context, layers, heads, width):
    """A GPT's parts, in order, as (class, its arguments ...): nothing is built yet."""
    first, last = (Embedding, vocabulary, context, width), (Head, vocabulary, width)
    return [first, *[(gpt.Block, width, heads, 0.0)] * layers, last]


SPECS = layers_of_gpt(**SHAPE)


def built(specs, first=0):
    """Layers of these (class, its arguments ...), seeded one by one as DeepSpeed does."""
    layers = []
    for number, (layer, *sizes) in enumerate(specs, first):
        torch.manual_seed(1234 + number)
        layers.append(layer(*sizes))
    return nn.Sequential(*layers)


def pipelines(micro_batches):
    """The losses of some steps, of DeepSpeed's pipeline with two ways to cut it."""
    with process_group():
        pieces = pieces_of(micro_batches)
        return {
            method: by_deepspeed(pieces, method) for method in ("parameters", "uniform")
        }


def seed_with_int(seed):
    torch.manual_seed(int(seed))


def by_deepspeed(pieces, method):
    deepspeed = lesson13.load_deepspeed(CPU)
    model = deepspeed.pipe.PipelineModule(
        [deepspeed.pipe.LayerSpec(*spec) for spec in SPECS],
        num_stages=dist.get_world_size(),
        loss_fn=token_loss,
        partition_method=method,
        seed_layers=True,
        # DeepSpeed's own fails for "parameters", whose numbers are NumPy's
        seed_fn=seed_with_int,
    )
    assert len(list(model.children())) < len(SPECS)  # each rank builds its own only
    sizes = dict(zip(BATCH, (2 * len(pieces), 2, len(pieces))))
    config = configuration(zero_optimization={"stage": 0}, **sizes)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    stream = iter(deepspeed.utils.RepeatingLoader(pieces))
    return [engine.train_batch(stream).item() for _ in range(STEPS)]


def pieces_of(micro_batches):
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(61, (micro_batches, 2, 2, 8), generator=generator)
    return [tuple(pair) for pair in numbers]


@pytest.mark.parametrize("stages", [2, 3])
def test_deepspeeds_pipeline_trains_as_the_model_in_one_piece(stages):
    model, expected, pieces = built(SPECS), [], pieces_of(4)
    optimizer = torch.optim.AdamW(model.parameters(), **six_ways.ADAM)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [token_loss(model(x), y) for x, y in pieces]
        loss = sum(losses) / 4
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    of_ranks = launch(pipelines, 4, nproc=stages, timeout=600)
    for kind in ("parameters", "uniform"):
        assert of_ranks[0][kind] == pytest.approx(expected, rel=1e-4), kind


def test_the_layers_together_are_the_network_but_for_the_tied_head():
    network, layers = GPT(**SHAPE), built(SPECS)
    for layer, part in zip(layers, network.parts(), strict=True):
        layer.load_state_dict(part.state_dict())
    tokens = torch.randint(61, (2, 8))
    torch.testing.assert_close(layers(tokens), network(tokens))


def test_stage_3_without_a_launcher_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    flags = ["--stage", "3", "--train-samples", "16", "--out", tmp_path]
    done = python("ddp_course/lesson13.py", *flags, timeout=600)
    assert done.returncode == 2
    line = "lesson13.py: stage 3 needs a launcher that numbers the ranks: torchrun"
    assert done.stderr.strip().splitlines()[-1].startswith(line)
