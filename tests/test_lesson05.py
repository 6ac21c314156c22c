"""Lesson 05: SyncBatchNorm on ranks equals BatchNorm on the joined batch, forward,
backward, in training and in the program.
"""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course import lesson05
from ddp_course.data.images import load_images
from ddp_course.models.convnets import NormNet
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch
from ddp_course.ranks.watch import count_collectives

LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
LENGTHS = [[4, 3], [6, 1], [7, 0], [3, 1, 3], [0, 0, 7]]
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]

if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # since torch 2.15
    OPTIONS.append({"bias": False})


def two_steps(parts, options, convert):
    """Two forward and backward passes of this rank's part: the values of this rank, and
    those that all ranks share.
    """
    with process_group() as (rank, _):
        x = parts[rank].clone().requires_grad_(True)
        layer = LAYERS[x.dim()](x.shape[1], **options).to(x.dtype)
        if options.get("affine", True):
            with torch.no_grad():
                layer.weight.copy_(torch.arange(x.shape[1]) + 0.5)
                if layer.bias is not None:
                    layer.bias.copy_(torch.arange(x.shape[1]) - 1)
        if convert:
            layer = lesson05.convert_sync_batchnorm(layer)
            assert type(layer) is lesson05.SyncBatchNorm
        for scale in (1, 2):
            output = layer(scale * x + scale)
            output.pow(3).sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)  # the sum, since the loss is a sum
        layer.eval()
        own = [output.detach(), x.grad]
        # without them, eval normalises with the rank's own batch, as torch's does
        if layer.track_running_stats:
            own.append(layer(x).detach())
        gradients = {name: value.grad for name, value in layer.named_parameters()}
        return own, gradients | dict(layer.named_buffers())


def assert_equal_to_the_joined_batch(
    joined, lengths, options, convert=True, **tolerance
):
    [(own, common)] = launch(two_steps, [joined], options, False, nproc=1)
    apart = launch(
        two_steps, joined.split(lengths), options, convert, nproc=len(lengths)
    )
    for place, expected in enumerate(own):
        torch.testing.assert_close(
            torch.cat([rank[0][place] for rank in apart]), expected, **tolerance
        )
    for _, of_rank in apart:
        assert of_rank.keys() == common.keys()
        torch.testing.assert_close(of_rank, common, **tolerance)


