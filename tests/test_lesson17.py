"""Tensor parallel: a GPT that is cut inside its layers, by hand and by torch, equals one
process; what it sends and keeps is what the formulas say; mistakes are found.
"""

import json
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_course import UsageError, lesson10, lesson17
from ddp_course.estimates import memory
from ddp_course.models import dtensors, tensor_parallel
from ddp_course.models.gpt import GPT
from ddp_course.models.recipe import parameter_groups
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch, start_server
from ddp_course.ranks.links import Link, Network
from ddp_course.ranks.pretend_network import ends_of, network_of_environment

# a vocabulary that 3 and 4 ranks do not divide; heads and tokens that they do
SHAPE = {"vocabulary": 50, "context": 24, "layers": 2, "heads": 12, "width": 48}
FOR_TORCH = SHAPE | {
    "vocabulary": 384
}  # a multiple of 128, so the head needs no padding
BATCH = 4


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server()


def a_gpt(shape):
    """In 64 bits, and no parameter is 0 or 1, which would hide what is done with it."""
    torch.manual_seed(0)
    network = GPT(**shape).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


def texts(shape, steps=1):
    generator = torch.Generator().manual_seed(1)
    sizes = steps, 2, BATCH, shape["context"]
    return torch.randint(shape["vocabulary"], sizes, generator=generator)


def in_one_process(shape):
    [(tokens, targets)] = texts(shape)
    network = a_gpt(shape)
    logits = network(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: value.grad for name, value in network.named_parameters()}
    return logits.detach(), loss.item(), gradients


def distance(found, right):
    """The largest difference, of the largest number."""
    return (found - right).abs().max().item() / right.abs().max().item()


# ---- by hand ----


def differences(sequence=False, fault=None, sums=True, weights=a_gpt):
    """How far loss, logits and gradients are from one process's, {name: relative}."""
    with process_group():
        logits, loss, gradients = in_one_process(SHAPE)
        network = tensor_parallel.cut(weights(SHAPE), sequence=sequence)
        if fault:
            fault(network)
        [(tokens, targets)] = texts(SHAPE)
        found = network(tokens, targets)
        (3 * found).backward()  # a loss that is scaled, too
        if sequence and sums:
            tensor_parallel.sum_gradients(network)
        off = {"loss": abs(found.item() / loss - 1)}
        off["logits"] = distance(network(tokens).detach(), logits)
        for name, value in network.named_parameters():
            whole = tensor_parallel.whole(value, value=value.grad)
            off[name] = distance(whole, 3 * gradients[name])
        return off


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_logits_loss_and_all_gradients_equal_one_process(ranks, sequence):
    for off in launch(differences, sequence, nproc=ranks):
        assert len(off) == 30 and max(off.values()) < 1e-12


def bias_before_the_sum(network):
    for block in network.blocks:
        for layer in (block.attention.output, block.mlp.contract):
            layer.forward = lambda x, layer=layer: layer.leave(
                F.linear(x, layer.weight, layer.bias)
            )


def no_sum_in_backward(network):
    for block in network.blocks:
        block.attention.query_key_value.enter = lambda x: x


def neighbouring_rows(network):
    """As if the fused layer's rows were cut one after the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer, whole = network.blocks[0].attention.query_key_value, a_gpt(SHAPE)
    fused = whole.blocks[0].attention.query_key_value
    rows = torch.arange(3 * SHAPE["width"]).chunk(ranks)[rank]
    layer.weight = tensor_parallel.own_part(fused.weight, 0, rows)
    layer.bias = tensor_parallel.own_part(fused.bias, 0, rows)


def own_tokens_not_zero(network):
    """Each rank looks up a vector for tokens that it does not have, too."""
    embedding = network.token_embedding

    def forward(tokens):
        numbers, _ = tensor_parallel.own_numbers(tokens, embedding.weight.cut[1])
        return embedding.leave(F.embedding(numbers, embedding.weight))

    embedding.forward = forward


def recorded_all_reduce(network):
    """torch's differentiable all_reduce, which sums in backward as well."""
    warnings.simplefilter("ignore", FutureWarning)
    for block in network.blocks:
        block.mlp.contract.leave = all_reduce


