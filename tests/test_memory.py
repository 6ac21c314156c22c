"""What a rank keeps and sends, by formulas: those of two papers, and what is measured."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import COURSE, THOROUGH, python
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from ddp_course import lesson12
from ddp_course.estimates import memory, pipeline
from ddp_course.models import six_ways, tensor_parallel, zero
from ddp_course.models.gpt import GPT
from ddp_course.models.master_weights import MasterAdamW
from ddp_course.models.modern import ModernGPT
from ddp_course.models.recipe import loss_of
from ddp_course.models.recompute import recompute
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch, start_server

CPU = torch.device("cpu")
SHAPE = {"vocabulary": 256, "context": 64, "layers": 6, "heads": 4, "width": 128}
PARAMETERS = sum(value.numel() for value in GPT(**SHAPE).parameters())
BLOCK = sum(value.numel() for value in GPT(**SHAPE).blocks[0].parameters())


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server()


# ---- the papers ----


def gigabytes(stage, ranks=64, parameters=7.5e9, precision="master"):
    return sum(memory.states(parameters, ranks, stage, precision)) / 1e9


def test_the_zero_papers_figure_1_comes_out():
    """Figure 1: 7.5 billion parameters on 64 devices, 120, 31.4, 16.6 and 1.9 GB."""
    figure = [round(gigabytes(stage), 1) for stage in range(4)]
    assert figure == [120.0, 31.4, 16.6, 1.9]


def test_the_zero_papers_table_1_comes_out():
    """Table 1, in GB: for each number of devices, stages 1 to 3 of 7.5, 128 and 1000
    billion parameters.
    """
    table = {
        1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
        4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
        16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
        1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
    }
    for ranks, of_sizes in table.items():
        for parameters, printed in zip((7.5e9, 128e9, 1e12), of_sizes):
            for stage, value in zip((1, 2, 3), printed):
                calculated = gigabytes(stage, ranks, parameters)
                assert calculated == pytest.approx(value, rel=0.025), (ranks, stage)


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_with_fp32_weights_a_parameter_takes_16_bytes_and_the_stages_shard_them(
    ranks, precision
):
    got = [gigabytes(stage, ranks, 1e9, precision) for stage in range(4)]
    assert got == pytest.approx([16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks])


@pytest.mark.parametrize("precision", ["fp32", "autocast", "master"])
def test_stages_1_and_2_send_what_ddp_sends_and_stage_3_half_as_much_again(precision):
    sent = [memory.sent(1e9, 4, stage, precision) for stage in range(4)]
    gradient = memory.PRECISIONS[precision].gradient
    assert sent[0] == sent[1] == sent[2] == 2 * gradient * 1e9 * 3 / 4
    assert sent[3] == 1.5 * sent[0]
    assert all(memory.sent(1e9, 1, stage, precision) == 0 for stage in range(4))


def test_fsdps_policy_sends_what_ddp_does_in_fp32():
    """Twice the weights in bf16, once the gradients in fp32."""
    assert memory.sent(1e9, 4, 3, "policy") == memory.sent(1e9, 4, 0, "fp32")


def test_korthikantis_bytes_come_out_but_for_the_dropout_masks():
    """34 s b h + 5 a s² b bytes per layer in 16 bits, of which 2 s b h and 3 a s² b are
    dropout's: its masks, and what it makes of the softmax.
    """
    s, b, h, a = 2048, 4, 1024, 16
    assert memory.activations(b, s, h, 1, size=2) == (34 - 2) * s * b * h
    unfused = memory.activations(b, s, h, 1, heads=a, size=2)
    assert unfused == (34 - 2) * s * b * h + (5 - 3) * a * s * s * b


# ---- the three kinds of mixed precision, measured ----


def in_policy(network, device, as_one=False):
    """fully_shard as lesson 12 has it, and bf16 where weights are gathered."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (network,) if as_one else (*network.blocks, network):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return network, torch.optim.AdamW(network.parameters(), **six_ways.ADAM)


