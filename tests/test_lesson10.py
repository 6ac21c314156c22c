"""Lesson 10: a GPT, its text and its recipe; n ranks train as one, and a resumed run is
the undisturbed one.
"""

import copy
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import COURSE, THOROUGH, python, wait_until
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

from ddp_course import UsageError, lesson09, lesson10
from ddp_course.checkpoints import whole as checkpoints
from ddp_course.checkpoints.export import weights_for_transformers
from ddp_course.data import text as corpus
from ddp_course.data.shards import Shards, read_tokens
from ddp_course.data.text import Windows, files_of, load_text, made_once
from ddp_course.data.tokenizers import BPE, small_type
from ddp_course.files import Unusable
from ddp_course.models import gpt, recipe
from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.modern import ModernGPT
from ddp_course.ranks import watch
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

CPU = torch.device("cpu")
LINES = ["the cat sat on the mat", "a dog and a cat", "def cat(mat): return mat"]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder with a small text of 60 files, and an empty working folder."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"{number}\n" + "\n".join(LINES) * 12)
    monkeypatch.chdir(tmp_path)
    return folder


def main(flags, before=lambda: None):
    """The program on a rank, with a smaller network yet; `before()` may plant something
    first.
    """
    lesson10.SHAPES["small"] = {"context": 128, "layers": 1, "heads": 2, "width": 64}
    before()
    return lesson10.main(flags)


def run(text, out, *options, nproc=2, **more):
    flags = f"--data {text} --train-samples 96 --batch-size 4 --warmup 3 --out {out}"
    flags = [*flags.split(), "--sample-tokens", "40", *options]
    results = launch(main, flags, nproc=nproc, timeout=600, **more)
    return results, [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


# ---- the text ----


def test_the_standard_library_is_a_fixed_list_with_a_fixed_order_and_no_tests():
    files = files_of("python")
    assert len(files) > 300 and files == files_of("python")
    assert not [
        path for path in files if "test" in path.parts or "site-packages" in path.parts
    ]
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}


def test_tokens_are_the_text_and_nothing_is_in_both_parts(text):
    train, validation, tokenizer, fingerprint = load_text(str(text))
    train, validation = train[:], validation[:]
    contents = [path.read_bytes() for path in files_of(str(text))]
    decoded = tokenizer.decode(train.tolist()).split("\n\x00\n")
    held_out = tokenizer.decode(validation.tolist()).split("\n\x00\n")
    assert sorted([*decoded, *held_out]) == sorted(
        content.decode() for content in contents
    )
    assert not set(decoded) & set(held_out) and len(held_out) == 3
    assert train.dtype == np.uint16
    (text / "00.txt").write_text("another")
    assert load_text(str(text))[3] != fingerprint


def test_pieces_of_words_give_the_same_text_in_fewer_tokens(text):
    (text / "umlauts.txt").write_text("Übung macht den Meister, 练习, \t\n\n  x")
    train, validation, tokenizer, _ = load_text(str(text), "bpe", vocabulary=300)
    as_bytes = load_text(str(text))
    assert tokenizer.decode(train[:]) == as_bytes[2].decode(as_bytes[0][:].tolist())
    assert tokenizer.vocabulary == 300 and len(train) < 0.5 * len(as_bytes[0])
    assert int(train[:].max()) < 300


def test_a_tokenizers_file_serves_as_a_tokenizer_and_adds_no_tokens_of_its_own(
    text, tmp_path
):
    from tokenizers import Tokenizer, processors

    path = tmp_path / "tokenizer.json"
    special = ["<|begin|>"]
    BPE.train(["the cat sat on the mat, the dog sat"], 280, path, special)
    begins = Tokenizer.from_file(str(path))
    begins.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    begins.save(str(path))
    assert begins.encode("the cat").ids[0] == 0
    train, _, tokenizer, fingerprint = load_text(str(text), str(path))
    assert tokenizer.vocabulary == 272 and not (train[:] == 0).any()
    as_bytes = load_text(str(text))
    assert tokenizer.decode(train[:]) == as_bytes[2].decode(as_bytes[0][:].tolist())
    assert fingerprint != as_bytes[3]
    for wrong, said in [(text / "00.txt", "is not a tokenizer"), ("x", "is not there")]:
        with pytest.raises(UsageError, match=said):
            load_text(str(text), str(wrong))


# ---- shards ----


def write_shards(text, out, *options):
    flags = ["--data", str(text), "--out", str(out), "--shard", "1000", *options]
    return python("-m", "ddp_course.data.text", *flags)


