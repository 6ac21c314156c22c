"""Experts: a GPT with a mixture of experts on several ranks equals one process, loses no
token and counts none twice; what it sends is what the formulas say; mistakes are found.
"""

import json
import math
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import UsageError, lesson10, lesson20
from ddp_course.data.text import load_windows
from ddp_course.models import expert_parallel, experts, torch_experts
from ddp_course.models.gpt import GPT
from ddp_course.models.recipe import learning_rate, parameter_groups
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch, start_server
from ddp_course.ranks.links import Link, Network
from ddp_course.ranks.pretend_network import ends_of, network_of_environment

SHAPE = {"vocabulary": 50, "context": 12, "layers": 2, "heads": 2, "width": 16}
EXPERTS, TOP, BATCH = 12, 2, 12  # 2, 3 and 4 ranks divide them


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server()


def a_gpt(top=TOP, **more):
    """In 64 bits; its routers prefer some experts, and no parameter is 0 or 1."""
    torch.manual_seed(0)
    network = expert_parallel.with_experts(GPT(**SHAPE), EXPERTS, top, **more).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


def texts(steps=1):
    generator = torch.Generator().manual_seed(1)
    sizes = steps, 2, BATCH, SHAPE["context"]
    return torch.randint(SHAPE["vocabulary"], sizes, generator=generator)


def mesh_of(expert_ranks):
    sizes = dist.get_world_size() // expert_ranks, expert_ranks
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "expert"))


def own(texts):
    """This rank's part of a batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return [part.chunk(ranks)[rank] for part in texts]


def distance(found, right):
    """The largest difference, of the largest number."""
    return (found - right).abs().max().item() / right.abs().max().item()


# ---- equal to one process, whose layer is a plain loop ----


class PlainLoop(nn.Module):
    """What a mixture of experts is, in the words of the formula: for each expert, the
    tokens that chose it.
    """

    def __init__(self, layer):
        super().__init__()
        self.router, self.experts = layer.router, layer.experts
        self.shared, self.top = layer.shared, layer.top
        self.register_buffer("bias", layer.bias)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        highest = (scores + self.bias).sort(-1, descending=True).indices[:, : self.top]
        chosen = F.one_hot(highest, scores.shape[1]).sum(1)
        weights = scores * chosen
        if self.top > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e, (up, down) in enumerate(zip(self.experts.up, self.experts.down)):
            for t in chosen[:, e].nonzero().flatten().tolist():
                out[t] = out[t] + weights[t, e] * (F.gelu(tokens[t] @ up) @ down)
        self.auxiliary = (
            scores.shape[1] * chosen.double().mean(0) / self.top * scores.mean(0)
        ).sum()
        out = out if self.shared is None else out + self.shared(tokens)
        return out.view_as(x)


def in_one_process(network, tokens, targets, weight):
    """The loss and the gradients of a GPT with plain loops, {name: gradient}."""
    loops = []
    for block in network.blocks:
        if isinstance(block.mlp, experts.MixtureOfExperts):
            block.mlp = PlainLoop(block.mlp)
            loops.append(block.mlp)
    logits = network(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = loss + weight * sum(loop.auxiliary for loop in loops) / len(loops)
    loss.backward()
    gradients = {name: value.grad for name, value in network.named_parameters()}
    return loss.item(), logits.detach(), gradients


def loss_of(network, tokens, targets, weight, group="all"):
    logits = network(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if weight:
        group = dist.group.WORLD if group == "all" else None
        loss = loss + weight * expert_parallel.auxiliary_loss(network, group)
    return loss, logits


def whole_gradients(network, mesh):
    ours = {id(value) for value in expert_parallel.of_experts(network)[0]}
    group = mesh["expert"].get_group()
    return {
        name: expert_parallel.gathered(value.grad, group)
        if id(value) in ours
        else value.grad
        for name, value in network.named_parameters()
    }


def differences(expert_ranks, weight=0.1, group="all", fault=None, **more):
    """How far loss, logits and all gradients are from one process's, {name: relative}."""
    with process_group():
        [text] = texts()
        whole = a_gpt(**more)
        for layer in expert_parallel.layers_of(whole):
            layer.bias += 0.05 * torch.randn(EXPERTS)
        loss, logits, gradients = in_one_process(whole, *text, weight)
        mesh, network = mesh_of(expert_ranks), a_gpt(**more)
        for block, other in zip(network.blocks, whole.blocks):
            if hasattr(block.mlp, "bias"):
                block.mlp.bias.copy_(other.mlp.bias)
        expert_parallel.share(network, mesh)
        if fault:
            fault(network, mesh)
        found, found_logits = loss_of(network, *own(text), weight, group)
        found.backward()
        expert_parallel.average_gradients(network, mesh)
        mean = found.detach().clone()
        dist.all_reduce(mean)
        off = {"loss": abs(mean.item() / dist.get_world_size() / loss - 1)}
        off["logits"] = distance(found_logits.detach(), own([logits])[0])
        for name, value in whole_gradients(network, mesh).items():
            off[name] = distance(value, gradients[name])
        return off


MESHES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4)]  # ranks, expert ranks


