"""Long contexts: attention to tokens of other ranks, by ring and by all-to-all, equals one
process; what it sends, computes and keeps is what the formulas say; mistakes are found.
"""

import json
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError, lesson10, lesson19
from ddp_course.models import context_parallel, torch_context
from ddp_course.models.context_parallel import LAYOUTS, Sharing, visible
from ddp_course.models.dtensors import full
from ddp_course.models.gpt import GPT
from ddp_course.models.modern import ModernGPT
from ddp_course.models.packed import IGNORED
from ddp_course.models.recipe import parameter_groups
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch, start_server

TOKENS, HEADS = 48, 12  # which 2, 3 and 4 ranks divide, in two pieces each
WAYS = [(layout, "ring") for layout in LAYOUTS] + [("contiguous", "ulysses")]


@pytest.fixture(scope="module", autouse=True)
def warm():
    start_server()


# ---- attention ----


def drawn(groups=HEADS):
    """Queries, keys, values, and gradients of the output; of two texts, in 64 bits."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, groups, groups, HEADS)
    sizes = ((2, number, TOKENS, 8) for number in heads)
    return [torch.randn(size, generator=generator).double() for size in sizes]


def documents_of_two_texts():
    return torch.stack([torch.arange(TOKENS) // 20, torch.arange(TOKENS) // 7])


def in_one_process(documents, groups=HEADS):
    """The output, and the gradients of queries, keys and values."""
    *three, gradient = drawn(groups)
    three = [part.requires_grad_() for part in three]
    mask = visible(torch.arange(TOKENS), torch.arange(TOKENS), documents)
    output = F.scaled_dot_product_attention(*three, attn_mask=mask, enable_gqa=True)
    output.backward(gradient)
    return [output.detach(), *(part.grad for part in three)]


def on_ranks(layout, how, documents, groups=HEADS):
    """The same of a rank's tokens."""
    sharing = Sharing(layout)
    sharing.documents = documents
    *three, gradient = (sharing.own(part, 2) for part in drawn(groups))
    three = [part.requires_grad_() for part in three]
    output = context_parallel.ATTENTION[how](*three, sharing)
    sharing.documents = torch.zeros(2, TOKENS, dtype=torch.long)  # of the next text
    output.backward(gradient)
    return [output.detach(), *(part.grad for part in three)]


def attention_differences(groups=HEADS, ways=WAYS, fault=None, layout_of_fault=None):
    """The largest difference of output and gradients, {(layout, way, documents): it}."""
    with process_group():
        off = {}
        right = {
            name: in_one_process(documents, groups)
            for name, documents in (("one", None), ("many", documents_of_two_texts()))
        }
        if fault:
            fault()
        for layout, how in ways:
            for name, documents in (("one", None), ("many", documents_of_two_texts())):
                found = on_ranks(layout, how, documents, groups)
                expected = (Sharing(layout).own(part, 2) for part in right[name])
                off[layout, how, name] = max(
                    (one - other).abs().max().item()
                    for one, other in zip(found, expected)
                )
        return off


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_output_and_gradients_equal_one_process_in_each_layout(ranks):
    for off in launch(attention_differences, nproc=ranks):
        assert len(off) == 8 and max(off.values()) < 1e-13


def test_heads_of_queries_may_share_keys_and_values():
    for off in launch(attention_differences, 3, nproc=3):
        assert len(off) == 8 and max(off.values()) < 1e-13
    ring = [way for way in WAYS if way[1] == "ring"]
    for off in launch(attention_differences, 1, ring, nproc=2):
        assert len(off) == 6 and max(off.values()) < 1e-13