def test_the_command_writes_shards_that_hold_what_one_file_holds(text, tmp_path):
    done = write_shards(text, tmp_path / "tokens", "--tokenizer", "bpe")
    assert done.returncode == 0, done.stderr
    whole, pieces = load_text(str(text), "bpe"), load_text(str(tmp_path / "tokens"))
    assert (
        len(list((tmp_path / "tokens").glob("train-*.npy")))
        == len(pieces[0].arrays)
        == -(-len(whole[0]) // 1000)
    )
    for one, several in zip(whole[:2], pieces[:2]):
        assert np.array_equal(one[:], several[:]) and len(one) == len(several)
    assert f"{len(whole[0]):,} tokens to train on" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again = write_shards(text, tmp_path / "tokens")
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert "is there already" in again.stderr


def test_windows_run_across_the_ends_of_shards(tmp_path):
    files = {}
    for number, (first, last) in enumerate([(0, 7), (7, 8), (8, 30)]):
        path = tmp_path / f"{number}.npy"
        np.save(path, np.arange(first, last, dtype=np.uint16))
        files[path] = last - first
    shards = Shards(files)
    assert shards[:].tolist() == list(range(30)) and shards[5:9].tolist() == [
        5,
        6,
        7,
        8,
    ]
    of_one, of_many = Windows(np.arange(30), 4), Windows(shards, 4)
    assert len(of_one) == len(of_many) == 7
    for index in range(7):
        for mine, other in zip(of_one[index], of_many[index]):
            assert torch.equal(mine, other)


def test_a_large_vocabulary_has_wider_tokens(tmp_path):
    assert small_type(2**16) == np.uint16 and small_type(2**16 + 1) == np.uint32
    np.save(tmp_path / "large.npy", np.array([1, 128_000, 3], dtype=np.uint32))
    tokens, targets = Windows(Shards({tmp_path / "large.npy": 3}), 2)[0]
    assert tokens.tolist() == [1, 128_000] and targets.tolist() == [128_000, 3]


def damage_length(folder):
    np.save(folder / "train-00000.npy", np.zeros(3, dtype=np.uint16))


def damage_type(folder):
    np.save(folder / "train-00000.npy", np.zeros(1000))


def tear(folder):
    os.truncate(folder / "train-00000.npy", 1500)


def damage_manifest(folder):
    (folder / "tokens.json").write_text("{")


@pytest.mark.parametrize(
    "damage, said",
    [
        (damage_length, r"train-00000.npy holds uint16 \(3,\), not 1,000 tokens"),
        (damage_type, r"train-00000.npy holds float64 \(1000,\), not 1,000 tokens"),
        (tear, "train-00000.npy cannot be read"),
        (damage_manifest, "tokens.json is damaged"),
        (lambda folder: (folder / "train-00000.npy").unlink(), "cannot be read"),
    ],
)
def test_damaged_shards_give_one_line_that_names_the_file(damage, said, text, tmp_path):
    corpus.main(["--data", str(text), "--out", f"{tmp_path}/tokens", "--shard", "1000"])
    damage(tmp_path / "tokens")
    with pytest.raises(UsageError, match=said) as error:
        read_tokens(tmp_path / "tokens")
    assert "\n" not in str(error.value) and "again" in str(error.value)


def test_a_run_on_shards_is_the_run_on_their_text(text, tmp_path):
    corpus.main(["--data", str(text), "--out", f"{tmp_path}/tokens", "--shard", "9999"])
    _, on_text = run(text, tmp_path / "text-run")
    _, on_shards = run(tmp_path / "tokens", tmp_path / "shards-run")
    assert on_text == on_shards
    with pytest.raises(RankError, match="has tokens, not text: leave out --tokenizer"):
        run(tmp_path / "tokens", tmp_path / "out", "--tokenizer", "bytes")


@pytest.mark.parametrize("length", [1, 5, 6, 11, 16, 17])
def test_windows_lie_side_by_side_and_each_token_is_a_target_once(length):
    windows = Windows(np.arange(length, dtype=np.uint16), 5)
    assert len(windows) == (length - 1) // 5
    targets = []
    for index in range(len(windows)):
        tokens, following = windows[index]
        assert tokens.tolist() == list(range(5 * index, 5 * index + 5))
        assert torch.equal(following, tokens + 1) and tokens.dtype == torch.int64
        targets += following.tolist()
    assert targets == list(range(1, 1 + 5 * len(windows)))


def test_what_is_no_text_gives_one_line(tmp_path):
    for folder, said in [
        (tmp_path, "has 0 text files"),
        (tmp_path / "nowhere", "is no folder"),
    ]:
        with pytest.raises(UsageError, match=said) as error:
            load_text(str(folder))
        assert "\n" not in str(error.value)


def dies_while_making(kind):
    def make(folder):
        (folder / "train.bin").write_text("half of i")
        os._exit(9)

    made_once(kind, "name", make)


def test_what_was_being_made_when_it_failed_or_was_killed_is_made_anew(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def fails(folder):
        (folder / "train.bin").write_text("half of i")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made_once("corpus", "name", fails)
    assert not (tmp_path / "runs" / "corpus" / "name").exists()
    with pytest.raises(RankError, match="exit code 9"):
        launch(dies_while_making, "corpus", nproc=1)
    assert not (tmp_path / "runs" / "corpus" / "name").exists()
    made = made_once(
        "corpus", "name", lambda folder: (folder / "train.bin").write_text("all of it")
    )
    assert (
        made == tmp_path / "runs" / "corpus" / "name"
        and (made / "train.bin").read_text() == "all of it"
    )
    assert made_once("corpus", "name", fails) == made  # it is there: nothing is made


def load_at_once(text):
    train, *_ = load_text(text)
    return len(train)


def test_many_processes_that_ask_at_once_make_it_once(text):
    lengths = launch(load_at_once, str(text), nproc=4)
    [folder] = [
        path for path in (text.parent / "runs" / "corpus").iterdir() if path.is_dir()
    ]
    assert len(set(lengths)) == 1 and sorted(
        path.name for path in folder.iterdir()
    ) == [
        "tokens.json",
        "train-00000.npy",
        "validation-00000.npy",
    ]


# ---- the model ----


def test_its_largest_shape_is_gpt2():
    with torch.device("meta"):
        gpt2 = GPT(50257, **SHAPES["gpt2"])
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == 124_439_808
    assert gpt2.head.weight is gpt2.token_embedding.weight


def test_every_shape_has_heads_as_wide_as_gpt2s():
    assert {size["width"] / size["heads"] for size in SHAPES.values()} == {64}


def test_it_computes_what_transformers_gpt2_computes():
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = GPT(vocabulary=61, context=16, layers=2, heads=2, width=8).double().eval()
    settings = GPT2Config(
        vocab_size=61, n_positions=16, n_layer=2, n_head=2, n_embd=8, bos_token_id=0, eos_token_id=0,
        activation_function="gelu",
    )  # fmt: skip
    theirs = GPT2LMHeadModel(settings).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(
            parameter, std=0.5
        )  # small ones let both forms of GELU pass
    names = {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
    }
    layer = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention.query_key_value": "attn.c_attn",
        "attention.output": "attn.c_proj",
    }
    layer |= {"mlp.expand": "mlp.c_fc", "mlp.contract": "mlp.c_proj"}
    for place in range(2):
        names |= {
            f"blocks.{place}.{mine}": f"transformer.h.{place}.{other}"
            for mine, other in layer.items()
        }
    state = theirs.state_dict()
    for mine, other in names.items():
        for kind in ("weight", "bias"):
            if f"{other}.{kind}" in state:
                value = state[f"{other}.{kind}"]
                transposed = (
                    kind == "weight" and "c_" in other
                )  # their Conv1D is a Linear, the other way round
                ours.get_parameter(f"{mine}.{kind}").data.copy_(
                    value.T if transposed else value
                )
    tokens = torch.randint(61, (3, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


def test_attention_is_the_sum_of_what_its_heads_give():
    """A layer with the weights of some heads computes those heads alone."""
    whole = gpt.Attention(width=12, heads=3, dropout=0.0)
    x, total = torch.randn(2, 5, 12), whole.output.bias
    weight, bias = (value.detach() for value in whole.query_key_value.parameters())
    for heads in ([0], [1, 2]):
        some = gpt.Attention(width=12, heads=3, dropout=0.0)
        for name, value in (("weight", weight), ("bias", bias)):
            mine = value.unflatten(0, (3, 3, 4))[:, heads].flatten(0, 2)
            setattr(some.query_key_value, name, nn.Parameter(mine))
        mine = whole.output.weight.detach().unflatten(1, (3, 4))[:, heads].flatten(1)
        some.output.weight, some.output.bias = nn.Parameter(mine), None
        total = total + some(x)
    torch.testing.assert_close(total, whole(x))


def test_what_attends_can_be_replaced_in_one_layer():
    layer, seen = gpt.Attention(width=12, heads=3, dropout=0.0), []
    before, x = layer.attend, torch.randn(2, 5, 12)
    expected = layer(x)

    def attend(query, key, value):
        seen.append([part.shape for part in (query, key, value)])
        return before(query, key, value)

    layer.attend = attend
    assert torch.equal(layer(x), expected) and seen == [[(2, 3, 5, 4)] * 3]


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="a width of 8 cannot be cut into 5 heads"):
        gpt.Attention(width=8, heads=5, dropout=0.0)


def loss_and_gradients(model, compute):
    """In training mode, with the same dropout: the loss, and the gradient by name."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(61, (2, 3, 8))
    model.zero_grad()
    loss = F.cross_entropy(compute(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), {name: v.grad.clone() for name, v in model.named_parameters()}


def test_its_parts_one_after_the_other_are_the_model():
    model = gpt.GPT(61, context=8, layers=2, heads=2, width=16, dropout=0.1)
    parts = nn.Sequential(*model.parts())
    own = {id(value) for value in model.parameters()}
    assert {id(value) for value in parts.parameters()} == own and len(parts) == 4
    loss, gradients = loss_and_gradients(model, model)
    found, of_parts = loss_and_gradients(model, parts)
    assert found == loss
    for name, gradient in gradients.items():
        assert torch.equal(of_parts[name], gradient), name


def test_in_parts_on_two_ranks_the_tied_matrix_has_a_gradient_on_each():
    """Their sum is the gradient of the model in one piece."""
    model = gpt.GPT(61, context=8, layers=2, heads=2, width=16)
    *early, last = (copy.deepcopy(part) for part in model.parts())
    loss, gradients = loss_and_gradients(model, model)
    found, _ = loss_and_gradients(last, nn.Sequential(*early, last))
    tied = early[0].token_embedding.weight.grad + last[1].weight.grad
    assert found == loss
    torch.testing.assert_close(tied, gradients["token_embedding.weight"])


def test_no_token_sees_those_that_come_after_it():
    model = GPT(vocabulary=50, context=12, layers=2, heads=2, width=16).eval()
    tokens = torch.randint(50, (1, 12))
    other = tokens.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 50
    before, after = model(tokens), model(other)
    assert torch.equal(before[0, :7], after[0, :7]) and not torch.allclose(
        before[0, 7], after[0, 7]
    )


def test_it_begins_with_the_loss_of_a_guess():
    torch.manual_seed(0)
    model, (tokens, targets) = (
        GPT(**SHAPES["small"]),
        torch.randint(256, (2, 4, 128)),
    )
    loss = lesson10.loss_of(model, tokens, targets, torch.float32, torch.device("cpu"))
    assert abs(loss - math.log(256)) < 0.1


def test_generating_draws_from_a_generator_of_its_own_and_is_repeatable():
    model = GPT(context=8, layers=1, heads=2, width=8, dropout=0.5).train()
    before = torch.get_rng_state()
    text = model.generate([1, 2], 20, seed=3)
    assert (
        text == model.generate([1, 2], 20, seed=3) != model.generate([1, 2], 20, seed=4)
    )
    assert len(text) == 22 and text[:2] == [1, 2]
    assert torch.equal(before, torch.get_rng_state()) and model.training
    assert len(set(model.generate([1], 50, top_k=1))) <= 50 and model.generate(
        [1], 9, top_k=1
    ) == model.generate([1], 9, seed=7, top_k=1)


# ---- the recipe ----


def test_the_rate_climbs_a_line_and_falls_down_a_cosine():
    args = SimpleNamespace(learning_rate=1.0, warmup=4)
    rates = [lesson10.learning_rate(step, 13, args) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[8] == pytest.approx(0.55) and rates[12] == pytest.approx(0.1)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8, eta_min=0.1)
    for rate in rates[4:]:
        assert rate == pytest.approx(schedule.get_last_lr()[0])
        theirs.step()
        schedule.step()


def test_matrices_decay_vectors_do_not_and_none_is_forgotten():
    model = GPT(context=8, layers=2, heads=2, width=8)
    decayed, others = lesson10.parameter_groups(model, 0.1)
    assert {p.dim() for p in decayed["params"]} == {2} and {
        p.dim() for p in others["params"]
    } == {1}
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(others["params"]) == len(
        list(model.parameters())
    )


def norms_of_updates(max_norm):
    """For each of five updates: the gradient norm that is reported, and the one used."""
    with process_group():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            GPT(context=8, layers=1, heads=1, width=8)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        args = SimpleNamespace(precision="fp32", max_norm=max_norm)
        norms = []
        for _ in range(5):
            micro_batches = [torch.randint(256, (2, 2, 8)) for _ in range(2)]
            found = lesson10.update(
                model, micro_batches, optimizer, 1e-2, args, torch.device("cpu")
            )
            gradients = [parameter.grad for parameter in model.parameters()]
            used = nn.utils.get_total_norm(gradients)
            norms.append((found[1].item(), used.item()))
        return norms


def test_every_update_clips_and_reports_the_norm_before_clipping():
    for reported, used in launch(norms_of_updates, 0.1, nproc=1)[0]:
        assert reported > 0.2 and used == pytest.approx(0.1, rel=1e-3)
    for reported, used in launch(norms_of_updates, 1e9, nproc=1)[0]:
        assert reported == pytest.approx(used)


def norms_of_warm_up(flags):
    """The gradient norm that each update leaves behind, in a run of the program."""
    norms, step = [], torch.optim.AdamW.step

    def counted(optimizer, *args, **options):
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        norms.append(nn.utils.get_total_norm(gradients).item())
        return step(optimizer, *args, **options)

    torch.optim.AdamW.step = counted
    return lesson10.main(flags)["history"], norms


def test_the_program_clips_in_the_warm_up_too(text, tmp_path):
    flags = f"--data {text} --train-samples 32 --batch-size 4 --max-norm 0.5".split()
    flags += ["--warmup", "6", "--out", str(tmp_path / "out"), "--sample-tokens", "1"]
    history, norms = launch(norms_of_warm_up, flags, nproc=1, timeout=600)[0]
    assert len(norms) == 8 and max(norms) < 0.5001
    assert all(row["gradient_norm"] > 0.5 for row in history[:6])


# ---- the program ----


def seen(rows):
    """The losses, and the norms of the gradients: Adam hides a scale of all of them."""
    return [[row["loss"], row["gradient_norm"]] for row in rows]


@pytest.mark.parametrize("nproc, batch_size, accumulate", [(2, 6, 1), (3, 2, 2)])
def test_n_ranks_train_as_one_with_the_same_batch_of_all(
    nproc, batch_size, accumulate, text, tmp_path
):
    [expected], one = run(text, tmp_path / "one", "--batch-size", "12", nproc=1)
    options = ["--batch-size", str(batch_size), "--accumulate", str(accumulate)]
    results, many = run(text, tmp_path / "many", *options, nproc=nproc)
    assert len(one) == 8 and one[-1]["loss"] < one[0]["loss"] - 0.5
    torch.testing.assert_close(seen(one), seen(many), rtol=1e-4, atol=1e-4)
    assert len({result["params_sha256"] for result in results}) == 1
    assert [row["tokens"] for row in many] == [
        (step + 1) * 12 * 128 for step in range(8)
    ]
    assert results[0]["validation_loss"] == pytest.approx(
        expected["validation_loss"], abs=1e-3
    )
    assert results[0]["tokens"] == 8 * 12 * 128 and results[0]["world_size"] == nproc


@pytest.mark.parametrize("kind", [GPT, ModernGPT])
def test_each_kind_of_model_trains_as_one_and_is_left_behind_as_trained(
    kind, text, tmp_path
):
    options = ["--modern"] if kind is ModernGPT else []
    _, one = run(text, tmp_path / "one", *options, "--batch-size", "8", nproc=1)
    _, many = run(text, tmp_path / "many", *options)
    torch.testing.assert_close(seen(one), seen(many), rtol=1e-4, atol=1e-4)
    [checkpoint] = (tmp_path / "many" / "checkpoints").iterdir()
    trained = kind(context=128, layers=1, heads=2, width=64)
    trained.load_state_dict(torch.load(checkpoint / "shared.pt")["model"])
    left = load_file(tmp_path / "many" / "model" / "model.safetensors")
    expected = weights_for_transformers(trained)
    assert left.keys() == expected.keys()
    assert all(torch.equal(left[name], expected[name]) for name in left)


def repeats():
    lesson10.ResumableSampler.__iter__ = lambda self: iter(
        range(48)
    )  # the same for each rank


def test_the_comparison_finds_a_sampler_that_repeats(text, tmp_path):
    _, one = run(text, tmp_path / "one", "--batch-size", "8", nproc=1)
    _, two = run(text, tmp_path / "two", before=repeats)
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two)) > 2e-3


def stops():
    """Plant an error in the eighth update."""
    update, count = lesson10.update, []

    def dies(*args):
        count.append(1)
        if len(count) == 8:
            raise RuntimeError("planted")
        return update(*args)

    lesson10.update = dies


@pytest.mark.parametrize("how", ["after an error", "from an older checkpoint"])
def test_a_resumed_run_ends_bit_for_bit_the_same(how, text, tmp_path):
    options = "--dropout 0.1 --save-every 3 --keep 9 --eval-every 4 --epochs 2".split()
    [whole, _], expected = run(text, tmp_path / "whole", *options)
    out = tmp_path / "parts"
    if how == "after an error":
        with pytest.raises(RankError, match="planted"):
            run(text, out, *options, before=stops)
    else:
        out = tmp_path / "whole"
        for checkpoint in checkpoints.checkpoints(out / "checkpoints"):
            if checkpoint.name > "step-00000006":
                checkpoints.remove(checkpoint)
    [result, _], history = run(text, out, *options, "--resume")
    assert "resuming from step-00000006" in (out / "train.log").read_text()
    assert history == expected and result["params_sha256"] == whole["params_sha256"]


def test_a_run_that_has_ended_can_go_on_for_more_epochs_but_not_for_fewer(
    text, tmp_path
):
    _, first = run(text, tmp_path / "out", "--epochs", "2")
    [result, _], longer = run(text, tmp_path / "out", "--epochs", "3", "--resume")
    assert len(longer) == 36 and longer[:24] == first and result["epochs"] == 3
    with pytest.raises(RankError, match="36 updates into their run; --epochs 1 has"):
        run(text, tmp_path / "out", "--epochs", "1", "--resume")


def undo(out, updates):
    """Remove the checkpoints after so many updates."""
    for checkpoint in checkpoints.checkpoints(out / "checkpoints"):
        if checkpoint.name > f"step-{updates:08}":
            checkpoints.remove(checkpoint)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_only_with_wsd_a_run_continued_before_its_decay_is_the_longer_run(
    schedule, text, tmp_path
):
    options = "--train-samples 48 --save-every 3 --keep 9 --eval-every 99".split()
    options += ["--schedule", schedule]
    [planned, _], expected = run(text, tmp_path / "long", *options, "--epochs", "4")
    run(text, tmp_path / "out", *options, "--epochs", "2")
    undo(tmp_path / "out", 9)
    [result, _], history = run(
        text, tmp_path / "out", *options, "--epochs", "4", "--resume"
    )
    assert len(history) == 24
    same = result["params_sha256"] == planned["params_sha256"]
    assert same == (history == expected) == (schedule == "wsd")


def test_a_checkpoint_whose_momentum_is_not_a_number_is_refused():
    torch.manual_seed(0)
    model, cpu = GPT(9, 4, 1, 1, 8, 0.0), torch.device("cpu")
    by_name = recipe.optimizers(recipe.parameter_groups(model, 0.1), "muon", model)
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens, tokens).backward()
    for optimizer in by_name.values():
        optimizer.step()
    parts = {"model": model, **by_name}
    shared, own = lesson09.snapshot(parts, [torch.tensor(1.0)], 1.0, {}, cpu)
    lesson09.restore(parts, cpu, shared, own)
    states = shared["muon"]["state"]
    states[0]["momentum_buffer"] = states[0]["momentum_buffer"] * float("nan")
    with pytest.raises(Unusable, match="or an average for it, is NaN or infinite"):
        lesson09.restore(parts, cpu, shared, own)


def test_with_muon_n_ranks_train_as_one_and_a_resumed_run_ends_the_same(text, tmp_path):
    options = "--optimizer muon --train-samples 48 --save-every 4".split()
    [whole, _], expected = run(text, tmp_path / "out", *options)
    together = ["--batch-size", "8"]
    _, alone = run(text, tmp_path / "one", *options, *together, nproc=1)
    for one, other in zip(expected, alone):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-2)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=5e-2)
    _, of_adamw = run(text, tmp_path / "adamw", "--train-samples", "48")
    assert of_adamw[0]["loss"] == expected[0]["loss"]
    assert abs(of_adamw[-1]["loss"] - expected[-1]["loss"]) > 0.03  # it is another one
    undo(tmp_path / "out", 4)
    [result, _], history = run(text, tmp_path / "out", *options, "--resume")
    assert "resuming from step-00000004" in (tmp_path / "out/train.log").read_text()
    assert history == expected and result["params_sha256"] == whole["params_sha256"]
    with pytest.raises(RankError, match="was made with optimizer muon, not adamw"):
        run(text, tmp_path / "out", *options, "--optimizer", "adamw", "--resume")


def test_a_run_with_another_recipe_is_not_resumed(text, tmp_path):
    run(text, tmp_path / "out")
    with pytest.raises(RankError, match="was made with max-norm 1.0, not 2.0"):
        run(text, tmp_path / "out", "--max-norm", "2", "--resume")


def seeds_of_workers(flags):
    """What seeds the workers of this rank's loader, each time that it is iterated."""
    seeds = []

    class Loader(lesson10.DataLoader):
        def __iter__(self):
            if self.generator is not None:
                seeds.append(self.generator.initial_seed())
            return super().__iter__()

    lesson10.DataLoader = Loader
    main(flags)
    return seeds


def test_workers_of_all_ranks_and_epochs_are_seeded_differently(text, tmp_path):
    flags = f"--data {text} --train-samples 16 --batch-size 4 --epochs 3".split()
    flags += ["--out", str(tmp_path / "out"), "--sample-tokens", "1"]
    seeds = launch(seeds_of_workers, flags, nproc=2, timeout=600)
    assert [len(of_rank) for of_rank in seeds] == [3, 3]
    assert len({seed for of_rank in seeds for seed in of_rank}) == 6


def ruins():
    """Plant a NaN into rank 1's second batch."""
    loss_of, count = lesson10.loss_of, []

    def ruined(*args):
        count.append(1)
        loss = loss_of(*args)
        wrong = len(count) == 2 and os.environ["RANK"] == "1"
        return loss * torch.nan if wrong else loss

    lesson10.loss_of = ruined


def test_a_loss_that_is_no_number_ends_the_run_with_step_and_rank(text, tmp_path):
    with pytest.raises(
        RankError, match="not a number in step 2 of the epoch, on rank 1"
    ):
        run(text, tmp_path / "out", before=ruins)
    assert not (tmp_path / "out" / "result.json").exists()


def compiles_quickly(graphs):
    """Compile without generating code, which takes a compiler and a minute. Each graph
    that comes to be compiled adds a line to the file `graphs`.
    """

    def noted(graph, inputs):
        with graphs.open("a") as file:
            file.write(f"{len(graph.graph.nodes)} operations\n")
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    compile = lesson10.DistributedDataParallel.compile
    lesson10.DistributedDataParallel.compile = lambda self: compile(self, backend=noted)


def test_compiled_it_trains_the_same_and_keeps_the_names_in_its_checkpoints(
    text, tmp_path
):
    options = ["--train-samples", "24", "--accumulate", "2"]
    [plain, _], expected = run(text, tmp_path / "plain", *options)
    [result, _], history = run(
        *(text, tmp_path / "out", *options, "--compile"),
        before=partial(compiles_quickly, graphs := tmp_path / "graphs"),
    )
    assert "operations" in graphs.read_text(), "nothing was compiled"
    for one, other in zip(expected, history):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
    [folder] = checkpoints.checkpoints(tmp_path / "out" / "checkpoints")
    names = torch.load(folder / "shared.pt")["model"]
    assert "token_embedding.weight" in names and result["world_size"] == 2


def test_the_samples_losses_and_rates_are_written_as_it_learns(text, tmp_path):
    [result, _], history = run(
        text,
        tmp_path / "out",
        "--eval-every",
        "4",
        "--train-samples",
        "96",
        "--epochs",
        "4",
    )
    assert [row["step"] for row in history if "sample" in row] == [*range(3, 48, 4)]
    last = history[-1]
    assert (
        last["sample"].startswith("def ")
        and last["train_loss"] < 3.0
        and "at" in last["sample"]
        and 0 < last["gradient_norm"] < 100
    )
    assert result["train_loss"] == round(last["train_loss"], 4)
    assert history[3]["learning_rate"] == pytest.approx(2e-3)
    assert history[0]["learning_rate"] == pytest.approx(5e-4)
    assert history[-1]["learning_rate"] == pytest.approx(2e-4)


@pytest.mark.parametrize(
    "options, said",
    [
        (
            ["--train-samples", "100000"],
            "--train-samples 100000 is more than the text has:",
        ),
        (["--batch-size", "64"], "--batch-size 64 is more than a rank's share"),
        (
            ["--train-samples", "51", "--batch-size", "26"],
            "--batch-size 26 is more than a rank's share, 25 of 50 samples",
        ),
        (["--prompt", ""], "--prompt is empty"),
        (
            ["--shape", "gpt2", "--train-samples", "1"],
            "1 training samples are too few for 2 ranks",
        ),
        (["--tokenizer", "nothing"], "--tokenizer nothing is not there: use bytes"),
        (["--node-rank", "1"], "--node-rank 1 is none of 1 machines"),
        (["--nproc", "2"], "torchrun has started the ranks: leave out --nproc"),
    ],
)
def test_wrong_use_gives_one_line(options, said, text, tmp_path):
    with pytest.raises(RankError) as error:
        run(text, tmp_path / "out", *options)
    assert (
        error.value.message.startswith("ddp_course.UsageError: ")
        and said in error.value.message
    )
    assert "\n" not in error.value.message


# ---- it starts its own ranks ----


def test_it_starts_ranks_with_spawn_listens_on_loopback_only_and_leaves_none_behind(
    text, tmp_path
):
    out = tmp_path / "out"
    flags = [
        "--data",
        text,
        "--train-samples",
        "48",
        "--batch-size",
        "4",
        "--out",
        out,
        "--epochs",
        "2",
    ]
    program = COURSE / "ddp_course" / "lesson10.py"
    with subprocess.Popen(
        [sys.executable, program, "--nproc", "2", *map(str, flags)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        listening, ranks = set(), []
        while process.poll() is None:
            try:
                family = [
                    psutil.Process(process.pid),
                    *psutil.Process(process.pid).children(recursive=True),
                ]
                ranks = max(ranks, family, key=len)
                for one in family:
                    listening |= {
                        at.laddr.ip
                        for at in one.net_connections()
                        if at.status == psutil.CONN_LISTEN
                    }
            except psutil.Error:
                pass
            time.sleep(0.05)
        output = process.stdout.read()
    assert process.returncode == 0
    assert json.loads((out / "result.json").read_text())[
        "world_size"
    ] == 2 and re.search(r"(?m)^world_size +2$", output)
    assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert len(ranks) >= 3

    def left():
        return [
            one
            for one in ranks
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]

    assert wait_until(lambda: not left()), left()


def test_a_text_shorter_than_a_window_gives_one_line(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("short")
    with pytest.raises(RankError, match="is too short: a window has 128 tokens"):
        run(tmp_path, tmp_path / "out")


def test_what_is_wrong_on_all_ranks_is_said_once_with_exit_code_2(text):
    done = python(
        COURSE / "ddp_course" / "lesson10.py",
        "--nproc",
        2,
        "--data",
        text,
        "--batch-size",
        9999,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(
        "lesson10.py: --batch-size 9999 is more than"
    )


def test_two_machines_are_two_commands(text, tmp_path):
    """Both on this one: what they need of each other is an address and a port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program, out = COURSE / "ddp_course" / "lesson10.py", tmp_path / "out"
    flags = f"--data {text} --train-samples 48 --batch-size 4 --nnodes 2 --master-port {port} --out {out}".split()
    nodes = [
        subprocess.Popen(
            [sys.executable, program, *flags, "--node-rank", str(node)],
            stdout=subprocess.PIPE,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for node in range(2)
    ]
    assert [node.wait(100) for node in nodes] == [0, 0]
    assert json.loads((out / "result.json").read_text())["world_size"] == 2
    assert [b"world_size" in node.stdout.read() for node in nodes] == [True, False]


def test_loss_is_that_of_cross_entropy():
    model = GPT(vocabulary=9, context=4, layers=1, heads=1, width=4)
    tokens, targets = torch.randint(9, (2, 3, 4))
    logits = model(tokens)
    expected = torch.stack(
        [
            F.cross_entropy(logits[row, place], targets[row, place])
            for row in range(3)
            for place in range(4)
        ]
    )
    loss = lesson10.loss_of(model, tokens, targets, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(loss, expected.mean())


@pytest.mark.parametrize("vocabulary", [9, 127, 128, 129, 300])
def test_a_padded_vocabulary_changes_no_number_and_no_file(vocabulary):
    """No logit, no loss, no gradient, and no name or shape in a checkpoint."""
    torch.manual_seed(0)
    model = GPT(vocabulary, context=6, layers=1, heads=1, width=8).double()
    tokens, targets = torch.randint(vocabulary, (2, 3, 6))
    features = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
    logits = F.linear(features, model.head.weight)
    # which kernel multiplies depends on the size, and so do the last bits
    torch.testing.assert_close(model.head(features), logits, rtol=1e-12, atol=1e-15)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    wanted = torch.autograd.grad(expected, [features, model.head.weight])
    loss = model.head(features, targets)
    found = torch.autograd.grad(loss, [features, model.head.weight])
    torch.testing.assert_close([loss, *found], [expected, *wanted])
    assert model.state_dict()["head.weight"].shape == (vocabulary, 8)
    unpadded = GPT(vocabulary, context=6, layers=1, heads=1, width=8)
    unpadded.load_state_dict(model.state_dict())
    assert model(tokens).shape == (3, 6, vocabulary)


def test_the_product_is_padded_to_whole_tiles(monkeypatch):
    sizes, linear = [], F.linear
    noted = lambda x, weight: sizes.append(len(weight)) or linear(x, weight)
    monkeypatch.setattr(F, "linear", noted)
    for vocabulary in (50257, 256):
        gpt.Head(4, vocabulary, bias=False)(torch.randn(1, 1, 4))
    assert sizes == [50304, 256]


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch 2.15"
)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_chunked_loss_is_the_loss_with_a_fraction_of_the_bytes(precision):
    """In bf16, too, where torch's own mean of it is wrong."""
    torch.manual_seed(0)
    model = GPT(vocabulary=16384, context=64, layers=0, heads=1, width=8)
    tokens, targets = torch.randint(16384, (2, 8, 64))
    found = {}
    for chunked in (False, True):
        model.head.chunked = chunked
        model.zero_grad()
        with watch.memory_timeline() as timeline:
            loss = lesson10.loss_of(model, tokens, targets, precision, CPU)
            loss.backward()
        gradient = model.head.weight.grad.clone()
        found[chunked] = loss.detach(), gradient, max(timeline)
    near = 1e-5 if precision == torch.float32 else 1e-2
    for whole, in_chunks in zip(found[False][:2], found[True][:2]):
        assert (whole - in_chunks).norm() < near * whole.norm()
    assert found[True][2] < found[False][2] / 10


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="needs torch 2.15"
)
def test_a_chunked_loss_takes_four_products_of_the_head_where_the_whole_takes_three():
    """Forward, two in backward, and the logits once more."""
    head, features = gpt.Head(64, 2048, bias=False), torch.randn(1, 1024, 64)
    features.requires_grad_()
    targets, products = torch.randint(2048, (1, 1024)), {}
    for chunked in (False, True):
        head.chunked = chunked
        with profile(with_flops=True) as profiled:
            head(features, targets).backward()
        done = sum(event.flops for event in profiled.events())
        products[chunked] = done / (2 * 1024 * 64 * 2048)
    assert products == pytest.approx({False: 3, True: 4}, rel=0.02)


def test_the_program_takes_the_chunked_loss_where_torch_has_it(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(UsageError, match="--chunked-loss needs torch 2.15 or later"):
        lesson10.arguments(["--chunked-loss"])


@pytest.mark.skipif(not THOROUGH, reason="compiles for a minute: make thorough")
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_loss_writes_no_logits_in_fp32(inside):
    """Where it is part of what is compiled; outside of it, it does."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = GPT(vocabulary=1000, context=32, layers=1, heads=1, width=64)
    tokens, targets = torch.randint(1000, (2, 4, 32))

    @torch.compile
    def forward(tokens, targets):
        return model(tokens, targets) if inside else model(tokens)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(tokens, targets)
            if not inside:
                loss = F.cross_entropy(loss.flatten(0, 1).float(), targets.flatten())
        loss.backward()

    _, code = run_and_get_code(step)
    buffers = re.findall(
        r"empty_strided_cpu\(\((.*?)\), .*?, torch.(\w+)\)", "".join(code)
    )
    large = [
        kind
        for shape, kind in buffers
        if math.prod(int(n) for n in shape.split(",") if n.strip()) >= 4 * 32 * 1000
    ]
    assert large and ("float32" not in large) == inside, large


def test_flops_are_six_per_parameter_of_a_matrix_and_twelve_for_attention():
    with torch.device("meta"):
        gpt2 = GPT(50257, **SHAPES["gpt2"])
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert gpt2.flops_per_token() == expected