@pytest.mark.parametrize("ranks, expert_ranks", MESHES, ids=str)
def test_loss_logits_and_all_gradients_equal_one_process(ranks, expert_ranks):
    for off in launch(differences, expert_ranks, nproc=ranks):
        assert len(off) == 28 and max(off.values()) < 1e-12


@pytest.mark.parametrize(
    "more",
    [{"top": 1}, {"top": 3, "shared": True}, {"every": 2}],
    ids=["one of them", "three, and a shared one", "in every second block"],
)
def test_other_mixtures_equal_one_process(more):
    """With one expert per token, its gradient goes through the score."""
    for off in launch(partial(differences, 2, **more), nproc=4):
        assert max(off.values()) < 1e-12


def test_the_auxiliary_loss_of_a_rank_is_another_function():
    off = launch(differences, 2, group="own", nproc=2)[0]
    assert off["blocks.0.mlp.router.weight"] > 1e-3 and off["logits"] < 1e-12
    off = launch(differences, 2, weight=0, group="own", nproc=2)[0]
    assert max(off.values()) < 1e-12


# ---- faults, of which none raises an error ----


def over_the_copies(network, mesh):
    """Gradients averaged over the ranks that have a parameter."""
    experts, dense = expert_parallel.of_experts(network)
    for values, group in ((experts, mesh["data"].get_group()), (dense, None)):
        for value in values:
            dist.all_reduce(value.grad, dist.ReduceOp.AVG, group=group)


def over_all_ranks(network, mesh):
    """As DDP around the whole model: different experts are averaged with each other."""
    for value in network.parameters():
        dist.all_reduce(value.grad, dist.ReduceOp.AVG)


def averaged_by(average, expert_ranks):
    expert_parallel.average_gradients = average
    off = differences(expert_ranks)
    return {name: value for name, value in off.items() if value > 1e-12}