def local_positions():
    Sharing.places = lambda self, tokens: [
        torch.arange(tokens // self.ranks) for _ in range(self.ranks)
    ]


def no_delta():
    """Backward without the part of the softmax's own sum."""
    right = context_parallel.attend_backward
    context_parallel.attend_backward = lambda *args: right(*args[:-1], 0 * args[-1])


def means_added_up():
    """Outputs of blocks are averaged, not weighted by their sums."""
    right = context_parallel.merge
    context_parallel.merge = lambda a, la, b, lb: ((a + b) / 2, right(a, la, b, lb)[1])


def gradients_stay_abroad():
    """Gradients of keys and values that are not sent on, as keys and values are not."""
    right, calls = context_parallel.rotate, []

    def rotate(tensors, group):
        calls.append(tensors)
        sent = right(tensors, group)
        ranks = dist.get_world_size(group)
        is_last = len(calls) % (3 * ranks - 2) == 0  # of forward and backward
        return (lambda: sent() and tensors) if is_last else sent

    context_parallel.rotate = rotate


def documents_of_the_first_tokens():
    """Documents are looked up by local positions."""
    right = context_parallel.visible

    def visible(queries, keys, documents=None):
        found = right(queries, keys)
        if documents is None:
            return found
        part = documents[:, : len(queries), None] == documents[:, None, : len(keys)]
        return found & part[:, None]

    context_parallel.visible = visible


@pytest.mark.parametrize(
    "fault",
    [
        local_positions,
        no_delta,
        means_added_up,
        gradients_stay_abroad,
        documents_of_the_first_tokens,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found_by_the_comparison_though_nothing_raises(fault):
    job = partial(attention_differences, ways=[("striped", "ring")], fault=fault)
    off = launch(job, nproc=2)[0]
    assert max(off.values()) > 0.01


def counted(documents=None):
    """What forward and backward send, [{kind: (number, bytes)}], and the pairs of each
    block, by layout and way.
    """
    found, attend = {}, context_parallel.attend
    with process_group():
        for way in WAYS:
            sharing, pairs = Sharing(way[0]), []
            sharing.documents = documents

            def counting(query, key, value, allowed, pairs=pairs):
                pairs.append(int(allowed.sum()))
                return attend(query, key, value, allowed)

            context_parallel.attend = counting
            *three, gradient = (sharing.own(part, 2) for part in drawn())
            three = [part.requires_grad_() for part in three]
            with watch.Watch() as forward:
                output = context_parallel.ATTENTION[way[1]](*three, sharing)
            with watch.Watch() as backward:
                output.backward(gradient)
            found[way] = (
                [sizes_by_kind(log) for log in (forward.log, backward.log)],
                pairs,
            )
    return found


def sizes_by_kind(log):
    sizes = {}
    for entry in log:
        if entry["name"] != "recv":
            sizes.setdefault(entry["name"], []).append(entry["whole"])
    return {kind: (len(of), sum(of)) for kind, of in sizes.items()}


OF_ALL = 8 * 2 * HEADS * TOKENS * 8  # bytes of the queries of two texts


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_messages_and_pairs_are_the_formulas(ranks):
    own, others = OF_ALL // ranks, ranks - 1
    piece, half = TOKENS // ranks, TOKENS // ranks // 2
    for rank, found in enumerate(launch(counted, nproc=ranks)):
        for layout in LAYOUTS:
            (forward, backward), pairs = found[layout, "ring"]
            assert forward == {"send": (2 * others, 2 * others * own)}
            there_and_home = 2 * others + 2 * ranks
            assert backward == {"send": (there_and_home, there_and_home * own)}
            told = context_parallel.pairs(layout, TOKENS, ranks)[rank]
            assert pairs == [number for number in told if number]
            if layout == "zigzag":
                assert told == [half * (2 * half + 1)] + [2 * half**2] * others
            if layout == "contiguous":
                assert pairs == [piece * (piece + 1) // 2] + [piece**2] * rank
        (forward, backward), _ = found["contiguous", "ulysses"]
        assert forward == backward == {"alltoall": (4, 4 * own)}


def test_with_documents_the_blocks_have_the_pairs_that_are_counted_without_ranks():
    documents = torch.tensor([[0] * 5 + [1] * (TOKENS - 5), [0] * 20 + [1] * 28])
    for rank, found in enumerate(launch(counted, documents, nproc=3)):
        for layout in LAYOUTS:
            told = context_parallel.pairs(layout, TOKENS, 3, documents)[rank]
            # ranks whose tokens are all later are skipped
            plain = context_parallel.pairs(layout, TOKENS, 3)[rank]
            _, pairs = found[layout, "ring"]
            assert pairs == [number for number, of in zip(told, plain) if of]
    zigzag = [sum(of) for of in context_parallel.pairs("zigzag", TOKENS, 3, documents)]
    assert max(zigzag) > 1.02 * sum(zigzag) / 3


def distances_in_16_bits():
    """Of the ring's and of torch's attention in bf16, from attention in 64 bits."""
    with process_group():
        right, sharing, found = in_one_process(None), Sharing("zigzag"), []
        *three, gradient = (2 * part for part in drawn())
        right = [2 * part for part in right]
        for dtype in (torch.float64, torch.bfloat16, None):
            parts = [part.to(dtype or torch.bfloat16) for part in (*three, gradient)]
            if dtype is None:
                parts = [sharing.own(part, 2) for part in parts]
            parts = [part.detach().requires_grad_() for part in parts]
            if dtype is None:
                output = context_parallel.ring(*parts[:3], sharing)
            else:
                output = F.scaled_dot_product_attention(*parts[:3], is_causal=True)
            output.backward(parts[3])
            found.append([output.detach(), *(part.grad for part in parts[:3])])
        right, of_torch, of_ring = found
        distance = lambda one, other: ((one - other).norm() / other.norm()).item()
        return [
            (distance(a, b), distance(c, sharing.own(b, 2)))
            for a, c, b in zip(of_torch, of_ring, right)
        ]


def test_in_16_bits_the_ring_is_nearly_as_exact_as_attention_in_one_process():
    for of_rank in launch(distances_in_16_bits, nproc=2):
        assert all(ring < 6 * one < 0.1 for one, ring in of_rank), of_rank


# ---- memory ----


def memory(tokens, how):
    """The highest use and what is kept, in bytes, by attention and its gradients."""
    with process_group() as (_, ranks):
        sharing = Sharing("contiguous" if how == "ulysses" else "zigzag")
        with watch.memory_timeline() as line:
            size = 1, 12, tokens // ranks, 16
            three = [torch.randn(size, requires_grad=True) for _ in range(3)]
            context_parallel.ATTENTION[how](*three, sharing).sum().backward()
            time.sleep(0.3)  # gloo's thread holds what it has sent for a moment longer
            torch.empty(0)  # an operation, after which only what is kept is left
        return max(line), line[-1]


@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_what_a_rank_keeps_falls_with_the_ranks_and_its_highest_use_too(how):
    """Fastest in the ring, which computes the scores of one block at a time."""
    (highest, kept), *shared = (
        launch(memory, 768, how, nproc=ranks)[0] for ranks in (1, 2, 3, 4)
    )
    of_all = 4 * 12 * 768 * 16  # bytes of the queries, as of keys and of values
    assert kept == pytest.approx(6 * of_all, rel=0.01)  # and their gradients
    for ranks, (highest_of, kept_of) in enumerate(shared, 2):
        assert kept == pytest.approx(ranks * kept_of, rel=0.01)
        assert highest_of < 1.4 * highest / ranks  # with what gloo may hold still


# ---- a GPT ----

SHAPE = {"vocabulary": 50, "context": TOKENS, "layers": 2, "heads": 12, "width": 48}
KINDS = {"gpt": GPT, "modern": ModernGPT}


def a_gpt(kind="gpt"):
    """In 64 bits, and no parameter is 0 or 1, which would hide what is done with it."""
    torch.manual_seed(0)
    network = KINDS[kind](**SHAPE).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


def texts(steps=1):
    generator = torch.Generator().manual_seed(1)
    sizes = steps, 2, 4, TOKENS
    return torch.randint(SHAPE["vocabulary"], sizes, generator=generator)


def masked(documents):
    """Attention of one process in which documents are apart."""
    places = torch.arange(TOKENS)
    mask = visible(places, places, documents)
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )


def mean_loss(model, tokens, targets):
    """In 64 bits; a GPT's own is in 32."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def updates(kind, sizes, layout, how, sharding, packed=False, number=3):
    """Losses, norms before clipping, and parameters of some updates.

    Data ranks have other texts. packed: documents are apart, and some targets, mostly in
    the first half of the texts, are left out.
    """
    with process_group() as (_, ranks):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context"))
        sharing = Sharing(layout, mesh["context"].get_group())
        network = context_parallel.share(a_gpt(kind), sharing, how)
        if sharding == "fsdp":
            for part in (*network.blocks, network):
                fully_shard(part)
        model = DistributedDataParallel(network) if sharding == "ddp" else network
        groups = parameter_groups(network, weight_decay=0.1)
        optimizer, losses, norms = torch.optim.AdamW(groups, lr=1e-2), [], []
        for tokens, targets in texts(number):
            mine = mesh.get_local_rank("data")
            tokens, targets = (part.chunk(sizes[0])[mine] for part in (tokens, targets))
            if packed:
                sharing.documents = tokens[:, :1] % 3 + torch.arange(TOKENS) // 7
                left_out = torch.arange(TOKENS) < tokens[:, 1:2]
                targets = targets.masked_fill(left_out, IGNORED)
            optimizer.zero_grad()
            own = sharing.own(tokens), sharing.own(targets)
            loss = (context_parallel.loss_of if packed else mean_loss)(model, *own)
            loss.backward()
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / ranks)
        parameters = {name: full(v.detach()) for name, v in network.named_parameters()}
        return losses, norms, parameters


@pytest.mark.parametrize(
    "kind, sizes, layout, how, sharding, packed",
    [
        ("gpt", (1, 2), "zigzag", "ring", "ddp", False),
        ("modern", (1, 3), "striped", "ring", "ddp", True),
        ("gpt", (1, 2), "contiguous", "ulysses", "fsdp", True),
        ("gpt", (2, 2), "zigzag", "ring", "fsdp", False),
        ("modern", (2, 2), "contiguous", "ulysses", "ddp", False),
        ("gpt", (2, 2), "contiguous", "ring", "ddp", True),
    ],
)
def test_updates_with_adamw_and_clipping_equal_one_process(
    kind, sizes, layout, how, sharding, packed
):
    alone = partial(updates, kind, (1, 1), "contiguous", "ulysses", "none", packed)
    [(losses, norms, parameters)] = launch(alone, nproc=1)
    assert min(norms) > 0.5  # each update is clipped
    job = partial(updates, kind, sizes, layout, how, sharding, packed)
    for found, found_norms, whole in launch(job, nproc=sizes[0] * sizes[1]):
        assert found == pytest.approx(losses, rel=1e-12)
        assert found_norms == pytest.approx(norms, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-9)


def forget_where_tokens_are(network):
    """Each rank takes its tokens for the first ones of the text."""
    if isinstance(network, ModernGPT):
        for block in network.blocks:
            block.attention.positions = lambda first, tokens, device: torch.arange(
                tokens
            )
    else:
        weight = network.position_embedding.weight
        network.position_embedding = nn.Embedding.from_pretrained(weight)


def off_by(kind, fault):
    """How far a GPT's loss is from one process's, relative."""
    with process_group() as (_, ranks):
        [(tokens, targets)] = texts()
        right, sharing = mean_loss(a_gpt(kind), tokens, targets), Sharing("zigzag")
        network = context_parallel.share(a_gpt(kind), sharing)
        if fault:
            fault(network)
        total = mean_loss(network, sharing.own(tokens), sharing.own(targets)).detach()
        dist.all_reduce(total)
        return abs(total / ranks / right - 1).item()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_within_a_rank_are_found_by_the_loss(kind):
    assert launch(off_by, kind, None, nproc=2)[0] < 1e-13
    assert launch(off_by, kind, forget_where_tokens_are, nproc=2)[0] > 1e-5


def losses_of_packed(right):
    """The mean over the counted tokens of all ranks, three ways: one process's, the
    mean of the ranks' means, and loss_of's.
    """
    with process_group() as (_, ranks):
        [(tokens, targets)] = texts()
        targets = targets.masked_fill(torch.arange(TOKENS) < right, IGNORED)
        one, sharing = mean_loss(a_gpt(), tokens, targets), Sharing("contiguous")
        network = context_parallel.share(a_gpt(), sharing)
        own = sharing.own(tokens), sharing.own(targets)
        found = [one.item()]
        for loss in (mean_loss, context_parallel.loss_of):
            total = loss(network, *own).detach()
            dist.all_reduce(total)
            found.append(total.item() / ranks)
        return found


def test_the_loss_counts_tokens_where_ranks_have_other_numbers_of_them():
    one, means, found = launch(losses_of_packed, 15, nproc=2)[0]
    assert found == pytest.approx(one, rel=1e-12)
    assert abs(means - one) > 1e-3
    one, means, found = launch(losses_of_packed, 30, nproc=2)[0]  # none on rank 0
    assert found == pytest.approx(one, rel=1e-12) and means != means


def what_share_refuses(what):
    with process_group():
        network = GPT(**SHAPE | what.pop("shape", {}), dropout=what.pop("dropout", 0.0))
        attention = what.pop("attention", "ring")
        context_parallel.share(network, Sharing(**what), attention)


@pytest.mark.parametrize(
    "what, expected",
    [
        ({"layout": "zigzag", "dropout": 0.1}, "attention with dropout is not shared"),
        (
            {"layout": "zigzag", "attention": "ulysses"},
            "ulysses takes the layout contiguous, not zigzag",
        ),
        (
            {"layout": "contiguous", "attention": "ulysses", "shape": {"heads": 3}},
            "3 heads cannot be cut for 2 ranks",
        ),
        (
            {"layout": "zigzag", "shape": {"context": 50}},
            "50 tokens cannot be cut into 4 pieces",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_words(what, expected):
    with pytest.raises(Exception, match=f"ValueError: {expected}"):
        launch(what_share_refuses, what, nproc=2)


# ---- mistakes that a lesson shows ----


def losses_of_shifted_labels(shift_first):
    """Losses of some updates; the targets are shifted in the text, or in the shard."""
    with process_group():
        sharing = Sharing("striped")
        network = context_parallel.share(a_gpt(), sharing)
        model = DistributedDataParallel(network)
        optimizer, losses = torch.optim.AdamW(network.parameters(), lr=1e-2), []
        text = torch.arange(TOKENS + 1).repeat(2, 1) % 7  # the next token is easy
        tokens = sharing.own(text[:, :-1])
        right = sharing.own(text[:, 1:])
        for _ in range(25):
            targets = right if shift_first else tokens.roll(-1, dims=1)
            optimizer.zero_grad()
            loss = mean_loss(model, tokens, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found = network(tokens).argmax(-1)
        return losses, (found == right).float().mean().item()


def test_labels_that_are_shifted_in_a_shard_train_a_model_for_another_token():
    losses, accuracy = launch(losses_of_shifted_labels, True, nproc=2)[0]
    assert losses[-1] < 0.7 * losses[0] and accuracy > 0.9
    losses, accuracy = launch(losses_of_shifted_labels, False, nproc=2)[0]
    assert losses[-1] < 0.7 * losses[0] and accuracy < 0.1


# ---- with torch ----


def with_torch(by_name, rotation=None, allowed=True):
    """How far torch's context_parallel is from one process, and its collectives."""
    attention = F.scaled_dot_product_attention
    with process_group() as (_, ranks):
        if allowed:
            torch_context.allow_on_a_cpu()
        if rotation:
            torch_context.set_rotate_method(rotation)
        right, tensors = in_one_process(None), drawn()
        mesh, along = init_device_mesh("cpu", (ranks,)), [2] * 4
        how = {"buffers": tensors, "buffer_seq_dims": along}
        with torch_context.context_parallel(mesh, **how), CommDebugMode() as sent:
            three = [part.clone().requires_grad_() for part in tensors[:3]]
            attend = attention if by_name else F.scaled_dot_product_attention
            output = attend(*three, is_causal=True)
            output.backward(tensors[3].clone())
            calls = {
                str(k).split(".")[-1]: n for k, n in sent.get_comm_counts().items()
            }
            found = [output.detach(), *(part.grad for part in three)]
            found = torch_context.context_parallel_unshard(mesh, found, along)
        off = max((a - b).abs().max().item() for a, b in zip(found, right))
        return off, calls, output.shape[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_context_parallel_equals_one_process_with_a_handler_for_cpus(ranks):
    job = partial(launch, nproc=ranks, timeout=600)
    off, calls, own = job(with_torch, False)[0]
    assert off < 1e-13 and own == TOKENS // ranks
    assert calls == {"all_gather_into_tensor": 2, "all_to_all_single": ranks}
    off, calls, _ = job(with_torch, False, "alltoall")[0]
    assert off < 1e-13 and calls == {"all_to_all_single": 3 * ranks - 2}


def test_a_function_that_was_imported_by_name_attends_to_its_own_shard_in_silence():
    off, calls, own = launch(with_torch, True, nproc=2, timeout=600)[0]
    assert own == TOKENS // 2 and off > 0.5 and not calls


def test_without_the_handler_torch_names_the_kernel_of_the_cpu():
    problem = "_scaled_dot_product_flash_attention_for_cpu.default does not have a "
    with pytest.raises(Exception, match=problem):
        launch(with_torch, False, None, False, nproc=2, timeout=600)


# ---- the program ----


def program(folder, *flags, nproc, lesson=lesson19):
    """Two epochs, whose gradients are clipped; three held-out windows."""
    flags = ["--train-samples", "32", "--batch-size", "4", "--epochs", "2", *flags]
    flags += ["--max-norm", "0.5", "--warmup", "2", "--eval-windows", "3"]
    flags += ["--seed", "3", "--learning-rate", "1e-3", "--weight-decay", "0.3"]
    flags += ["--device", "cpu", "--out", str(folder)]
    return launch(lesson.main, flags, nproc=nproc, timeout=600)[0]


def assert_exported_alike(*folders):
    found, expected = (load_file(one / "model/model.safetensors") for one in folders)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "flags, ranks, model",
    [
        ([], 2, []),
        (["--attention", "ulysses"], 2, []),
        (["--layout", "striped", "--modern"], 2, ["--modern"]),
        (["--context-ranks", "2", "--batch-size", "2", "--sharding", "fsdp"], 4, []),
    ],
    ids=["ring", "ulysses", "striped, modern", "2 x 2, fsdp"],
)
def test_the_program_trains_as_lesson_10s_in_one_process_and_saves_the_whole_model(
    flags, ranks, model, tmp_path
):
    found = program(tmp_path / "19", *flags, nproc=ranks)
    expected = program(tmp_path / "10", *model, nproc=1, lesson=lesson10)
    rows = (tmp_path / "10/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows]
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    assert found["validation_loss"] == pytest.approx(
        expected["validation_loss"], abs=2e-4
    )
    assert found["parameters"] == expected["parameters"]
    assert found["sharding"] == f"{ranks // 2} data x 2 context"
    assert found["tokens_per_rank"] == 64
    assert_exported_alike(tmp_path / "19", tmp_path / "10")


def as_prepared(folder, flags):
    """What a rank has after a step, in numbers and names."""
    flags = [*flags, "--train-samples", "32", "--device", "cpu", "--out", folder]
    with process_group() as (_, ranks):
        run = lesson19.prepare(lesson19.arguments(flags), ranks, torch.device("cpu"))
        own = lesson19.own_tokens(run, next(iter(run.loader)))
        with watch.Watch() as seen:
            run.model(*own)
        run.held_out = run.held_out.some(2)
        evaluation = watch.count_collectives(lambda: lesson19.held_out_loss(run))
        return {
            "evaluates": sorted(evaluation.keys() & {"send", "alltoall"}),
            "vocabulary": run.tokenizer.vocabulary,
            "mesh": run.mesh["context"].mesh.tolist(),
            "sends": sorted({entry["name"] for entry in seen.log} - {"recv"}),
            "places": run.sharing.own(torch.arange(run.args.context), 0)[:3].tolist(),
            "tokens": own[0].shape[1],
            "fsdp": isinstance(run.network.blocks[0], FSDPModule),
            "modern": isinstance(run.network, ModernGPT),
            "width": run.network.norm.weight.shape[0],
        }


def test_each_flag_of_the_program_does_what_it_says(tmp_path):
    job = partial(launch, as_prepared, str(tmp_path), nproc=4, timeout=600)
    for rank, found in enumerate(job(["--context-ranks", "2"])):
        assert found == {
            "mesh": [rank // 2 * 2, rank // 2 * 2 + 1],  # neighbours share a text
            "sends": ["send"],
            "evaluates": ["send"],
            "vocabulary": 256,
            "places": [rank % 2 * 32 + place for place in range(3)],
            "tokens": 64,
            "fsdp": False,
            "modern": False,
            "width": 128,
        }
    flags = ["--layout", "striped", "--context", "96", "--modern", "--sharding", "fsdp"]
    flags += ["--shape", "medium", "--tokenizer", "bpe", "--vocabulary", "300"]
    found = job(flags)[1]
    assert found.pop("mesh") == [0, 1, 2, 3] and "send" in found.pop("sends")
    assert found.pop("evaluates") == ["send"] and found.pop("vocabulary") == 300
    modern = {
        "places": [1, 5, 9],
        "tokens": 24,
        "fsdp": True,
        "modern": True,
        "width": 256,
    }
    assert found == modern
    found = job(["--attention", "ulysses", "--context-ranks", "2"])[1]
    assert found["sends"] == found["evaluates"] == ["alltoall"]
    assert found["places"] == [64, 65, 66]


REFUSED = {
    "--context-ranks 3": "--context-ranks 3 does not divide 2 ranks",
    "--context 90": "90 tokens cannot be cut into 4 pieces",
    "--attention ulysses --modern": "1 heads cannot be cut for 2 ranks",
    "--attention ulysses --layout zigzag": "ulysses takes the layout contiguous, not "
    "zigzag",
}


def refusals():
    found = {}
    with process_group() as (_, ranks):
        for flags in REFUSED:
            args = lesson19.arguments(flags.split())
            with pytest.raises(UsageError) as problem:
                lesson19.mesh_for(args, ranks, torch.device("cpu"))
            found[flags] = str(problem.value)
        dist.barrier()  # a rank that leaves closes groups that others still make
    return found


def test_a_mesh_that_does_not_fit_gives_one_line():
    assert launch(refusals, nproc=2) == [REFUSED, REFUSED]