def with_master_weights(way, network, device):
    """One of lesson 12's ways, with a network and gradients in bf16."""
    model, *_ = way(network.bfloat16(), device)
    trained = [value for value in model.parameters() if value.requires_grad]
    return model, MasterAdamW(trained, **six_ways.ADAM)


def owners_of_master_weights(way, network, device):
    """The same where a rank owns whole parameters."""
    model, *_ = way(network.bfloat16(), device)
    options = MasterAdamW, six_ways.ADAM
    sharded = zero.ShardedOptimizer(network.parameters(), options[0], **options[1])
    return model, sharded


def zero2_with_master_weights(network, device):
    parameters, adam = network.bfloat16().parameters(), six_ways.ADAM
    optimizer = zero.ShardedOptimizer(parameters, MasterAdamW, **adam)
    zero.reduce_to_owners(optimizer.parameters, optimizer.owners)
    return network, optimizer


KINDS = {  # name: (precision, stage, how it is built)
    "autocast, DDP": ("autocast", 0, six_ways.ddp),
    "autocast, ZeRO-1": ("autocast", 1, six_ways.zero1),
    "autocast, ZeRO-2": ("autocast", 2, six_ways.zero2_by_hand),
    "autocast, FSDP": ("autocast", 3, six_ways.fsdp),
    "policy, FSDP": ("policy", 3, in_policy),
    "master, DDP": ("master", 0, partial(with_master_weights, six_ways.ddp)),
    "master, ZeRO-1": ("master", 1, partial(owners_of_master_weights, six_ways.ddp)),
    "master, ZeRO-2": ("master", 2, zero2_with_master_weights),
    "master, FSDP": ("master", 3, partial(with_master_weights, six_ways.fsdp)),
    "master, FSDP by hand": (
        "master",
        3,
        partial(with_master_weights, six_ways.fsdp_by_hand),
    ),
}


def from_new(build):
    return build(GPT(**SHAPE), CPU)


def observe_kinds():
    text = torch.zeros(1, 8, dtype=torch.long)

    def step(precision, model, optimizer):
        autocast = torch.bfloat16 if precision == "autocast" else torch.float32
        optimizer.zero_grad()
        loss_of(model, text, text, autocast, CPU).backward()
        optimizer.step()

    with process_group():
        return {
            name: watch.observe(
                partial(from_new, build), partial(step, precision), PARAMETERS
            )
            for name, (precision, _, build) in KINDS.items()
        }


def test_what_each_kind_of_mixed_precision_keeps_and_sends_is_what_the_formulas_say():
    n = 4 if THOROUGH else 2
    of_ranks = launch(observe_kinds, nproc=n, timeout=600)
    for name, (precision, stage, _) in KINDS.items():
        expected = memory.states(1, n, stage, precision)
        largest = max((of_rank[name] for of_rank in of_ranks), key=sum_kept)
        assert list(largest.kept.values()) == pytest.approx(list(expected), rel=0.03)
        assert largest.in_use[-1] == pytest.approx(sum(expected), rel=0.03), name
        sent = watch.sent_in_a_ring(largest.shared, n)
        if stage == 1:  # on top of DDP's all-reduce, weights are sent once more
            sent -= memory.PRECISIONS[precision].gradient * (n - 1) / n
        # the outermost part, 3 % of the weights, is gathered once and not twice
        assert sent == pytest.approx(memory.sent(1, n, stage, precision), rel=0.03)


def sum_kept(observed):
    return sum(observed.kept.values())


def test_a_master_weight_adds_up_updates_that_16_bits_lose():
    ones = torch.ones(4, dtype=torch.bfloat16)
    weights = {kind: torch.nn.Parameter(ones.clone()) for kind in ("master", "none")}
    options = {"lr": 1e-3, "weight_decay": 0.0}
    optimizers = [
        MasterAdamW([weights["master"]], **options),
        torch.optim.AdamW([weights["none"]], **options),
    ]
    for _ in range(20):
        for weight, optimizer in zip(weights.values(), optimizers):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    assert weights["none"].tolist() == [1.0] * 4  # 1 - 0.001 rounds to 1
    assert weights["master"].float().tolist() == pytest.approx([0.98] * 4, rel=0.005)