@pytest.mark.parametrize(
    "fault",
    [
        bias_before_the_sum,
        no_sum_in_backward,
        neighbouring_rows,
        own_tokens_not_zero,
        recorded_all_reduce,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found_by_the_comparison_though_nothing_raises(fault):
    off = launch(partial(differences, fault=fault), nproc=2)[0]
    assert max(off.values()) > 0.01


def test_without_the_sums_of_sequence_parallel_only_gradients_are_wrong():
    off = launch(partial(differences, True, sums=False), nproc=2)[0]
    assert off["loss"] < 1e-12 and off["logits"] < 1e-12
    wrong = {name for name, value in off.items() if value > 0.01}
    whole = ("norm", "position", "output.bias", "contract.bias")
    expected = {name for name in off if any(part in name for part in whole)}
    assert wrong == expected and len(wrong) == 15


def a_fresh_gpt(shape):
    torch.manual_seed(0)
    return GPT(**shape).double()


def biases_of_fresh_parameters():
    """How far a fresh GPT's loss is from that of one whose biases are added n times."""
    with process_group():
        [(tokens, targets)] = texts(SHAPE)
        losses = []
        for fault in (None, bias_before_the_sum):
            network = tensor_parallel.cut(a_fresh_gpt(SHAPE))
            if fault:
                fault(network)
            losses.append(network(tokens, targets).item())
        return losses


def test_fresh_biases_hide_that_they_are_added_n_times():
    right, wrong = launch(biases_of_fresh_parameters, nproc=2)[0]
    assert right == wrong


def sent(sequence, again=False):
    with process_group():
        network = tensor_parallel.cut(a_gpt(SHAPE), sequence=sequence)
        if again:
            tensor_parallel.gather_again(network)
        [(tokens, targets)] = texts(SHAPE)
        step = lambda: network(tokens, targets).backward()
        return watch.count_collectives(step), watch.count_bytes(step)


ACTIVATIONS = 8 * BATCH * SHAPE["context"] * SHAPE["width"]
OF_THE_LOSS = 3 * 8 * BATCH * SHAPE["context"]
PAIR = "allgather", "reduce_scatter"  # of sequence parallelism


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_of_a_step_are_the_formulas(ranks):
    passages = 4 * SHAPE["layers"] + 2
    calls, shared = launch(sent, False, nproc=ranks)[0]
    assert calls == {"allreduce": passages + 3}
    assert shared == {"allreduce": passages * ACTIVATIONS + OF_THE_LOSS}
    calls, shared = launch(sent, True, nproc=ranks)[0]
    assert calls == {"allgather": passages, "reduce_scatter": passages, "allreduce": 3}
    assert shared["allgather"] == shared["reduce_scatter"] == passages * ACTIVATIONS
    assert shared["allreduce"] == OF_THE_LOSS
    calls, _ = launch(sent, True, True, nproc=ranks)[0]
    assert calls["allgather"] == passages + 2 * SHAPE["layers"]
    assert calls["reduce_scatter"] == passages


def kept_by_a_block(sequence, again):
    """Bytes that forward leaves for backward in a block, on live storages."""
    kept, shape = [], SHAPE | {"vocabulary": 48}
    with process_group():
        for layers in (1, 3):
            network = GPT(**shape | {"layers": layers})
            network = tensor_parallel.cut(network, sequence=sequence)
            if again:
                tensor_parallel.gather_again(network)
            [(tokens, targets)] = texts(shape)
            with watch.memory_timeline() as timeline:
                loss = network(tokens, targets)
            kept.append(timeline[-1])
            loss.backward()
    return (kept[1] - kept[0]) / 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_block_keeps_is_korthikantis_formula(ranks):
    tokens, width, heads = BATCH * SHAPE["context"], SHAPE["width"], SHAPE["heads"]
    unit = 4 * tokens * width
    of_norms, of_heads = 4 * 4 * tokens, 4 * tokens * heads / ranks  # logsumexp
    for sequence, again, formula in (
        (False, False, unit * (4 + 12 / ranks) + of_norms),
        (True, False, unit * (2 / ranks + 2 + 12 / ranks) + of_norms / ranks),
        (True, True, unit * 16 / ranks + of_norms / ranks),
    ):
        kept = launch(kept_by_a_block, sequence, again, nproc=ranks)[0]
        assert kept == formula + of_heads


# ---- updates ----


def updates(make, sizes, number=4):
    """The losses of some updates, the norms before clipping, and the parameters.

    make: of lesson17.LAYERS. Data ranks have other texts.
    """
    with process_group():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallel = make(a_gpt(FOR_TORCH), mesh)
        groups = parameter_groups(parallel.network, weight_decay=0.1)
        optimizer, losses, norms = torch.optim.AdamW(groups, lr=1e-2), [], []
        for tokens, targets in texts(FOR_TORCH, number):
            mine = mesh.get_local_rank("data")
            tokens, targets = (part.chunk(sizes[0])[mine] for part in (tokens, targets))
            optimizer.zero_grad()
            loss = parallel.loss(tokens, targets)
            parallel.backward(loss)
            norms.append(parallel.clip(0.5).item())
            optimizer.step()
            total = dtensors.full(loss.detach()).clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses, norms, parallel.whole_parameters()


WAYS = {
    "hand": partial(lesson17.ByHand, sequence=False),
    "hand, sequence": partial(lesson17.ByHand, sequence=True),
    "torch, sequence": partial(lesson17.WithTorch, sequence=True),
}


@pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_updates_with_adamw_and_clipping_equal_one_process(way, sizes):
    alone = partial(updates, WAYS["hand"], (1, 1))
    losses, norms, parameters = launch(alone, nproc=1)[0]
    assert min(norms) > 0.5  # each update is clipped
    job = partial(updates, WAYS[way], sizes)
    for found, found_norms, whole in launch(job, nproc=sizes[0] * sizes[1]):
        assert found == pytest.approx(losses, rel=1e-12)
        assert found_norms == pytest.approx(norms, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-9)


def kinds_of_gradients(add_up):
    """Where sequence parallelism leaves the gradients of norms: their placements."""
    with process_group():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        parallel = lesson17.WithTorch(a_gpt(FOR_TORCH), mesh, sequence=True)
        if not add_up:
            lesson17.dtensors.sum_gradients = lambda network: None
        tokens, targets = texts(FOR_TORCH, 1)[0]
        parallel.backward(parallel.loss(tokens, targets))
        values = parallel.network.parameters()
        return {str(value.grad.placements) for value in values}


def test_the_programs_gradients_are_added_up_before_they_are_clipped():
    """torch 2.11 does not clip those of which each rank has a part."""
    assert not any("Partial" in kind for kind in launch(kinds_of_gradients, True)[0])
    assert any("Partial" in kind for kind in launch(kinds_of_gradients, False)[0])


def norms_three_ways():
    with process_group():
        *_, gradients = in_one_process(SHAPE)
        network = tensor_parallel.cut(a_gpt(SHAPE))
        network(*texts(SHAPE)[0]).backward()
        own = sum(value.grad.square().sum() for value in network.parameters())
        added = tensor_parallel.summed(own, None)
        one = nn.utils.get_total_norm(gradients.values())
        clipped = tensor_parallel.clip_gradients(network, 1e-3)
        return [value.item() for value in (one, clipped, own.sqrt(), added.sqrt())]


def test_the_norm_counts_each_gradient_once():
    """Of a rank's own, it would be too small; with all added up, too large."""
    of_ranks = launch(norms_three_ways, nproc=3)
    for one, clipped, own, added in of_ranks:
        assert clipped == pytest.approx(one, rel=1e-12)
        assert own < 0.99 * one and added > 1.01 * one


def norm_with_frozen_parameters():
    with process_group():
        found = []
        for network in (a_gpt(SHAPE), tensor_parallel.cut(a_gpt(SHAPE), None, True)):
            for parameter in network.blocks[0].parameters():
                parameter.requires_grad_(False)
            [(tokens, targets)] = texts(SHAPE)
            if found:
                network(tokens, targets).backward()
                tensor_parallel.sum_gradients(network)
                found.append(tensor_parallel.clip_gradients(network, 1.0).item())
            else:
                logits = network(tokens).flatten(0, 1)
                F.cross_entropy(logits, targets.flatten()).backward()
                norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                found.append(norm.item())
        return found


def test_frozen_parameters_have_no_part_in_sums_and_norms():
    one, cut = launch(norm_with_frozen_parameters, nproc=2)[0]
    assert cut == pytest.approx(one, rel=1e-12)


def what_cut_refuses(ranks_of_heads, dropout):
    with process_group():
        tensor_parallel.cut(GPT(**SHAPE | {"heads": ranks_of_heads}, dropout=dropout))


@pytest.mark.parametrize(
    "heads, dropout, expected",
    [
        (3, 0.0, "3 heads cannot be cut for 2 ranks"),
        (12, 0.1, "a GPT with dropout is not cut here"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(heads, dropout, expected):
    with pytest.raises(Exception, match=f"ValueError: {expected}"):
        launch(what_cut_refuses, heads, dropout, nproc=2)


def parts_of_one_seed():
    """Two losses of a GPT whose ranks draw their parts with one seed, and what is found
    in it, and in one that is cut from a whole.
    """
    with process_group():
        [(tokens, targets)] = texts(SHAPE)
        network, losses = tensor_parallel.cut(a_gpt(SHAPE)), []
        torch.manual_seed(0)
        for block in network.blocks:
            for value in (*block.mlp.expand.parameters(), block.mlp.contract.weight):
                nn.init.normal_(value, std=0.02)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        whole = tensor_parallel.cut(a_gpt(SHAPE))
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(network(tokens, targets))
            losses[-1].backward()
            optimizer.step()
        copies = map(tensor_parallel.copied_parts, (network, whole))
        return losses[0].item(), losses[-1].item(), *copies


def test_parts_that_are_drawn_with_one_seed_train_and_are_found():
    first, last, copies, of_cut = launch(parts_of_one_seed)[0]
    layers = {
        f"blocks.{n}.mlp.{name}" for n in range(2) for name in ("expand", "contract")
    }
    assert last < first and not of_cut
    assert set(copies) == {f"{layer}.weight" for layer in layers}


def dropped(seed_of_own, seed_of_all):
    """With dropout of a rank's own columns, and of what all ranks have, each with its
    own state of the generator, from a seed by rank: which numbers are dropped, and the
    gradient of the last norm.
    """
    with process_group() as (rank, _):
        [(tokens, targets)] = texts(SHAPE)
        network, zeros = tensor_parallel.cut(a_gpt(SHAPE)), []
        states = [torch.manual_seed(seed_of_own(rank)).get_state()]
        states.append(torch.manual_seed(seed_of_all(rank)).get_state())

        def drop(which, module, inputs, output):
            torch.set_rng_state(states[which])
            output = F.dropout(output, 0.5)
            states[which] = torch.get_rng_state()
            zeros.append(output == 0)
            return output

        network.blocks[0].mlp.expand.register_forward_hook(partial(drop, 0))
        network.blocks[1].register_forward_hook(partial(drop, 1))
        network(tokens, targets).backward()
        return *zeros, network.norm.weight.grad


@pytest.mark.parametrize(
    "of_own, of_all, same",
    [
        (lambda rank: 7, lambda rank: 8, [True, True, True]),  # heads drop alike
        (lambda rank: 7 + rank, lambda rank: 9 + rank, [False, False, False]),
        (lambda rank: 7 + rank, lambda rank: 9, [False, True, True]),
    ],
    ids=["one seed", "a seed per rank", "right"],
)
def test_dropout_wants_one_seed_for_what_all_have_and_several_for_their_own(
    of_own, of_all, same
):
    """One seed drops the same columns on each rank; a seed per rank tears apart what is
    to be equal on all. Nothing raises.
    """
    found, others = launch(dropped, of_own, of_all)
    assert list(map(torch.equal, found, others)) == same


def clip_a_mixture():
    with process_group() as (_, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        network = dtensors.parallelize(a_gpt(FOR_TORCH), mesh, sequence=False)
        [(tokens, targets)] = texts(FOR_TORCH)
        with dtensors.loss_parallel():
            dtensors.loss_of(network, tokens, targets).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def test_tensors_and_dtensors_are_not_clipped_together():
    with pytest.raises(RankError, match="got mixed torch.Tensor and DTensor"):
        launch(clip_a_mixture)


def generate():
    with process_group():
        return tensor_parallel.cut(a_gpt(SHAPE)).generate([1, 2, 3], 8)


def test_a_gpt_that_is_cut_writes_what_the_whole_one_writes():
    whole = a_gpt(SHAPE).generate([1, 2, 3], 8)
    assert launch(generate, nproc=2) == [whole, whole]


# ---- with torch ----


def differences_with_torch(sequence):
    with process_group() as (_, ranks):
        logits, loss, gradients = in_one_process(FOR_TORCH)
        mesh = init_device_mesh("cpu", (ranks,))
        network = dtensors.parallelize(a_gpt(FOR_TORCH), mesh, sequence)
        [(tokens, targets)] = texts(FOR_TORCH)
        losses = []

        def step():
            with dtensors.loss_parallel():
                losses.append(dtensors.loss_of(network, tokens, targets))
                losses[-1].backward()

        counted = []
        shared = watch.count_bytes(
            lambda: counted.append(watch.count_collectives(step))
        )
        found = {
            name: dtensors.full(value.grad)
            for name, value in network.named_parameters()
        }
        off = {"loss": abs(dtensors.full(losses[0]).item() / loss - 1)}
        off["logits"] = distance(dtensors.full(network(tokens).detach()), logits)
        for name, value in dtensors.fused(found).items():
            off[name] = distance(value, gradients[name]) if name in gradients else 1.0
        return off, *counted, shared


def summed_later():
    """What clipping and AdamW send without FSDP, because gradients are Partial."""
    with process_group() as (_, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        network = dtensors.parallelize(a_gpt(FOR_TORCH), mesh)
        with dtensors.loss_parallel():
            dtensors.loss_of(network, *texts(FOR_TORCH)[0]).backward()
        placements = str(network.norm.weight.grad.placements)
        clip = lambda: nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        step = torch.optim.AdamW(network.parameters()).step
        return placements, *(
            sum(watch.count_collectives(f).values()) for f in (clip, step)
        )


def test_without_fsdp_torch_sums_gradients_of_norms_where_they_are_used():
    placements, clip, step = launch(summed_later, nproc=2)[0]
    assert placements == "(Partial(sum),)" and clip > 5 and step > 5


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_torchs_layers_equal_one_process_and_send_what_ours_send(ranks):
    off, calls, shared = launch(differences_with_torch, False, nproc=ranks)[0]
    passages = 4 * SHAPE["layers"] + 2
    assert len(off) == 30 and max(off.values()) < 1e-12
    assert calls == {"allreduce": passages + 3}
    assert shared == {"allreduce": passages * ACTIVATIONS + OF_THE_LOSS}
    off, calls, shared = launch(differences_with_torch, True, nproc=ranks)[0]
    assert len(off) == 30 and max(off.values()) < 1e-12
    # one pair more, for the positions, which have no batch
    pairs = passages * ACTIVATIONS + ACTIVATIONS // BATCH
    assert calls == dict.fromkeys(PAIR, passages + 1) | {"allreduce": 3}
    assert shared == dict.fromkeys(PAIR, pairs) | {"allreduce": OF_THE_LOSS}


def six_heads(head_width):
    """How far an attention with six heads is from one process, cut by torch's plan."""
    with process_group() as (_, ranks):
        torch.manual_seed(0)
        network = GPT(**FOR_TORCH | {"heads": 6}).double()
        attention, features = (
            network.blocks[0].attention,
            torch.randn(2, 8, 48).double(),
        )
        nn.init.normal_(attention.query_key_value.weight)
        right = attention(features)
        dtensors.parallelize(network, init_device_mesh("cpu", (ranks,)), sequence=False)
        attention.head_width = head_width
        return distance(attention(features), right)


def test_torch_cuts_heads_in_two_and_only_their_width_tells():
    assert launch(six_heads, 8, nproc=3)[0] < 1e-12
    with pytest.raises(
        Exception, match=r"shape '\[2, 8, -1, 8\]' is invalid for input"
    ):
        launch(six_heads, 8, nproc=4)
    assert launch(six_heads, 12, nproc=4)[0] > 0.1  # 6 // 4 heads, of the wrong width


def as_parallelize_module_leaves_them():
    dtensors.tie = lambda network: None
    return differences_with_torch(True)


def test_weights_that_torch_unties_are_found():
    off, *_ = launch(as_parallelize_module_leaves_them, nproc=2)[0]
    assert off["loss"] < 1e-12 and off["token_embedding.weight"] > 0.01


def resumed(path, sizes, load):
    with process_group():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallel = lesson17.WithTorch(a_gpt(FOR_TORCH), mesh, sequence=True)
        network, [text] = parallel.network, texts(FOR_TORCH)
        optimizer, losses = torch.optim.AdamW(network.parameters(), lr=1e-2), []

        def two_updates():
            for _ in range(2):
                optimizer.zero_grad()
                loss = parallel.loss(*text)
                parallel.backward(loss)
                parallel.clip(0.5)
                optimizer.step()
                losses.append(dtensors.full(loss.detach()).item())

        if not load:
            two_updates()
        model, state = get_state_dict(network, optimizer)
        files = {"model": model, "optimizer": state}
        if load:
            dcp.load(files, checkpoint_id=path)
            how = {"model_state_dict": model, "optim_state_dict": state}
            set_state_dict(network, optimizer, **how)
        else:
            dcp.save(files, checkpoint_id=path)
        two_updates()
        return losses


def test_a_checkpoint_of_2_x_2_ranks_resumes_on_1_2_and_3(tmp_path):
    path = str(tmp_path / "checkpoint")
    *_, third, fourth = launch(resumed, path, (2, 2), False, nproc=4, timeout=600)[0]
    for sizes in ((1, 1), (1, 2), (1, 3), (2, 1)):
        ranks = sizes[0] * sizes[1]
        found = launch(resumed, path, sizes, True, nproc=ranks, timeout=600)[0]
        assert found == pytest.approx([third, fourth], rel=1e-12)


# ---- clusters that are not there ----


def as_rank_0_of(ranks, tensor, sequence):
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    names = ("data", "tensor")
    sizes = (ranks // tensor, tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    group = mesh["tensor"].get_group()
    network = tensor_parallel.cut(a_gpt(SHAPE | {"heads": 8}), group, sequence)
    found = watch.count_bytes(lambda: network(*texts(SHAPE)[0]).backward())
    return found, sum(value.numel() for value in network.parameters())


@pytest.mark.parametrize("tensor", [2, 8])
def test_rank_0_of_512_sends_and_keeps_what_the_formulas_say(tensor):
    passages = (4 * SHAPE["layers"] + 2) * ACTIVATIONS
    found, parameters = launch(as_rank_0_of, 512, tensor, False, nproc=1)[0]
    assert found == {"allreduce": passages + OF_THE_LOSS}
    mesh = memory.Mesh(data=512 // tensor, tensor=tensor)
    assert [parameters] == memory.parameters_on(mesh, **SHAPE | {"heads": 8})
    found, _ = launch(as_rank_0_of, 512, tensor, True, nproc=1)[0]
    assert found["allgather"] == found["reduce_scatter"] == passages


def a_layer():
    """An input of an MLP, and its two matrices."""
    torch.manual_seed(0)
    return torch.randn(5, 8), torch.randn(8, 192), torch.randn(192, 8)


def in_a_step(ranks, parts):
    """The bytes that a step of an MLP cut for all ranks hands to collectives; its output
    and the gradient of its input, each as a list: of the ranks that are here.
    """
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    places = [Replicate()], [Shard(1)], [Shard(0)]
    cut = [
        distribute_tensor(part, mesh, place).requires_grad_()
        for part, place in zip(parts, places)
    ]

    def step():
        output = (F.gelu(cut[0] @ cut[1]) @ cut[2]).redistribute(placements=places[0])
        output.pow(2).sum().backward()
        gradient = cut[0].grad.redistribute(placements=places[0])
        found.extend((output.detach(), gradient))

    counted = watch.count_bytes(step)
    here = [each.to_local() for each in found]
    return counted, [
        list(getattr(each, "_local_tensors", {0: each}).values()) for each in here
    ]


def as_all_of_64():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    parts = a_layer()
    with LocalTensorMode(64):
        return in_a_step(64, parts)


def on_real_ranks():
    with process_group() as (_, ranks):
        return in_a_step(ranks, a_layer())


def test_64_ranks_in_one_process_send_and_compute_what_4_real_ones_do():
    [(sent, of_64)] = launch(as_all_of_64, nproc=1)
    real, of_one = launch(on_real_ranks, nproc=4)[0]
    assert sent == real == {"allreduce": 2 * 5 * 8 * 4}  # forward's, and backward's
    x, first, second = a_layer()
    whole = F.gelu(x.requires_grad_() @ first) @ second
    whole.pow(2).sum().backward()
    for many, [one], expected in zip(of_64, of_one, (whole.detach(), x.grad)):
        assert len(many) == 64
        for each in (one, *many):
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-2)


def busy(sizes, names):
    """Seconds of a step for which each link of this rank is in use."""
    with process_group():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = tensor_parallel.cut(a_gpt(SHAPE), mesh["tensor"].get_group())
        group = mesh["data"].get_group()
        model = DistributedDataParallel(model, process_group=group)
        [(tokens, targets)] = texts(SHAPE)
        mine = mesh.get_local_rank("data")
        text = [part.chunk(mesh["data"].size())[mine] for part in (tokens, targets)]
        model(*text).backward()
        dist.barrier()
        ends = ends_of(network_of_environment()).values()
        before = [len(end.carried) for end in ends]
        model(*text).backward()
        return [
            sum(over - begin for _, begin, over in end.carried[old:])
            for end, old in zip(ends, before)
        ]


def test_tensor_ranks_belong_inside_a_machine():
    two_machines = Network(Link(1e-5, 1e9), Link(1e-4, 1e8), 2)
    job = partial(launch, busy, nproc=4, network=two_machines, timeout=600)
    inside = job((2, 2), ("data", "tensor"))[0]
    across = job((2, 2), ("tensor", "data"))[0]
    assert sum(inside) < 0.75 * sum(across)
    # a ring of two ranks: two messages, of half of the bytes each; half of the batch
    messages = 2 * (4 * SHAPE["layers"] + 2 + 3)
    size = (4 * SHAPE["layers"] + 2) * ACTIVATIONS / 2 + OF_THE_LOSS / 2
    assert inside[0] == pytest.approx(messages * 1e-5 + size / 1e9, rel=1e-6)
    assert across[1] == pytest.approx(messages * 1e-4 + size / 1e8, rel=1e-6)


# ---- the program ----


def program(folder, *flags, nproc, lesson=lesson17):
    """Two epochs, whose gradients are clipped; three held-out windows."""
    flags = ["--train-samples", "32", "--batch-size", "4", "--epochs", "2", *flags]
    flags += ["--max-norm", "0.5", "--warmup", "2", "--eval-windows", "3"]
    flags += ["--device", "cpu", "--out", str(folder)]
    return launch(lesson.main, flags, nproc=nproc, timeout=600)[0]


def assert_exported_alike(*folders):
    found, expected = (load_file(one / "model/model.safetensors") for one in folders)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "flags, ranks",
    [
        (["--sequence"], 2),
        (["--layers", "torch"], 2),
        (["--tensor", "2", "--batch-size", "2"], 4),
        (["--tensor", "2", "--batch-size", "2", "--layers", "torch"], 4),
    ],
    ids=["sequence", "torch", "2 x 2", "2 x 2, torch"],
)
def test_the_program_trains_as_one_process_and_saves_the_whole_model(
    flags, ranks, tmp_path
):
    alone = program(tmp_path / "alone", nproc=1)
    found = program(tmp_path / "cut", *flags, nproc=ranks)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert found["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-4)
    assert found["parameters"] == alone["parameters"]
    assert found["weight_bytes"] < 0.53 * alone["weight_bytes"]
    assert f"{ranks // 2} data x 2 tensor" == found["sharding"]
    assert_exported_alike(tmp_path / "cut", tmp_path / "alone")


def test_in_one_process_the_program_trains_as_lesson_10s(tmp_path):
    found = program(tmp_path / "17", nproc=1)
    expected = program(tmp_path / "10", nproc=1, lesson=lesson10)
    rows = (tmp_path / "10/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows]
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["validation_loss"] == pytest.approx(
        expected["validation_loss"], abs=1e-4
    )
    assert_exported_alike(tmp_path / "17", tmp_path / "10")


def as_prepared(folder, flags):
    """This rank's tensor ranks; whether the tokens are shared; FSDP's blocks; and the
    collectives of clipping.
    """
    flags = [*flags, "--train-samples", "32", "--device", "cpu", "--out", folder]
    with process_group() as (_, ranks):
        run = lesson17.prepare(lesson17.arguments(flags), ranks, torch.device("cpu"))
        network = run.parallel.network
        tokens, targets = next(iter(run.loader))
        run.parallel.backward(run.parallel.loss(tokens, targets))
        clip = watch.count_collectives(lambda: run.parallel.clip(0.1))
        norm = run.parallel.clip(0.1).item()
        positions = type(network.position_embedding).__name__
        sharded = [isinstance(block, FSDPModule) for block in network.blocks]
        return run.mesh["tensor"].mesh.tolist(), positions, set(sharded), clip, norm


def test_each_flag_of_the_program_does_what_it_says(tmp_path):
    job = partial(launch, as_prepared, str(tmp_path), nproc=4, timeout=600)
    for rank, (mesh, positions, sharded, clip, norm) in enumerate(
        job(["--tensor", "2", "--sequence"])
    ):
        assert mesh == [rank // 2 * 2, rank // 2 * 2 + 1]  # neighbours share a model
        assert positions == "OwnPositions" and sharded == {False}
        assert clip == {"allreduce": 1} and norm == pytest.approx(0.1, rel=1e-4)
    [(mesh, _, sharded, clip, norm), *_] = job(["--tensor", "2", "--layers", "torch"])
    assert mesh == [0, 1] and sharded == {True}
    assert clip == {"allreduce": 1} and norm == pytest.approx(0.1, rel=1e-4)


def losses_of_extremes():
    """Of huge logits in 32 bits, and of a model in 16 bits: cut, and in one process."""
    with process_group():
        [(tokens, targets)], found = texts(SHAPE), []
        for dtype, factor in ((torch.float32, 3000.0), (torch.bfloat16, 20.0)):
            whole = a_gpt(SHAPE).to(dtype)
            cut = a_gpt(SHAPE).to(dtype)
            for network in (whole, cut):
                network.norm.weight.data *= factor
            logits = whole(tokens).flatten(0, 1).float()
            loss = tensor_parallel.cut(cut)(tokens, targets)
            found.append((loss.item(), loss.dtype))
            found.append(F.cross_entropy(logits, targets.flatten()).item())
        return found


def test_huge_logits_do_not_overflow_and_16_bits_have_a_loss_in_32():
    (large, _), whole, (small, dtype), half = launch(losses_of_extremes, nproc=2)[0]
    assert large == pytest.approx(whole, rel=1e-4) and whole > 500
    assert dtype == torch.float32 and small == pytest.approx(half, rel=3e-3)


@pytest.mark.parametrize(
    "flags, world_size, expected",
    [
        (["--tensor", "2"], 3, "--tensor 2 does not divide 3 ranks"),
        (
            ["--tensor", "4"],
            4,
            "--tensor 4 does not divide the 2 heads of --shape small",
        ),
        (
            ["--tensor", "3", "--sequence", "--shape", "gpt2"],
            3,
            "--tensor 3 does not divide the 1024 tokens of --shape gpt2",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_gives_one_line(flags, world_size, expected):
    args = lesson17.arguments(flags)
    with pytest.raises(UsageError, match=f"^{expected}$"):
        lesson17.mesh_for(args, world_size, torch.device("cpu"))