@pytest.mark.parametrize("ranks, expert_ranks", [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_averaged_over_its_copies_an_expert_is_too_large_by_the_expert_ranks(
    ranks, expert_ranks
):
    for wrong in launch(averaged_by, over_the_copies, expert_ranks, nproc=ranks):
        assert len(wrong) == 4 and all("experts" in name for name in wrong)
        for off in wrong.values():
            assert off == pytest.approx(expert_ranks - 1, rel=1e-9)


def test_ddp_around_the_whole_model_averages_different_experts():
    for wrong in launch(averaged_by, over_all_ranks, 2, nproc=2):
        assert len(wrong) == 4 and all("experts" in name for name in wrong)
        assert min(wrong.values()) > 0.1


def without_the_way_back(network, mesh):
    """The experts' results in the order of the experts, not as the rows arrived."""
    for layer in expert_parallel.layers_of(network):

        def compute(rows, counts, layer=layer):
            way = experts.find_way(counts, layer.group)
            there = way.send, way.receive, layer.group
            received = experts.AllToAll.apply(rows, *there)
            results = layer.experts(received[way.by_expert], way.own)
            back = way.receive, way.send, layer.group
            return experts.AllToAll.apply(results, *back)

        layer.compute = compute


def by_rank_and_not_by_expert(network, mesh):
    """The experts take the rows as they arrived."""
    original = experts.find_way

    def find_way(counts, group):
        way = original(counts, group)
        return way._replace(by_expert=torch.arange(sum(way.receive)))

    experts.find_way = find_way


def biased_weights(network, mesh):
    """The bias in the weights, too."""
    original = experts.choose

    def choose(logits, top, bias):
        choice = original(logits, top, bias)
        weights = (choice.scores + bias).gather(-1, choice.experts)
        weights = weights / weights.sum(-1, keepdim=True)
        return choice._replace(weights=weights)

    experts.choose = choose


@pytest.mark.parametrize(
    "fault",
    [without_the_way_back, by_rank_and_not_by_expert, biased_weights],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found_by_the_comparison_though_nothing_raises(fault):
    off = launch(partial(differences, 2, fault=fault), nproc=2)[0]
    assert off["logits"] > 1e-4


# ---- no token lost, none counted twice ----


def who_computes_what(top):
    """The numbers of the tokens that each expert of this rank gets, and what comes back
    if experts return what they get.
    """
    with process_group() as (rank, ranks):
        network = expert_parallel.share(a_gpt(top=top), mesh_of(ranks))
        layer, got = expert_parallel.layers_of(network)[0], []
        layer.experts.forward = lambda x, counts: got.extend(x.split(counts)) or x
        tokens = torch.randn(1, 10, 16, dtype=torch.float64)
        tokens[0, :, 0] = torch.arange(10) + 10.0 * rank
        same = layer(tokens)
        assert top == 1 or distance(same, tokens) < 1e-12  # weights have the sum 1
        numbers = [part[:, 0].round().long().tolist() for part in got]
        return numbers, layer.choice.experts.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("top", [2, 3])
def test_no_token_is_lost_and_none_counted_twice(ranks, top):
    found, chosen = zip(*launch(who_computes_what, top, nproc=ranks))
    of_experts = [numbers for of_rank in found for numbers in of_rank]
    expected = [[] for _ in range(EXPERTS)]
    for token, numbers in enumerate(number for of_rank in chosen for number in of_rank):
        for number in numbers:
            expected[number].append(token)
    assert of_experts == expected and sum(map(len, expected)) == ranks * 10 * top


def dropped_by(capacity):
    """This rank's choices per expert and what it dropped, and the tokens whose choices
    all were dropped.
    """
    with process_group() as (_, ranks):
        network = expert_parallel.share(a_gpt(capacity=capacity), mesh_of(ranks))
        layer = expert_parallel.layers_of(network)[0]
        torch.manual_seed(0)
        x = torch.randn(1, 48, 16, dtype=torch.float64).chunk(ranks, 1)[dist.get_rank()]
        result = layer(x + 1)
        load, dropped = layer.load.clone(), layer.dropped.clone()
        layer.eval()
        assert (layer(x + 1) != 0).any(-1).all()  # nothing is dropped, nor counted
        assert torch.equal(layer.load, load)
        return load, dropped, (result == 0).all(-1).sum().item()


def test_dropped_choices_are_counted_and_depend_on_the_number_of_ranks():
    room, drops = math.ceil(1.0 * 96 / EXPERTS), {}
    for ranks in (1, 2, 4):
        of_ranks = launch(dropped_by, 1.0, nproc=ranks)
        for load, dropped, _ in of_ranks:
            assert dropped.tolist() == (load - room // ranks).clamp(min=0).tolist()
        drops[ranks] = sum(dropped.sum().item() for _, dropped, _ in of_ranks)
        assert sum(load.sum().item() for load, *_ in of_ranks) == 96
        assert sum(nothing for *_, nothing in of_ranks) > 0
    assert len(set(drops.values())) > 1 and min(drops.values()) > 10
    for _, dropped, nothing in launch(dropped_by, None, nproc=2):
        assert dropped.sum() == nothing == 0


def test_the_first_choices_of_an_expert_have_room():
    chosen = torch.tensor([1, 0, 1, 1, 0, 2])
    kept = experts.within_capacity(chosen, 3, 2)
    assert kept.tolist() == [True, True, True, False, True, True]


def gradients_without_tokens():
    """Which experts of this rank got no token, and the largest gradient of each."""
    with process_group() as (_, ranks):
        network = a_gpt()
        for layer in expert_parallel.layers_of(network):
            layer.bias[:] = torch.tensor([0.0] * 3 + [-9.0] * 9)  # three can be chosen
        expert_parallel.share(network, mesh_of(ranks))
        loss_of(network, *own(texts()[0]), 0)[0].backward()
        layer = network.blocks[0].mlp
        largest = layer.experts.up.grad.abs().amax((1, 2)).tolist()
        return layer.load.tolist(), largest


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    (load, first), (_, second) = launch(gradients_without_tokens, nproc=2)
    assert load[3:] == [0] * 9 and min(load[:3]) > 0
    assert min(first[:3]) > 0 and first[3:] + second == [0.0] * 9


class LeftOut(experts.Experts):
    """Returns early where there is no token."""

    def forward(self, rows, counts):
        if sum(counts) == 0:
            return torch.zeros_like(rows)
        return super().forward(rows, counts)


def backward_with_a_rank_left_out():
    with process_group(timeout=2):
        network = a_gpt()
        for layer in expert_parallel.layers_of(network):
            layer.bias[2:] = -9.0  # both that can be chosen are on rank 0
            layer.experts.__class__ = LeftOut
        mesh = mesh_of(2)
        expert_parallel.share(network, mesh)
        loss_of(network, *own(texts()[0]), 0)[0].backward()
        expert_parallel.average_gradients(network, mesh)


def test_a_rank_without_tokens_that_leaves_its_experts_out_makes_the_others_wait():
    with pytest.raises(Exception, match="Timed out waiting 2000ms"):
        launch(backward_with_a_rank_left_out, nproc=2, timeout=30)


def exchange(receive):
    with process_group(timeout=3) as (rank, _):
        rows = torch.arange(4.0) + 10 * rank
        result = torch.full([sum(receive[rank])], torch.nan)
        dist.all_to_all_single(result, rows, receive[rank], [[1, 3], [2, 2]][rank])
        return result.tolist()


def test_wrong_split_sizes_kill_a_rank_or_leave_a_row_as_it_was():
    right = [[0, 10, 11], [1, 2, 3, 12, 13]]
    assert launch(exchange, [[1, 2], [3, 2]], nproc=2) == right
    first, second = launch(exchange, [[1, 3], [3, 2]], nproc=2)
    assert first[:3] == right[0] and math.isnan(first[3]) and second == right[1]
    with pytest.raises(Exception, match="Received data size doesn't match expected"):
        launch(exchange, [[1, 2], [2, 2]], nproc=2)


def losses_with(kind, rate, factor):
    """Of 20 updates, with experts' gradients that are too large by a factor."""
    with process_group():
        mesh, losses, [text] = mesh_of(2), [], texts()
        network = expert_parallel.share(a_gpt(), mesh)
        optimizer = kind(network.parameters(), lr=rate)
        for _ in range(20):
            optimizer.zero_grad()
            loss, _ = loss_of(network, *own(text), 0)
            loss.backward()
            for value in expert_parallel.of_experts(network)[0]:
                value.grad *= factor
            expert_parallel.average_gradients(network, mesh)
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)


def test_adam_hides_a_constant_factor_and_sgd_does_not():
    apart = []
    for kind, rate in ((torch.optim.AdamW, 1e-3), (torch.optim.SGD, 0.5)):
        right, wrong = (
            launch(losses_with, kind, rate, factor, nproc=2)[0] for factor in (1, 2)
        )
        apart.append(((wrong - right).abs() / right).max().item())
    of_adam, of_sgd = apart
    assert of_adam < 1e-4 and of_sgd > 1e-2


# ---- what is sent ----


def sent(expert_ranks, weight):
    with process_group():
        network, [text] = expert_parallel.share(a_gpt(), mesh_of(expert_ranks)), texts()
        with watch.Watch() as watched:
            loss_of(network, *own(text), weight, "all")[0].backward()
        loads = [layer.load for layer in expert_parallel.layers_of(network)]
        before = len(watched.log)
        with watched:
            expert_parallel.average_gradients(network, mesh_of(expert_ranks))
        log = [(entry["name"], entry["bytes"]) for entry in watched.log]
        return log[:before], [one for one in log[before:] if one[0] != "barrier"], loads


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_and_bytes_are_the_formulas(ranks):
    """Per layer: how many, tokens there, tokens back; and the last two in backward. The
    bytes here are those that a rank receives.
    """
    of_ranks = launch(sent, ranks, 0, nproc=ranks)
    tokens, row = BATCH * SHAPE["context"], 8 * SHAPE["width"]
    for log, _, _ in of_ranks:
        assert [name for name, _ in log] == ["alltoall"] * 5 * SHAPE["layers"]
        assert [log[0][1], log[3][1]] == [8 * EXPERTS] * 2
        # what comes back are the rank's own tokens, as often as they chose
        own = tokens // ranks * TOP * row
        assert log[2][1] == log[5][1] == own
        backward = [size for _, size in log[6:]]
        assert backward == [log[4][1], own, log[1][1], own]
    for place in (1, 2, 4, 5):
        assert sum(log[place][1] for log, *_ in of_ranks) == tokens * TOP * row
    loads = sum(loads[0] for *_, loads in of_ranks).view(ranks, -1).sum(1)
    assert [log[1][1] for log, *_ in of_ranks] == (loads * row).tolist()


def test_one_expert_rank_sends_no_tokens():
    log, averaged, _ = launch(sent, 1, 0.1, nproc=2)[0]
    assert log == [("allreduce", 8 * EXPERTS)] * 2  # shares of the auxiliary loss
    assert [name for name, _ in averaged] == ["allreduce"] * 2


def test_gradients_of_experts_and_of_the_rest_are_summed_once():
    _, averaged, _ = launch(sent, 2, 0, nproc=4)[0]
    of_experts = 2 * EXPERTS * 2 * 16 * 64
    network = a_gpt()
    dense = sum(value.numel() for value in network.parameters()) - of_experts
    assert averaged == [("allreduce", 8 * of_experts // 2), ("allreduce", 8 * dense)]


def carried(sizes, names):
    """The seconds for which each link of this rank is in use, by what it carries."""
    with process_group():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        network = expert_parallel.share(a_gpt(), mesh)
        loss_of(network, *own(texts()[0]), 0)[0].backward()
        expert_parallel.average_gradients(network, mesh)
        found = {}
        for link, end in ends_of(network_of_environment()).items():
            for what, begin, over in end.carried:
                key = link, "tokens" if what == "alltoall" else "gradients"
                found[key] = found.get(key, 0) + over - begin
        return found


def test_with_expert_ranks_inside_a_machine_no_token_leaves_it():
    two_machines = Network(Link(1e-6, 1e9), Link(1e-5, 1e8), 2)
    job = partial(launch, carried, nproc=4, network=two_machines, timeout=600)
    inside = job((2, 2), ("data", "expert"))[0]
    across = job((2, 2), ("expert", "data"))[0]
    of_experts = 2 * EXPERTS * 2 * 16 * 64
    of_rest = sum(p.numel() for p in a_gpt().parameters()) - of_experts
    # a ring of two sends its bytes once, one of four one and a half times
    dense = two_machines.between.ring(8 * of_rest, 4, 2)
    ring = lambda link: link.ring(8 * of_experts // 2, 2, 2)
    assert set(inside) == {("inside", "tokens"), ("between", "gradients")}
    assert inside["between", "gradients"] == pytest.approx(
        dense + ring(two_machines.between), rel=1e-6
    )
    assert across["between", "gradients"] == pytest.approx(dense, rel=1e-6)
    assert across["inside", "gradients"] == pytest.approx(
        ring(two_machines.inside), rel=1e-6
    )
    assert across["between", "tokens"] > 5 * inside["inside", "tokens"]


# ---- updates, and checkpoints ----


def updates(expert_ranks, number=4, path=None, load=False):
    """Losses, norms before clipping, and the whole state after some updates with an
    auxiliary loss and moving biases; path: of a checkpoint to load, or to save at the
    end, after which come two updates more.
    """
    with process_group():
        mesh, network = mesh_of(expert_ranks), a_gpt()
        if load:
            saved = torch.load(path, weights_only=True)
            network.load_state_dict(saved["model"])
        expert_parallel.share(network, mesh)
        groups = parameter_groups(network, weight_decay=0.1)
        optimizer, losses, norms = torch.optim.AdamW(groups, lr=1e-2), [], []
        if load:
            averages = saved["averages"]
            expert_parallel.load_averages(network, optimizer, averages, mesh)

        def update(text):
            optimizer.zero_grad()
            loss, _ = loss_of(network, *own(text), 0.1, "all")
            loss.backward()
            expert_parallel.average_gradients(network, mesh)
            norms.append(expert_parallel.clip_gradients(network, 0.2, mesh).item())
            optimizer.step()
            loads, _ = expert_parallel.collect_loads(network)
            assert loads.sum(1).tolist() == [text[0].numel() * TOP] * SHAPE["layers"]
            expert_parallel.move_biases(network, loads, 0.01)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())

        steps = texts(number + 2)
        for text in steps[number:] if load else steps[:number]:
            update(text)
        state = expert_parallel.whole_state(network, mesh)
        if path and not load:
            averages = expert_parallel.whole_averages(network, optimizer, mesh)
            if dist.get_rank() == 0:
                torch.save({"model": state, "averages": averages}, path)
            for text in steps[number:]:
                update(text)
            state = expert_parallel.whole_state(network, mesh)
        return losses, norms, state


def assert_alike(states, right):
    for state in states:
        assert list(state) == list(right)
        for name, value in right.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks, expert_ranks", [(2, 2), (2, 1), (3, 3), (4, 2)])
def test_updates_with_adamw_and_clipping_equal_one_process(ranks, expert_ranks):
    losses, norms, state = launch(updates, 1, nproc=1)[0]
    assert min(norms) > 0.2  # each update is clipped
    found = launch(updates, expert_ranks, nproc=ranks)
    for other_losses, other_norms, _ in found:
        assert other_losses == pytest.approx(losses, rel=1e-11)
        assert other_norms == pytest.approx(norms, rel=1e-11)
    assert_alike([state for *_, state in found], state)
    assert state["blocks.0.mlp.bias"].abs().max() >= 0.01  # some have moved


def test_a_checkpoint_resumes_on_another_number_of_expert_ranks(tmp_path):
    path = str(tmp_path / "checkpoint.pt")
    losses, _, state = launch(partial(updates, 2, path=path), nproc=4)[0]
    for ranks, expert_ranks in ((1, 1), (3, 3), (4, 4), (2, 1)):
        job = partial(updates, expert_ranks, path=path, load=True)
        found = launch(job, nproc=ranks)
        assert found[0][0] == pytest.approx(losses[4:], rel=1e-11)
        assert_alike([found[0][2]], state)


def norms():
    with process_group():
        mesh, network = mesh_of(2), expert_parallel.share(a_gpt(), mesh_of(2))
        loss_of(network, *own(texts()[0]), 0)[0].backward()
        expert_parallel.average_gradients(network, mesh)
        everything = whole_gradients(network, mesh).values()
        one = nn.utils.get_total_norm(everything)
        own_norm = nn.utils.get_total_norm([p.grad for p in network.parameters()])
        found = expert_parallel.clip_gradients(network, one / 2, mesh)
        clipped = nn.utils.get_total_norm(whole_gradients(network, mesh).values())
        return one.item(), found.item(), clipped.item(), own_norm.item()


def test_the_norm_counts_each_expert_once():
    for one, found, clipped, own_norm in launch(norms, nproc=4):
        assert found == pytest.approx(one, rel=1e-12) and own_norm < one * 0.999
        assert clipped == pytest.approx(one / 2, rel=1e-5)  # torch adds 1e-6


# ---- balance ----


def busiest_after(balance, updates=60):
    """The busiest expert's load over the mean, after some updates of a router whose
    tokens are alike, on two ranks.
    """
    with process_group():
        torch.manual_seed(0)
        x = torch.randn(2, 256, 16)[dist.get_rank()] + 1.0
        layer = experts.MixtureOfExperts(8, 16, 32, 2)
        network = nn.Sequential(layer)
        for value in layer.parameters():
            nn.init.normal_(value, std=0.1)
        optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.01)
        for _ in range(updates):
            layer(x)
            loss = expert_parallel.auxiliary_loss(network, dist.group.WORLD)
            loads, _ = expert_parallel.collect_loads(network)
            if balance == "bias":
                expert_parallel.move_biases(network, loads, 0.005)
            if balance == "loss":
                optimizer.zero_grad()
                loss.backward()
                dist.all_reduce(layer.router.weight.grad)
                optimizer.step()
        return (loads.max() / loads.double().mean()).item(), loss.item()


def test_the_loss_and_the_bias_each_balance_a_router():
    (none, loss), *_ = launch(busiest_after, "none", nproc=2)
    assert none > 1.8 and loss > 1.05
    for balance in ("loss", "bias"):
        (busiest, _), *_ = launch(busiest_after, balance, nproc=2)
        assert busiest < 1.35 and busiest < none / 1.5, balance


class Sleepy(experts.Experts):
    """A third of a millisecond per row, however many cores there are."""

    def forward(self, rows, counts):
        self.rows = len(rows)
        time.sleep(3e-4 * self.rows)
        return super().forward(rows, counts)


def timed(favourites):
    """Seconds of a forward if all tokens choose these, and this rank's rows by block."""
    with process_group() as (_, ranks):
        network, taken = expert_parallel.share(a_gpt(), mesh_of(ranks)), []
        layers = expert_parallel.layers_of(network)
        for layer in layers:
            layer.bias[favourites] = 9.0
            layer.experts.__class__ = Sleepy
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            loss_of(network, *own(texts()[0]), 0)
            dist.barrier()
            taken.append(time.perf_counter() - begin)
        return min(taken), [layer.experts.rows for layer in layers]


def test_a_forward_takes_as_long_as_the_busiest_rank_of_each_block():
    even, uneven = (
        launch(timed, favourites, nproc=2, timeout=600)
        for favourites in ([0, EXPERTS // 2], [0, 1])
    )
    for of_ranks, of_busiest in ((even, 144), (uneven, 288)):
        rows = [max(of_block) for of_block in zip(*(rows for _, rows in of_ranks))]
        assert rows == [of_busiest] * SHAPE["layers"]
        assert of_ranks[0][0] > 3e-4 * sum(rows)
    assert uneven[0][0] > 1.3 * even[0][0]


def test_a_uniform_router_has_an_auxiliary_loss_of_1():
    choice = experts.choose(torch.zeros(6, 4), 1)
    assert experts.balance_loss(choice).item() == pytest.approx(1.0)
    skewed = experts.choose(torch.tensor([[9.0, 0, 0, 0]] * 6), 1)
    assert experts.balance_loss(skewed).item() > 3.9


@pytest.mark.parametrize("top", [0, 5])
def test_a_token_cannot_choose_more_experts_than_there_are(top):
    with pytest.raises(ValueError, match=f"a token cannot choose {top} of 4 experts"):
        experts.MixtureOfExperts(4, 8, 8, top)


# ---- the program ----


def program(folder, *flags, nproc, lesson=lesson20):
    """Two epochs, whose gradients are clipped; three held-out windows."""
    flags = ["--train-samples", "24", "--batch-size", "6", "--epochs", "2", *flags]
    flags += ["--max-norm", "0.5", "--warmup", "2", "--eval-windows", "3"]
    flags += ["--device", "cpu", "--out", str(folder)]
    return launch(lesson.main, flags, nproc=nproc, timeout=600)[0]


def model_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "flags, ranks, sharding",
    [
        (["--batch-size", "3", "--balance", "loss"], 2, "1 data x 2 expert"),
        (["--batch-size", "2", "--experts", "6"], 3, "1 data x 3 expert"),
        (["--batch-size", "3", "--expert-ranks", "1"], 2, "2 data x 1 expert"),
    ],
    ids=["2 expert ranks", "3 expert ranks", "2 data ranks"],
)
def test_the_program_trains_as_one_process_and_saves_the_whole_model(
    flags, ranks, sharding, tmp_path
):
    """In 32 bits, in which a token may choose another expert in the end."""
    of_all = [*flags, "--batch-size", "6", "--expert-ranks", "1"]
    alone = program(tmp_path / "alone", *of_all, nproc=1)
    found = program(tmp_path / "ranks", *flags, nproc=ranks)
    assert found["losses"][:3] == pytest.approx(alone["losses"][:3], rel=1e-4)
    assert found["losses"] == pytest.approx(alone["losses"], rel=5e-3)
    assert found["validation_loss"] == pytest.approx(alone["validation_loss"], rel=5e-3)
    assert found["parameters"] == alone["parameters"]
    assert found["sharding"] == sharding
    rows = (tmp_path / "ranks/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == found["history"]
    whole, expected = model_of(tmp_path / "ranks"), model_of(tmp_path / "alone")
    assert {name: value.shape for name, value in whole.items()} == {
        name: value.shape for name, value in expected.items()
    }
    assert whole["blocks.3.mlp.bias"].dtype == torch.float32


def test_without_what_the_experts_add_a_shared_expert_is_lesson_10s_mlp():
    torch.manual_seed(0)
    plain = GPT(256, **lesson10.SHAPES["small"])
    torch.manual_seed(0)
    network = lesson20.a_gpt(lesson20.arguments(["--shared"]), 256)
    tokens = torch.randint(256, (2, 128))
    with torch.no_grad():
        for layer in expert_parallel.layers_of(network):
            layer.experts.down.zero_()
        torch.testing.assert_close(network(tokens), plain(tokens))


def trained_by_hand(folder, flags):
    """Losses, the held-out loss and the weights of a program without ranks, that does
    what the flags say and balances nothing.
    """
    args = lesson20.arguments([*flags, "--out", str(folder)])
    text = load_windows(args.data, None, 0, 128, args.train_samples, None)
    train_set, held_out, tokenizer, _ = text
    torch.manual_seed(args.seed)
    network, losses = lesson20.a_gpt(args, tokenizer.vocabulary), []
    groups = parameter_groups(network, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    updates = args.epochs * (args.train_samples // args.batch_size)
    for epoch in range(args.epochs):
        sampler = DistributedSampler(train_set, 1, 0, seed=args.seed)
        sampler.set_epoch(epoch)
        for tokens, targets in DataLoader(train_set, args.batch_size, sampler=sampler):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(len(losses), updates, args)
            optimizer.zero_grad()
            loss = network(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), args.max_norm)
            optimizer.step()
            losses.append(loss.item())
    network.eval()
    windows = [held_out.some(3)[number] for number in range(3)]
    with torch.no_grad():
        of_windows = [network(*(part[None] for part in window)) for window in windows]
    return losses, torch.stack(of_windows).mean().item(), network.state_dict()


def test_the_program_does_what_its_flags_say_and_saves_what_it_has_trained(tmp_path):
    flags = ["--balance", "none", "--seed", "3", "--learning-rate", "1e-3"]
    flags += ["--weight-decay", "0.3", "--capacity", "0.8"]
    flags += ["--train-samples", "24", "--batch-size", "6", "--epochs", "2"]
    flags += ["--max-norm", "0.5", "--warmup", "2"]
    losses, held_out, weights = trained_by_hand(tmp_path / "hand", flags)
    found = program(tmp_path / "program", *flags, nproc=1)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["validation_loss"] == pytest.approx(held_out, abs=1e-4)
    for name, value in model_of(tmp_path / "program").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)


def as_prepared(folder, flags):
    """What one update of this rank's model does, in words and numbers."""
    flags = [*flags, "--train-samples", "32", "--device", "cpu", "--out", folder]
    flags += ["--batch-size", "2"]
    with process_group() as (_, ranks):
        run = lesson20.prepare(lesson20.arguments(flags), ranks, torch.device("cpu"))
        tokens, targets = next(iter(run.loader))
        layers = expert_parallel.layers_of(run.network)
        found = []
        update = lambda: found.append(lesson20.update(run, tokens, targets, 1e-3))
        calls = watch.count_collectives(update)
        [row] = found
        gradients = [p.grad for p in run.network.parameters() if p.grad is not None]
        return {
            "mesh": run.mesh["expert"].mesh.tolist(),
            "blocks": [hasattr(block.mlp, "router") for block in run.network.blocks],
            "experts": [len(layers[0].bias), len(layers[0].experts.up)],
            "chosen": layers[0].choice.experts.shape[1],
            "shared": layers[0].shared is not None,
            "biases": layers[0].bias.abs().max().item(),
            "dropped": row[3].item(),
            "calls": calls,
            "norm": nn.utils.get_total_norm(gradients).item(),
            "tokens": tokens,
        }


def test_each_flag_of_the_program_does_what_it_says(tmp_path):
    job = partial(launch, as_prepared, str(tmp_path), timeout=600)
    of_ranks = job(["--expert-ranks", "2", "--top", "3", "--max-norm", "0.1"], nproc=4)
    for rank, found in enumerate(of_ranks):
        assert found["mesh"] == [rank // 2 * 2, rank // 2 * 2 + 1]  # neighbours
        assert found["blocks"] == [True] * 4 and found["experts"] == [8, 4]
        assert found["chosen"] == 3 and not found["shared"] and found["dropped"] == 0
        assert found["biases"] == pytest.approx(0.01)
        assert 0 < found["norm"] <= 0.1 * 1.001
        # the gradients twice, the norm, the loads
        assert found["calls"] == {"alltoall": 20, "allreduce": 4}
    texts = {found["tokens"].sum().item() for found in of_ranks}
    assert len(texts) == 4  # those who share experts read other texts, too

    flags = ["--experts", "6", "--every", "2", "--shared", "--balance", "loss"]
    flags += ["--capacity", "0.5"]
    found, *_ = job(flags, nproc=2)
    assert found["experts"] == [6, 3] and found["mesh"] == [0, 1]
    assert found["blocks"] == [False, True, False, True] and found["shared"]
    assert found["biases"] == 0 and 0.4 < found["dropped"] < 0.95
    assert found["calls"] == {"alltoall": 10, "allreduce": 4 + 2}

    flags = ["--balance", "none", "--capacity", "9"]
    found, *_ = job(flags, nproc=2)
    assert found["biases"] == found["dropped"] == 0
    assert found["calls"] == {"alltoall": 20, "allreduce": 4}
    found, *_ = job(["--bias-rate", "0.25", "--expert-ranks", "1"], nproc=2)
    assert found["biases"] == 0.25 and "alltoall" not in found["calls"]


def test_the_weight_of_the_balance_loss_changes_what_routers_learn(tmp_path):
    flags = ["--balance", "loss", "--expert-ranks", "1", "--loss-weight"]
    small, large = (
        program(tmp_path / weight, *flags, weight, nproc=1)["history"][-1]
        for weight in ("0", "3")
    )
    assert large["busiest_expert"] < 0.9 * small["busiest_expert"]


@pytest.mark.parametrize(
    "flags, world_size, expected",
    [
        (["--expert-ranks", "3"], 4, "--expert-ranks 3 does not divide 4 ranks"),
        (
            ["--expert-ranks", "2", "--experts", "9"],
            2,
            "--expert-ranks 2 does not divide --experts 9",
        ),
        (["--top", "9"], 1, "--top 9 is more than --experts 8"),
        (["--every", "5"], 1, "--every 5 is more than the 4 blocks of --shape small"),
        (["--capacity", "0"], 1, "--capacity must be above 0"),
    ],
)
def test_flags_that_do_not_fit_give_one_line(flags, world_size, expected):
    with pytest.raises(UsageError, match=f"^{expected}"):
        args = lesson20.arguments(flags)
        lesson20.mesh_for(args, world_size, torch.device("cpu"))


def frozen(way):
    """Whether experts that were frozen still are, when ranks share them."""
    with process_group() as (_, ranks):
        network = a_gpt()
        for layer in expert_parallel.layers_of(network):
            layer.experts.requires_grad_(False)
        network = way(network, mesh_of(ranks))
        experts_of, _ = expert_parallel.of_experts(network)
        dist.barrier()  # a rank that leaves closes groups that others still make
        return len(experts_of), any(value.requires_grad for value in experts_of)


@pytest.mark.parametrize("way", [expert_parallel.share, torch_experts.shard])
def test_frozen_experts_stay_frozen_when_ranks_share_them(way):
    assert launch(frozen, way, nproc=2, timeout=600) == [(4, False)] * 2


@pytest.mark.parametrize("capacity, kept", [(1.07, 7), (1.0, 6), (0.1, 6), (2.5, 8)])
def test_a_capacity_is_rounded_up_to_whole_choices(capacity, kept):
    """Of 8 choices, three are of expert 0, and five of others."""
    layer = experts.MixtureOfExperts(8, 4, 4, 1, capacity)
    chosen = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5])
    assert len(layer.kept_by_expert(chosen)) == kept
    layer.eval()
    assert len(layer.kept_by_expert(chosen)) == 8


# ---- with torch ----


def gradients_with_torch(divide, expert_ranks=2, dtype=torch.float64):
    """How far FSDP's gradients of 2 x 2 ranks are from one process's; how DTensors are
    placed; and the norm by our clipping, of one process's.
    """
    with process_group():
        [text] = texts()
        mesh = mesh_of(expert_ranks)
        _, _, gradients = in_one_process(a_gpt().to(dtype), *text, 0)
        network = torch_experts.shard(a_gpt().to(dtype), mesh, divide)
        loss_of(network, *own(text), 0)[0].backward()
        off = {
            name: distance(value.grad.full_tensor(), gradients[name])
            for name, value in network.named_parameters()
        }
        norm = torch_experts.clip_gradients(network, 1e-3).item()
        one = nn.utils.get_total_norm(gradients.values()).item()
        up = network.blocks[0].mlp.experts.up
        clipped = [value.grad.full_tensor() for value in network.parameters()]
        left = nn.utils.get_total_norm(clipped).item()
        return off, (up.placements, up.device_mesh.mesh_dim_names), norm / one, left


@pytest.mark.parametrize(
    "ranks, expert_ranks, bits", [(4, 2, 64), (4, 1, 64), (4, 2, 32), (3, 3, 32)]
)
def test_torchs_fsdp_and_experts_equal_one_process(ranks, expert_ranks, bits):
    dtype, most = {64: (torch.float64, 1e-12), 32: (torch.float32, 1e-5)}[bits]
    job = partial(gradients_with_torch, True, expert_ranks, dtype)
    off, _, norm, left = launch(job, nproc=ranks, timeout=600)[0]
    assert len(off) == 26 and max(off.values()) < most
    assert norm == pytest.approx(1, rel=most) and left == pytest.approx(1e-3, rel=1e-2)


def test_without_the_divide_factor_experts_are_twice_too_large():
    off, (placements, names), *_ = launch(
        gradients_with_torch, False, nproc=4, timeout=600
    )[0]
    wrong = {name: value for name, value in off.items() if value > 1e-12}
    assert len(wrong) == 4 and all("experts" in name for name in wrong)
    assert list(wrong.values()) == pytest.approx([1.0] * 4, rel=1e-12)
    assert names == ("data", "expert") and len(placements) == 2


def clip_over_two_meshes():
    with process_group():
        network = torch_experts.shard(a_gpt(), mesh_of(2))
        loss_of(network, *own(texts()[0]), 0)[0].backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def test_torchs_clipping_refuses_two_meshes():
    with pytest.raises(Exception, match="must have the same mesh"):
        launch(clip_over_two_meshes, nproc=4, timeout=600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_grouped_product_computes_what_the_loop_does(dtype):
    """Also with an expert without tokens, whose gradient is 0."""
    torch.manual_seed(0)
    layer = experts.Experts(3, 16, 32)
    for value in layer.parameters():
        nn.init.normal_(value, std=0.3)
    layer, found = layer.to(dtype), []
    rows = torch.randn(24, 16, dtype=dtype)
    for compute in (layer, partial(torch_experts.grouped, layer)):
        layer.zero_grad()
        out = compute(rows, [8, 0, 16])
        out.float().square().sum().backward()
        found.append([out.detach(), layer.up.grad.clone(), layer.down.grad.clone()])
    most = 1e-5 if dtype == torch.float32 else 0.03
    for one, other in zip(*found):
        assert distance(other.float(), one.float()) < most
    assert found[1][1][1].abs().max() == 0
