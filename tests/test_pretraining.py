"""What lesson 10 has for a second reading: Muon, schedules, packing, streams."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_course import UsageError
from ddp_course.data import streams
from ddp_course.data.documents import Documents
from ddp_course.data.tokenizers import Bytes
from ddp_course.models import muon, packed, recipe
from ddp_course.models.gpt import GPT
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

SMALL = {"context": 16, "layers": 2, "heads": 2, "width": 32}

# ---- Muon ----


@pytest.mark.parametrize("shape", [(48, 32), (32, 128), (64, 64)])
def test_muon_by_hand_is_torchs(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(3, *shape)
    how = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2}
    found = []
    for kind, more in (
        (muon.Muon, {}),
        (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
    ):
        matrix = nn.Parameter(start.clone())
        optimizer = kind([matrix], **how, **more)
        for gradient in gradients:
            matrix.grad = gradient.clone()
            optimizer.step()
        found.append(matrix.detach())
    torch.testing.assert_close(*found)


def test_all_singular_values_become_about_one():
    torch.manual_seed(0)
    matrix = torch.randn(64, 256) * torch.logspace(-1, 0, 64)[:, None]
    values = torch.linalg.svdvals(muon.orthogonalised(matrix, dtype=torch.float64))
    assert 0.5 < values.min() and values.max() < 1.3


def train_matrices(updates=3):
    with process_group() as (rank, ranks):
        torch.manual_seed(0)
        network = GPT(**SMALL).double()
        hidden = muon.hidden_matrices(network)
        kind = muon.OwnedMuon if ranks > 1 else muon.Muon
        optimizer = kind(hidden, lr=0.01, dtype=torch.float64)
        for step in range(updates):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(256, (12, 17), generator=generator)
            tokens = tokens.chunk(ranks)[rank]
            network.zero_grad()
            logits = network(tokens[:, :-1]).flatten(0, 1)
            F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
        return [matrix.detach() for matrix in hidden], len(optimizer.state)


def test_owners_train_the_matrices_of_one_process_and_divide_the_momentum():
    [(expected, count)] = launch(train_matrices, nproc=1)
    found = launch(train_matrices, nproc=3)
    for matrices, _ in found:
        torch.testing.assert_close(matrices, expected, rtol=1e-10, atol=1e-12)
    assert sum(owned for _, owned in found) == count and min(found[0][1:]) > 0


def test_owners_have_about_equally_much_to_do():
    matrices = muon.hidden_matrices(GPT(layers=4, heads=2, width=64))
    for ranks in (2, 3, 4):
        loads = Counter()
        for owner, matrix in zip(muon.owners_of(matrices, ranks), matrices):
            loads[owner] += min(matrix.shape) * matrix.numel()
        assert max(loads.values()) < 1.3 * sum(loads.values()) / ranks


def other_ways():
    """Muon by ZeRO's owners, and on FSDP2's shards: how far each is from one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    with process_group():
        found = {}
        for shape in ((48, 32), (32, 48)):
            torch.manual_seed(0)
            layer = nn.Linear(*reversed(shape), bias=False)
            gradient = torch.randn(shape)
            alone, owned = (layer.weight.detach().clone() for _ in range(2))
            for matrix in (alone, owned):
                matrix.requires_grad_().grad = gradient.clone()
            torch.optim.Muon([alone], lr=0.1).step()
            ZeroRedundancyOptimizer([owned], torch.optim.Muon, lr=0.1).step()
            fully_shard(layer)
            mesh = layer.weight.device_mesh
            layer.weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            step = torch.optim.Muon(layer.parameters(), lr=0.1).step
            sent = watch.count_collectives(step)
            off = (layer.weight.full_tensor() - alone).norm() / (0.1 * alone.norm())
            found[shape] = torch.equal(owned, alone), off.item(), sum(sent.values())
        return found


def test_zeros_owners_and_fsdps_shards_take_torchs_muon_too():
    for found in launch(other_ways, nproc=2):
        for equal, off, collectives in found.values():
            assert equal and off < 0.1 and collectives > 5


def test_with_muon_every_parameter_has_one_optimizer():
    model = GPT(**SMALL)
    groups = recipe.parameter_groups(model, 0.3)
    parts = recipe.optimizers(groups, "muon", model)
    taken = [
        {id(value) for group in part.param_groups for value in group["params"]}
        for part in parts.values()
    ]
    assert not taken[0] & taken[1]
    assert taken[0] | taken[1] == {id(value) for value in model.parameters()}
    assert taken[1] == {id(value) for value in muon.hidden_matrices(model)}
    assert parts["muon"].param_groups[0]["weight_decay"] == 0.3
    together = muon.Together(*parts.values())
    assert len(together.param_groups) == 3
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    before = model.blocks[0].mlp.expand.weight.detach().clone()
    together.step()
    assert not torch.equal(before, model.blocks[0].mlp.expand.weight)
    together.zero_grad()
    assert all(value.grad is None for value in model.parameters())