# ---- the peak of fully_shard, and activations, measured ----


def fsdp_as_one(network, device):
    fully_shard(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return network, torch.optim.AdamW(network.parameters(), **six_ways.ADAM)


def observe_peaks():
    text = torch.zeros(1, 8, dtype=torch.long)

    def step(model, optimizer):
        lesson12.train_one_epoch(model, [(text, text)], optimizer, CPU)

    with process_group():
        return [
            max(watch.observe(partial(from_new, way), step).in_use)
            for way in (
                *(six_ways.fsdp, fsdp_as_one),
                *(in_policy, partial(in_policy, as_one=True)),
            )
        ]


@pytest.mark.parametrize("n", [2, 4, 8] if THOROUGH else [4])
def test_the_peak_of_fully_shard_is_the_formulas(n):
    rest = PARAMETERS - SHAPE["layers"] * BLOCK
    by_block = memory.fsdp_peak(BLOCK, rest, SHAPE["layers"], n)
    as_one = memory.fsdp_peak(0, PARAMETERS, 0, n)
    assert as_one == PARAMETERS * (12 / n + 8)
    policy = memory.fsdp_peak(BLOCK, rest, SHAPE["layers"], n, "policy")
    policy_as_one = memory.fsdp_peak(0, PARAMETERS, 0, n, "policy")
    assert policy_as_one == PARAMETERS * (12 / n + 6)
    expected = [by_block, as_one, policy, policy_as_one]
    for peaks in launch(observe_peaks, nproc=n, timeout=600):
        assert peaks == pytest.approx(expected, rel=0.04)


def kept_by_forward(layers, batch, tokens):
    """The bytes that are in use after forward and were not before it."""
    model = GPT(**SHAPE | {"layers": layers, "context": tokens})
    text = torch.zeros(batch, tokens, dtype=torch.long)
    with watch.memory_timeline() as timeline:
        output = model(text)
    return timeline[-1] - output.nbytes


def kept_by_a_layer(batch, tokens):
    return kept_by_forward(5, batch, tokens) - kept_by_forward(4, batch, tokens)


@pytest.mark.parametrize("batch, tokens", [(1, 64), (4, 64), (4, 256)])
def test_what_a_layer_keeps_of_its_activations_is_the_formulas(batch, tokens):
    expected = memory.activations(batch, tokens, 128, 1)
    assert kept_by_a_layer(batch, tokens) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("tokens", [64, 256])
def test_attention_that_is_not_fused_keeps_a_number_per_pair_of_tokens_too(tokens):
    with sdpa_kernel(SDPBackend.MATH):
        kept = kept_by_a_layer(4, tokens)
    expected = memory.activations(4, tokens, 128, 1, heads=4)
    assert kept == pytest.approx(expected, rel=0.01)


def again(block, x):
    return checkpoint(block, x, use_reentrant=False)


def operations(recomputed):
    """The floating-point operations of a forward and a backward."""
    model = GPT(**SHAPE)
    if recomputed:
        for block in model.blocks:
            block.forward = partial(again, block.forward)
    text = torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        loss_of(model, text, text, torch.float32, CPU).backward()
    return counted.get_total_flops()


def test_recomputing_every_block_is_less_than_a_third_more_work():
    more = operations(True) / operations(False)
    assert more == pytest.approx(1.22, abs=0.01)
    with set_checkpoint_early_stop(False):
        assert more < operations(True) / operations(False) < 4 / 3


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_takes_12_bytes_per_token_and_entry_of_the_vocabulary(precision):
    model, text = GPT(8192, 64, 0, 1, 8), torch.zeros(8, 64, dtype=torch.long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with watch.memory_timeline() as timeline:
        loss_of(model, text, text, precision, CPU).backward()
    assert max(timeline) / (512 * 8192) == pytest.approx(12, rel=0.01)


# ---- on a mesh ----

CUT = {  # 61 tokens, which two ranks cannot halve
    "vocabulary": 61,
    "context": 16,
    "layers": 4,
    "heads": 2,
    "width": 32,
}
CUT_BY = {
    "attention.query_key_value": ColwiseParallel(),
    "attention.output": RowwiseParallel(),
    "mlp.expand": ColwiseParallel(),
    "mlp.contract": RowwiseParallel(),
}


def elements_of(stage):
    """Of the parameters that this rank has of a stage's parts, tied ones once."""
    whole = {value for part in stage for value in part.parameters()}
    own = (value.to_local() if isinstance(value, DTensor) else value for value in whole)
    return sum(value.numel() for value in own)


def elements_by_stage(model):
    """{number of stages: the elements that this rank has of each}."""
    parts = model.parts()
    halves = parts[:3], parts[3:]
    return {1: [elements_of(parts)], 2: [elements_of(half) for half in halves]}


def cut_by_torch():
    with process_group():
        mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), GPT(**CUT)
        parallelize_module(model, mesh, {"token_embedding": RowwiseParallel()})
        model.head.weight = model.token_embedding.weight
        for block in model.blocks:
            parallelize_module(block, mesh, CUT_BY)
        return elements_by_stage(model)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_parameters_on_a_mesh_are_those_that_torch_leaves_on_a_rank(tensor):
    if tensor == 1:
        of_ranks = [elements_by_stage(GPT(**CUT))]
    else:
        of_ranks = launch(cut_by_torch, nproc=tensor)
    for stages in (1, 2):
        mesh = memory.Mesh(data=3, tensor=tensor, pipeline=stages, context=5)
        largest = [max(sizes) for sizes in zip(*(own[stages] for own in of_ranks))]
        assert memory.parameters_on(mesh, **CUT) == largest


def test_on_a_mesh_of_data_ranks_the_formulas_are_zeros():
    parameters = sum(value.numel() for value in GPT(**CUT).parameters())
    for stage in range(4):
        for n in (1, 3):
            got = memory.states_on(memory.Mesh(data=n), CUT, stage, "master")
            assert got == memory.states(parameters, n, stage, "master")
    mesh = memory.Mesh(data=4, tensor=2, pipeline=2)
    largest = max(memory.parameters_on(mesh, **CUT))
    assert memory.states_on(mesh, CUT, 3) == memory.states(largest, 4, 3)


def cut_in_parts(block, width, tensor):
    """Give a block one of `tensor` parts of its matrices."""
    block.attention.query_key_value = nn.Linear(width, 3 * width // tensor)
    block.attention.output = nn.Linear(width // tensor, width)
    block.mlp.expand = nn.Linear(width, 4 * width // tensor)
    block.mlp.contract = nn.Linear(4 * width // tensor, width)


def kept_by_a_tensor_rank(layers, tensor):
    """As kept_by_forward, where each block has one of `tensor` parts of its matrices."""
    model = GPT(**SHAPE | {"layers": layers})
    width = SHAPE["width"]
    for block in model.blocks:
        cut_in_parts(block, width, tensor)
    text = torch.zeros(4, 64, dtype=torch.long)
    with watch.memory_timeline() as timeline:
        output = model(text)
    return timeline[-1] - output.nbytes


@pytest.mark.parametrize("tensor, fused", [(2, True), (4, True), (2, False)])
def test_what_a_tensor_rank_keeps_of_its_activations_is_the_formulas(tensor, fused):
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        kept = kept_by_a_tensor_rank(5, tensor) - kept_by_a_tensor_rank(4, tensor)
    heads = 0 if fused else SHAPE["heads"]
    mesh = memory.Mesh(tensor=tensor)
    expected = memory.activations_on(mesh, 4, 64, 128, 1, heads=heads)
    assert kept == pytest.approx(expected, rel=0.01)


def kept_in(dtype, layers, autocast):
    model = GPT(**SHAPE | {"layers": layers}).to(dtype)
    text = torch.zeros(4, 64, dtype=torch.long)
    with autocast, watch.memory_timeline() as timeline:
        output = model(text)
    return timeline[-1] - output.nbytes


@pytest.mark.parametrize("precision", ["fp32", "autocast", "master"])
def test_what_a_layer_keeps_in_each_precision_is_the_formulas(precision):
    """Autocast keeps its copies of matrices and of their biases, too: in 16 bits."""
    casts, sizes = precision == "autocast", memory.OF_ACTIVATIONS[precision]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=casts)
    dtype = torch.bfloat16 if precision == "master" else torch.float32
    kept = kept_in(dtype, 5, autocast) - kept_in(dtype, 4, autocast)
    copies = 2 * (12 * 128**2 + 9 * 128) if casts else 0
    expected = memory.activations_on(memory.Mesh(), 4, 64, 128, 1, **sizes)
    assert kept - copies == pytest.approx(expected, rel=0.01)


def left_by_forward():
    """Bytes that are in use after forward, and were not before it."""
    text, left = torch.zeros(1, 8, dtype=torch.long), {}
    with process_group():
        for name, (precision, _, build) in KINDS.items():
            if precision == "master":
                continue
            casts = torch.bfloat16 if precision == "autocast" else torch.float32
            with watch.memory_timeline() as timeline:
                model, optimizer, *_ = from_new(build)
                loss_of(model, text, text, casts, CPU).backward()
                optimizer.step()
                before = len(timeline)
                loss = loss_of(model, text, text, casts, CPU)
            left[name] = timeline[-1] - timeline[before]
            del loss
    return left


def test_autocast_keeps_a_copy_of_all_weights_on_each_rank_in_each_stage():
    """What `policy` keeps is half of what is gathered still: a block, and the rest."""
    left = launch(left_by_forward)[0]
    copies = memory.copies(PARAMETERS, "autocast")
    of_stream = 2 * 8 * 128 * 2 * SHAPE["layers"]  # the norms' inputs, in fp32
    for name in ("autocast, DDP", "autocast, ZeRO-1", "autocast, ZeRO-2"):
        kept = memory.activations(1, 8, 128, SHAPE["layers"], size=2) + of_stream
        assert left[name] == pytest.approx(copies + kept, rel=0.04), name
    rest = PARAMETERS - SHAPE["layers"] * BLOCK
    gathered = 2 * (BLOCK + rest)
    more = left["autocast, FSDP"] - left["policy, FSDP"]
    assert more == pytest.approx(copies + gathered + of_stream, rel=0.04)


def test_each_forward_pass_that_waits_for_its_backward_has_copies_of_its_own():
    network, text, kept = GPT(**SHAPE), torch.zeros(1, 8, dtype=torch.long), [0]
    outputs = []
    with watch.memory_timeline() as timeline:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(network(text))
            kept.append(timeline[-1])
    for before, after in zip(kept, kept[1:]):
        assert (after - before) / PARAMETERS == pytest.approx(2.16, abs=0.03)


# ---- tensor ranks and pipeline stages, measured on 2 x 2 ranks ----


def run_1f1b(blocks, stage, how, micro_batches=4, width=128):
    """Train a step as one stage of two; the most bytes in use after a forward pass."""
    peer = dist.get_rank() + (2 if stage == 0 else -2)
    shape = (4, 64 // (1 if how == "tensor" else 2), width)
    flying, works, most = [], [], 0

    def forward():
        x = torch.randn(shape)
        if stage == 1:
            dist.recv(x, peer)
        y = x.requires_grad_()
        for block in blocks:
            y = block(y)
        flying.append((x, y))
        if stage == 0:
            works.append((y.detach(), dist.isend(y.detach(), peer)))

    def backward():
        x, y = flying.pop(0)
        gradient = torch.ones(shape)
        if stage == 0:
            dist.recv(gradient, peer)
        y.backward(gradient)
        if stage == 1:
            works.append((x.grad, dist.isend(x.grad, peer)))

    first = 1 - stage
    order = "F" * first + "FB" * (micro_batches - first) + "B" * first
    with watch.memory_timeline() as timeline:
        for action in order:
            forward() if action == "F" else backward()
            most = max(most, timeline[-1]) if action == "F" else most
    for _, work in works:
        work.wait()
    return most


def kept_on_2_by_2():
    found = {}
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
        for how in ("tensor", "sequence", "again"):
            kept = []
            for layers in (1, 2):
                network = GPT(**SHAPE | {"layers": layers})
                group, sequence = mesh.get_group("tensor"), how != "tensor"
                network = tensor_parallel.cut(network, group, sequence)
                if how == "again":
                    tensor_parallel.gather_again(network)
                for parameter in network.blocks.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                stage = mesh.get_local_rank("pipeline")
                # twice: on a busy machine, gloo's threads let go of a message late
                runs = [run_1f1b(network.blocks, stage, how) for _ in range(2)]
                kept.append(min(runs))
            found[how] = kept[1] - kept[0]
    return found


def test_tensor_and_sequence_ranks_of_a_1f1b_pipeline_keep_what_the_formulas_say():
    """Measured on live storages: what one layer more keeps on each of the four ranks."""
    mesh = memory.Mesh(tensor=2, pipeline=2)
    for rank, kept in enumerate(launch(kept_on_2_by_2, nproc=4)):
        for how, size in kept.items():
            expected = memory.activations_on(
                *(mesh, 4, 64, 128, 2),
                in_flight=memory.in_flight_with_1f1b(2, rank // 2, 4),
                sequence=how != "tensor",
                again=how == "again",
            )
            assert size == pytest.approx(expected, rel=0.01), (rank, how)


def test_korthikantis_equation_4_comes_out_but_for_the_dropout_masks():
    s, b, h, a, t = 2048, 4, 1024, 16, 8
    options = {"heads": a, "size": 2, "sequence": True, "again": True}
    layer = memory.activations_on(memory.Mesh(tensor=t), b, s, h, 1, **options)
    assert layer == ((34 - 2) * s * b * h + (5 - 3) * a * s * s * b) / t


def test_korthikantis_equation_2_comes_out_but_for_the_dropout_masks():
    s, b, h, a, t = 2048, 4, 1024, 16, 8
    mesh = memory.Mesh(data=3, tensor=t)
    layer = memory.activations_on(mesh, b, s, h, 1, heads=a, size=2)
    assert layer == s * b * h * (10 - 2 + 24 / t) + (5 - 3) * a * s * s * b / t


def test_the_first_stage_of_1f1b_keeps_as_much_as_the_model_in_one_piece():
    """Korthikanti et al., section 4.2.3: p micro-batches of 1 / p of the layers."""
    kept = [memory.in_flight_with_1f1b(4, stage, 8) for stage in range(4)]
    assert kept == [4, 3, 2, 1]
    scheduled = pipeline.schedule("1F1B", 4, 8)
    assert kept == [pipeline.kept_at_most(spans) for spans in scheduled]
    whole = memory.activations(2, 64, 128, 8)
    by_stage = [
        memory.activations_on(memory.Mesh(pipeline=4), 2, 64, 128, 8, in_flight=count)
        for count in kept
    ]
    assert by_stage == [whole, 3 / 4 * whole, 2 / 4 * whole, 1 / 4 * whole]


def test_context_ranks_keep_the_activations_of_their_own_tokens():
    mesh, own = memory.Mesh(context=4), memory.activations(2, 64, 128, 6)
    assert memory.activations_on(mesh, 2, 256, 128, 6) == own


@pytest.mark.parametrize(
    "asked, said",
    [
        (lambda: memory.Mesh(tensor=0), "1 rank or more"),
        (lambda: memory.states_on(memory.Mesh(expert=2), CUT, 0), "2 expert ranks"),
        (lambda: memory.activations_on(memory.Mesh(expert=4), 1, 8, 8, 1), "4 expert"),
        (lambda: memory.parameters_on(memory.Mesh(tensor=4), **CUT), "2 heads cannot"),
        (lambda: memory.parameters_on(memory.Mesh(pipeline=3), **CUT), "4 layers"),
        (lambda: memory.activations_on(memory.Mesh(context=3), 1, 8, 8, 1), "8 tokens"),
        (
            lambda: memory.activations_on(
                memory.Mesh(tensor=4), 1, 6, 8, 1, sequence=True
            ),
            "6 tokens cannot be cut into 4 equal parts",
        ),
        (
            lambda: memory.activations_on(memory.Mesh(context=2), 1, 8, 8, 1, heads=2),
            "fused attention",
        ),
    ],
)
def test_what_has_no_proven_formula_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        asked()


# ---- the command ----


def course(*arguments):
    return python(
        "-m",
        "ddp_course.cli.command",
        "memory",
        *arguments,
        env=os.environ | {"COLUMNS": "80"},
        cwd=COURSE,
    )


def column(output, place):
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [line.split("│")[place].strip() for line in lines]


@pytest.mark.parametrize(
    "precision, sums, sent",
    [
        ([], ["135", "75.9", "46.4", "16.9"], ["59.1", "59.1", "59.1", "88.6"]),
        (["fp32"], ["120", "60.9", "31.4", "1.88"], ["59.1", "59.1", "59.1", "88.6"]),
        (["master"], ["120", "31.4", "16.6", "1.88"], ["29.5", "29.5", "29.5", "44.3"]),
        (["policy"], ["1.88"], ["59.1"]),
    ],
)
def test_the_command_prints_the_table_of_each_precision(precision, sums, sent):
    flags = ["--precision", *precision] if precision else []
    done = course("--params", "7.5e9", "--ranks", "64", *flags)
    assert done.returncode == 0, done.stderr
    name = (precision or ["autocast"])[0]
    place = 6 if name == "autocast" else 5  # after the column of its copies
    found = column(done.stdout, place), column(done.stdout, place + 1)
    assert found == (sums, sent)
    assert f"Precision: {memory.PRECISIONS[name].words}." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


GPT3 = "--layers 96 --width 12288 --heads 96 --vocabulary 51200 --tokens 2048"


def test_the_command_prints_what_a_rank_of_a_mesh_keeps():
    """GPT-3 on 1024 GPUs: what is on the first of 8 stages, with 8 tensor ranks."""
    mesh = "--ranks 1024 --tensor 8 --pipeline 8 --precision master"
    found = {}
    for how in ("", "--sequence", "--sequence --gather-again"):
        done = course(*GPT3.split(), *mesh.split(), *how.split())
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "Ranks: 16 data x 8 tensor x 8 pipeline." in done.stdout
        found[how] = column(done.stdout, 5)[0], column(done.stdout, 6)
    parameters = 12 * (12 * 12288**2 + 7 * 12288) // 8 + 12 * 6 * 12288
    parameters += (51200 // 8 + 2048) * 12288
    assert f"holds {parameters:,} parameters" in done.stdout
    per_layer = 8 * 2048 * 12288 * 2 * 12 / 1e9  # a unit of 8 micro-batches, 12 layers
    for (kept, sums), units in zip(found.values(), (4 + 12 / 8, 2 + 14 / 8, 16 / 8)):
        assert float(kept) == pytest.approx(units * per_layer, rel=0.005)
        assert float(sums[0]) == pytest.approx(
            16 * parameters / 1e9 + float(kept), rel=0.005
        )


def test_the_command_counts_autocasts_copies_for_each_micro_batch_in_flight():
    """The first of 8 stages keeps 8 of them, if an update has as many."""
    for more, in_flight in ([], 8), (["--micro-batches", "2"], 2):
        done = course(*GPT3.split(), "--ranks", "64", "--pipeline", "8", *more)
        assert max(map(len, done.stdout.splitlines())) <= 80
        rows = [column(done.stdout, place) for place in range(2, 8)]
        *parts, sums = [list(map(float, row)) for row in rows]
        weights, *_, copies, _ = parts
        for stage, total in enumerate(sums):  # in fp32, weights are 4 bytes
            assert copies[stage] == pytest.approx(in_flight * weights[0] / 2, rel=0.01)
            each = sum(part[stage] for part in parts)
            assert total == pytest.approx(each, rel=0.01)


def test_the_command_imports_no_torch():
    code = "import sys, ddp_course.estimates.memory; print('torch' in sys.modules)"
    assert python("-c", code, cwd=COURSE).stdout == "False\n"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--params", "many", "--ranks", "4"],
            "--params many is not a whole number from 1",
        ),
        (["--params", "7e9", "--ranks", "0"], "--ranks 0 is not a whole number from 1"),
        (
            ["--params", "inf", "--ranks", "1"],
            "--params inf is not a whole number from 1",
        ),
        (
            ["--params", "nan", "--ranks", "1"],
            "--params nan is not a whole number from 1",
        ),
        (["--ranks", "4"], "give --params, or all of --layers, --width and --heads"),
        (
            ["--params", "7e9", "--ranks", "4", "--tensor", "2"],
            "for tensor ranks and pipeline stages, give --layers, --width and --heads in "
            "place of --params",
        ),
        (
            [*GPT3.split(), "--ranks", "6", "--tensor", "4"],
            "6 ranks cannot be cut into 4 equal parts",
        ),
        (
            [*GPT3.split(), "--ranks", "5", "--pipeline", "5"],
            "96 layers cannot be cut into 5 equal parts",
        ),
        (
            [*GPT3.split(), "--ranks", "4", "--sequence"],
            "--sequence needs tensor ranks: --tensor 2 or more",
        ),
        (
            ["--params", "7e9", "--ranks", "2", "--precision", "mixed"],
            "--precision mixed is none of fp32, autocast, policy, master",
        ),
    ],
)
def test_wrong_use_gives_one_line_and_exit_code_2(arguments, said):
    done = course(*arguments)
    assert done.returncode == 2 and done.stderr == f"ddp-course: {said}\n"


# ---- the plan on paper ----

MODEL = {"vocabulary": 4096, "context": 256, "layers": 8, "heads": 8, "width": 256}
AS_PLANNED = memory.Llama(
    layers=8, width=256, inner=704, keys=128, vocabulary=4096, tied=True
)


def modern(what, chunked):
    model = ModernGPT(**MODEL)
    model.head.chunked = chunked
    for block in model.blocks:
        recompute(block, what)
    return model


def test_the_parameters_of_a_plan_are_those_of_the_model():
    parameters = sum(value.numel() for value in modern("none", False).parameters())
    assert AS_PLANNED.parameters() == parameters
    assert memory.LLAMA_3_8B.parameters() == 8_030_261_248  # as its model card says


def kept_by_blocks(what, number):
    """Bytes that this many blocks keep of 128 tokens, and what there is besides."""
    model = modern(what, False)
    x = model.embed(torch.zeros(2, 64, dtype=torch.long), 0)
    with watch.memory_timeline() as timeline:
        for block in model.blocks[:number]:
            x = block(x)
    return timeline[-1]


@pytest.mark.parametrize("what, more", [("none", 2), ("selective", 0), ("full", 0)])
def test_a_block_of_todays_model_keeps_what_the_plan_says(what, more):
    """In fp32 on a CPU, the two norms keep two rows of `width` more."""
    kept = (kept_by_blocks(what, 4) - kept_by_blocks(what, 1)) / 3
    expected = memory.kept_by_block(AS_PLANNED, 128, what, size=4)
    assert kept == pytest.approx(expected + 4 * 128 * 256 * more, rel=0.02)


def peaks(choices):
    """The highest moment of a step for each way, in bytes."""
    found = {}
    with process_group():
        text = torch.zeros(4, 256, dtype=torch.long)

        def build(model):
            policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
            return six_ways.fsdp(model(), CPU, policies=policy)

        def step(model, optimizer):
            optimizer.zero_grad()
            for _ in range(2):  # the second finds the first one's gradients
                loss_of(model, text, text, torch.float32, CPU).backward()
            optimizer.step()

        for choice in choices:
            model = partial(modern, *choice)
            seen = watch.observe(partial(build, model), step, 1)
            found[choice] = max(seen.in_use)
    return found


def test_the_peak_of_a_step_is_the_plans_within_six_percent():
    """Each of the plan's parts is more than that of one of the two."""
    new = hasattr(nn, "LinearCrossEntropyOptions")  # torch 2.15
    choices = [("selective", False), ("full", new)]
    for (what, part), peak in launch(peaks, choices, timeout=600)[0].items():
        expected = sum(memory.plan(AS_PLANNED, 2, 4 * 256, what, part))
        assert peak == pytest.approx(expected, rel=0.06), (what, part)