def a_batch(dimensions, dtype=torch.float64, mean=3.0):
    generator = torch.Generator().manual_seed(dimensions)
    shape = (7, 3, 2, 4, 3)[:dimensions]
    return (mean + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
        dtype
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_forward_backward_and_statistics_are_those_of_the_joined_batch(
    dimensions, lengths
):
    assert_equal_to_the_joined_batch(
        a_batch(dimensions), lengths, {}, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_are_with_every_option(options):
    assert_equal_to_the_joined_batch(a_batch(4), [5, 2], options, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_they_are_in_32_bits_also_far_from_zero(mean):
    assert_equal_to_the_joined_batch(
        a_batch(4, torch.float32, mean), [5, 2], {}, rtol=1e-3, atol=2e-3
    )


def in_16_bits(make, dtype):
    """The output and the weight's gradient of a layer in float32 for a batch in 16."""
    with process_group():
        layer = make(nn.BatchNorm1d(3))
        x = a_batch(2).repeat(40, 1)[:, :3].to(dtype).requires_grad_(True)
        output = layer(x)
        output.float().pow(3).sum().backward()
        return output.detach().float(), layer.weight.grad, output.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_it_rounds_no_more_than_torchs_batchnorm(dtype):
    [ours] = launch(in_16_bits, lesson05.convert_sync_batchnorm, dtype, nproc=1)
    [torchs] = launch(in_16_bits, lambda layer: layer, dtype, nproc=1)
    assert ours[2] == torchs[2] == dtype
    torch.testing.assert_close(ours[1], torchs[1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours[0], torchs[0], rtol=1e-2, atol=1e-2)


def test_without_weights_an_in_place_relu_may_follow():
    def train():
        with process_group():
            layer = lesson05.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False))
            x = a_batch(2)[:, :3].clone().requires_grad_(True)
            torch.relu_(layer(x)).sum().backward()
            return x.grad is not None

    assert launch(train, nproc=2) == [True, True]


def test_a_batchnorm_that_is_used_twice_stays_one_layer():
    norm = nn.BatchNorm1d(4)
    model = lesson05.convert_sync_batchnorm(nn.Sequential(norm, nn.Linear(4, 4), norm))
    assert type(model[0]) is lesson05.SyncBatchNorm and model[0] is model[2]


def test_an_ordinary_batchnorm_on_each_rank_would_be_found():
    with pytest.raises(AssertionError):
        assert_equal_to_the_joined_batch(
            a_batch(4), [5, 2], {}, convert=False, rtol=1e-2, atol=1e-2
        )


def test_the_backward_pass_is_the_derivative_of_the_forward_pass():
    def check():
        with process_group():
            x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
            return torch.autograd.gradcheck(
                lambda x: lesson05.NormalizeOverRanks.apply(x, 1e-3)[0], (x,)
            )

    assert launch(check, nproc=1) == [True]


def by_autograd(x, eps):
    """NormalizeOverRanks with a differentiable all-reduce, so without a backward."""
    count = x.new_tensor([x.numel() // x.shape[1]])
    parts = [lesson05.sum_by_channel(part) for part in (x, x.square())]
    sums = functional.all_reduce(torch.cat([*parts, count]), "sum", dist.group.WORLD)
    total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
    mean = total / count
    scale = (squares / count - mean.square() + eps).rsqrt()
    along = lesson05.along_channels
    return (x - along(mean, x)) * along(scale, x)


def by_hand(x, eps):
    return lesson05.NormalizeOverRanks.apply(x, eps)[0]


def saved_tensors(normalize, x):
    """How many tensors of the size of x a forward saves for its backward."""
    saved = {}

    def save(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = normalize(x, 1e-5)
    return list(saved.values()).count(x.numel()), output


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_its_backward_is_what_autograd_finds_through_a_differentiable_all_reduce(
    lengths,
):
    def gradient(normalize, parts):
        with process_group() as (rank, _):
            x = parts[rank].clone().requires_grad_(True)
            saved, output = saved_tensors(normalize, x)
            ((rank + 1) * output.pow(3)).sum().backward()
            return x.grad, saved

    parts = a_batch(4).split(lengths)
    of_ways = [
        launch(gradient, way, parts, nproc=len(parts)) for way in (by_hand, by_autograd)
    ]
    for (ours, one), (autograds, two) in zip(*of_ways):
        torch.testing.assert_close(ours, autograds, rtol=1e-9, atol=1e-11)
        assert not ours.numel() or (one, two) == (1, 2)


@pytest.mark.parametrize("nproc", [2, 3])
def test_training_under_ddp_equals_one_process_on_the_joined_batch(nproc):
    images = torch.randn(
        3,
        12,
        1,
        28,
        28,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )
    labels = torch.randint(10, (3, 12), generator=torch.Generator().manual_seed(2))

    def train():
        with process_group() as (rank, world_size):
            torch.manual_seed(rank)  # DDP gives all ranks the model of rank 0
            model = NormNet().double()
            if world_size > 1:
                model = lesson05.convert_sync_batchnorm(model)
            model = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for batch, answers in zip(images, labels):
                optimizer.zero_grad()
                loss = F.nll_loss(
                    model(batch.chunk(world_size)[rank]),
                    answers.chunk(world_size)[rank],
                )
                loss.backward()
                optimizer.step()
            return model.module.state_dict()

    [alone] = launch(train, nproc=1)
    for state in launch(train, nproc=nproc):
        torch.testing.assert_close(state, alone, rtol=1e-9, atol=1e-11)


def test_a_layer_takes_one_all_reduce_forward_and_one_backward():
    def count():
        with process_group():
            layer, x = lesson05.SyncBatchNorm(4), torch.randn(3, 4, requires_grad=True)
            forward = count_collectives(lambda: layer(x))
            output = layer(x).sum()
            return (
                forward,
                count_collectives(output.backward),
                count_collectives(lambda: layer.eval()(x)),
            )

    assert launch(count) == [({"allreduce": 1}, {"allreduce": 1}, {})] * 2


def test_one_value_on_all_ranks_together_is_refused_on_every_rank():
    def one_value(lengths):
        with process_group() as (rank, _):
            try:
                lesson05.SyncBatchNorm(2)(torch.randn(lengths[rank], 2))
            except ValueError as error:
                return str(error)

    told = "Expected more than 1 value per channel when training, got 1 on all ranks"
    assert launch(one_value, [1, 0]) == [told] * 2
    assert launch(one_value, [1, 1]) == [None] * 2


@pytest.mark.parametrize("shape", [(4,), (4, 5), (4, 2, 3)])
def test_a_shape_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match=r"expected \(batch, 3, ...\), got"):
        lesson05.SyncBatchNorm(3)(torch.randn(shape))


def test_without_a_process_group_it_is_an_ordinary_batchnorm():
    x = a_batch(4, torch.float32)
    torch.testing.assert_close(lesson05.SyncBatchNorm(3)(x), nn.BatchNorm2d(3)(x))


# ---- conversion ----


def a_network():
    inner = nn.Sequential(
        nn.BatchNorm1d(4, momentum=None), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)
    )
    return nn.ModuleDict(
        {
            "inner": inner,
            "norm": nn.BatchNorm2d(3, eps=0.1, affine=False),
            "other": nn.Linear(2, 2),
        }
    )


def test_conversion_keeps_parameters_buffers_names_options_and_modes():
    network = a_network()
    network.inner[0].eval()
    network.inner[0].weight.requires_grad_(False)
    before = dict(network.named_parameters()) | dict(network.named_buffers())
    converted = lesson05.convert_sync_batchnorm(network)
    after = dict(converted.named_parameters()) | dict(converted.named_buffers())
    assert converted is network and list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    kinds = [type(module).__name__ for module in converted.modules()]
    assert kinds == [
        "ModuleDict",
        "Sequential",
        "SyncBatchNorm",
        "InstanceNorm1d",
        "GroupNorm",
        "SyncBatchNorm",
        "Linear",
    ]
    first, second = converted.inner[0], converted.norm
    assert (first.momentum, first.training, first.weight.requires_grad) == (
        None,
        False,
        False,
    )
    assert (second.eps, second.affine, second.training) == (0.1, False, True)
    assert (
        type(lesson05.convert_sync_batchnorm(nn.BatchNorm1d(2)))
        is lesson05.SyncBatchNorm
    )
    assert lesson05.convert_sync_batchnorm(first) is first


def test_a_layer_that_is_replaced_after_wrapping_is_not_averaged():
    def train(options):
        with process_group() as (rank, _):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            model = DistributedDataParallel(layers, **options)
            layers[1] = lesson05.SyncBatchNorm(4)
            torch.manual_seed(rank)
            for _ in range(2):
                model(torch.randn(8, 4)).pow(4).mean().backward()
            return layers[0].weight.grad, layers[1].weight.grad

    first, second = launch(train, {"find_unused_parameters": True})
    torch.testing.assert_close(first[0], second[0])
    assert not torch.allclose(first[1], second[1], rtol=1e-3)
    with pytest.raises(RankError, match="finished reduction in the prior iteration"):
        launch(train, {})


def test_saved_values_go_back_into_batchnorm():
    plain, converted = NormNet(), lesson05.convert_sync_batchnorm(NormNet())
    plain.load_state_dict(converted.state_dict())
    converted.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(converted.state_dict())


# ---- the program ----


def test_with_two_images_per_rank_it_trains_better_synchronised(tmp_path):
    accuracy = {}
    for sync in ("--sync", "--no-sync"):
        options = [
            "--data",
            "digits",
            "--train-samples",
            "288",
            "--epochs",
            "2",
            "--batch-size",
            "2",
            sync,
        ]
        results = launch(lesson05.main, [*options, "--out", str(tmp_path)])
        assert len({result["params_sha256"] for result in results}) == 1
        accuracy[sync] = results[0]["test_accuracy"]
    assert accuracy["--sync"] > accuracy["--no-sync"] + 0.05


@pytest.mark.parametrize("sync", ["--sync", "--no-sync"])
def test_the_accuracy_is_that_of_the_saved_model(sync, tmp_path):
    """Without --sync, each rank has other statistics at the end of an epoch."""
    flags = ["--data", "digits", "--train-samples", "288", "--batch-size", "2"]
    flags += ["--epochs", "1", sync, "--out", str(tmp_path)]
    told = launch(lesson05.main, flags)[0]
    network = NormNet()
    network.load_state_dict(torch.load(tmp_path / "model.pt"))
    network.eval()
    _, test_set = load_images("digits", 288)
    loader = DataLoader(test_set, 90)
    right = sum((network(x).argmax(1) == y).sum().item() for x, y in loader)
    assert told["test_samples"] == len(test_set)
    assert told["test_accuracy"] == pytest.approx(right / len(test_set), abs=1e-4)


def test_a_rank_that_stays_away_is_noticed():
    def stays_away():
        with process_group(timeout=1) as (rank, _):
            if rank == 0:
                lesson05.SyncBatchNorm(2)(torch.randn(3, 2))
            else:
                dist.barrier()

    with pytest.raises(RankError, match="[Tt]imed out"):
        launch(stays_away, timeout=20)