# ---- schedules ----


def test_warm_up_stable_decay_does_not_know_its_end_until_it_decays():
    args = SimpleNamespace(learning_rate=2e-3, warmup=10, schedule="wsd")
    short, long = (
        [recipe.learning_rate(step, steps, args) for step in range(steps)]
        for steps in (100, 1000)
    )
    assert short[:80] == long[:80] and short[10:80] == [2e-3] * 70
    falls = [one - other for one, other in zip(short[79:], short[80:])]
    assert len(falls) == 20 and falls == pytest.approx([2e-3 / 21] * 20)
    assert short[-1] == pytest.approx(2e-3 / 21)


# ---- several documents in a window ----


def test_a_packed_document_has_the_logits_that_it_has_alone():
    torch.manual_seed(0)
    model = packed.PackedGPT(0, **SMALL | {"context": 32}).double()
    plain = GPT(**SMALL | {"context": 32}).double()
    plain.load_state_dict(model.state_dict())
    documents = [
        torch.cat([torch.randint(1, 256, (length,)), torch.tensor([0])])
        for length in (5, 11, 1, 9)
    ]
    rows = torch.stack([torch.cat(documents), torch.cat(documents[::-1])])
    alone = [plain(document[None])[0] for document in documents]
    expected = torch.stack([torch.cat(alone), torch.cat(alone[::-1])])
    torch.testing.assert_close(model(rows), expected, rtol=0, atol=1e-12)
    assert (plain(rows) - expected).abs().max() > 0.01


def test_the_loss_of_a_packed_window_leaves_out_the_targets_across_borders():
    torch.manual_seed(0)
    model = packed.PackedGPT(0, **SMALL)
    tokens = torch.tensor([[7, 8, 0, 9, 0, 5, 6]])
    targets = torch.tensor([[8, 0, 9, 0, 5, 6, 3]])
    logits, kept = model(tokens)[0], [0, 1, 3, 5, 6]
    expected = F.cross_entropy(logits[kept], targets[0, kept])
    torch.testing.assert_close(model(tokens, targets), expected)


# ---- streams ----


@pytest.fixture
def two_sources(tmp_path):
    """Two texts of three files and 33 documents each."""
    for name in "ab":
        for file in range(3):
            lines = [f"{name}{file}.{i} " + name * (5 * i % 37) for i in range(11)]
            entries = "".join(json.dumps({"text": line}) + "\n" for line in lines)
            (tmp_path / f"{name}{file}.jsonl").write_text(entries)
    return [Documents(sorted(tmp_path.glob(f"{name}*"))) for name in "ab"]


@pytest.mark.parametrize("readers", [1, 4])
def test_the_readers_share_each_document_once_per_pass(two_sources, readers):
    read = []
    for reader in range(readers):
        tokens = []
        for window, state in streams.windows_of(
            two_sources[0], Bytes(), 8, reader, readers
        ):
            tokens += window[:-1].tolist()
            if state[0] == 2:  # it is in its third pass
                break
        read += bytes(tokens).decode().split("\n\0\n")
    documents = [document.decode() for _, document in two_sources[0].after()]
    counts = Counter(read)
    assert all(counts[document] == 2 for document in documents)


def batches(texts, number, position=None, workers=0, ranks=2):
    data = streams.Mixture(texts, Bytes(), 16, (3, 1), 1, ranks)
    reached = streams.Position(data)
    if position:
        reached.load_state_dict(json.loads(position))
    how = {"num_workers": workers, "collate_fn": streams.collate}
    found = []
    for batch in itertools.islice(DataLoader(data, 4, **how), number):
        reached.used(batch)
        found.append(
            [batch["tokens"].tolist(), batch["targets"].tolist(), batch["texts"]]
        )
    return found, json.dumps(reached.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_resumes_exactly_wherever_it_was(two_sources, workers):
    whole, _ = batches(two_sources, 60, workers=workers)
    for first in (0, 7, 50):
        one, position = batches(two_sources, first, workers=workers)
        other, _ = batches(two_sources, 60 - first, position, workers)
        assert one + other == whole
    texts = [text for *_, of_batch in whole for text in of_batch]
    assert 0.15 < sum(texts) / len(texts) < 0.35


def test_a_position_of_other_readers_is_refused(two_sources):
    _, position = batches(two_sources, 3)
    with pytest.raises(UsageError, match="one of 2 readers, not 3: use as many ranks"):
        batches(two_sources, 3, position, ranks=3)


def test_more_readers_than_documents_are_refused(two_sources):
    with pytest.raises(UsageError, match="fewer documents than 40 readers"):
        next(streams.windows_of(two_sources[0], Bytes(), 8, 35, 40))
