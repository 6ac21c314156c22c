"""Lesson 10: a GPT, its text and its recipe; n ranks train as one, and a resumed run is
the undisturbed one.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import COURSE, python, wait_until
from torch import nn
from torch.nn import functional as F

from ddp_course import UsageError, lesson10
from ddp_course.ranks.launch import RankError, launch
from ddp_course.scenery.models import GPT
from ddp_course.scenery.text import Windows, files_of, load_text, made_once

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
    flags = f"--data {text} --train-samples 96 --batch-size 4 --warmup 3 --out {out}".split()
    results = launch(main, [*flags, *options], nproc=nproc, **more)
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
    contents = [path.read_bytes() for path in files_of(str(text))]
    decoded = tokenizer.decode(train.tolist()).split("\n\x00\n")
    held_out = tokenizer.decode(validation.tolist()).split("\n\x00\n")
    assert sorted([*decoded, *held_out]) == sorted(
        content.decode() for content in contents
    )
    assert not set(decoded) & set(held_out) and len(held_out) == 3
    assert train.dtype == np.uint16 and isinstance(train, np.memmap)
    (text / "00.txt").write_text("another")
    assert load_text(str(text))[3] != fingerprint


def test_pieces_of_words_give_the_same_text_in_fewer_tokens(text):
    (text / "umlauts.txt").write_text("Übung macht den Meister, 练习, \t\n\n  x")
    train, validation, tokenizer, _ = load_text(str(text), "bpe", vocabulary=300)
    as_bytes = load_text(str(text))
    assert tokenizer.decode(train) == as_bytes[2].decode(as_bytes[0].tolist())
    assert tokenizer.vocabulary == 300 and len(train) < 0.5 * len(as_bytes[0])
    assert int(train.max()) < 300


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
        "train.bin",
        "validation.bin",
    ]


# ---- the model ----


def test_its_largest_shape_is_gpt2():
    with torch.device("meta"):
        gpt2 = GPT(lesson10.GPT2_VOCABULARY, **lesson10.SHAPES["gpt2"])
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == 124_439_808
    assert gpt2.head.weight is gpt2.token_embedding.weight


def test_every_shape_has_heads_as_wide_as_gpt2s():
    assert {size["width"] / size["heads"] for size in lesson10.SHAPES.values()} == {64}


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
    layer |= {"expand": "mlp.c_fc", "contract": "mlp.c_proj"}
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
        GPT(**lesson10.SHAPES["small"]),
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
    args = SimpleNamespace(first_rate=0.1, learning_rate=1.0, last_rate=0.2, warmup=4)
    rates = [lesson10.learning_rate(step, 13, args) for step in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0])
    assert rates[8] == pytest.approx(0.6) and rates[12] == pytest.approx(0.2)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8, eta_min=0.2)
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


def clipped_at(text, out):
    """The updates in which gradients are clipped, by number."""
    seen, original = [], nn.utils.clip_grad_norm_
    update, count = lesson10.update, []

    def counted(*args):
        count.append(1)
        return update(*args)

    nn.utils.clip_grad_norm_ = lambda *args: (
        seen.append(len(count) - 1),
        original(*args),
    )[1]
    lesson10.update = counted
    lesson10.main(
        [
            "--data",
            text,
            "--train-samples",
            "24",
            "--batch-size",
            "4",
            "--warmup",
            "2",
            "--out",
            out,
        ]
    )
    return seen


def test_gradients_are_clipped_after_the_warm_up(text, tmp_path):
    assert launch(clipped_at, str(text), str(tmp_path / "out"), nproc=1) == [
        [2, 3, 4, 5]
    ]


# ---- the program ----


@pytest.mark.parametrize("nproc, batch_size, accumulate", [(2, 6, 1), (3, 2, 2)])
def test_n_ranks_train_as_one_with_the_same_batch_of_all(
    nproc, batch_size, accumulate, text, tmp_path
):
    [expected], one = run(text, tmp_path / "one", "--batch-size", "12", nproc=1)
    options = ["--batch-size", str(batch_size), "--accumulate", str(accumulate)]
    results, many = run(text, tmp_path / "many", *options, nproc=nproc)
    losses, others = ([row["loss"] for row in rows] for rows in (one, many))
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    torch.testing.assert_close(losses, others, rtol=1e-4, atol=1e-4)
    assert len({result["params_sha256"] for result in results}) == 1
    assert [row["tokens"] for row in many] == [
        (step + 1) * 12 * 128 for step in range(8)
    ]
    assert results[0]["validation_loss"] == pytest.approx(
        expected["validation_loss"], abs=1e-3
    )
    assert results[0]["tokens"] == 8 * 12 * 128 and results[0]["world_size"] == nproc


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


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "6"]])
def test_resumed_at_the_newest_or_by_number_it_ends_bit_for_bit_the_same(
    resume, text, tmp_path
):
    options = [
        "--dropout",
        "0.1",
        "--save-every",
        "3",
        "--keep",
        "9",
        "--eval-every",
        "4",
        "--epochs",
        "2",
    ]
    [whole, _], expected = run(text, tmp_path / "whole", *options)
    out = tmp_path / ("parts" if resume == ["--resume"] else "whole")
    if resume == ["--resume"]:
        with pytest.raises(RankError, match="planted"):
            run(text, out, *options, before=stops)
    [result, _], history = run(text, out, *options, *resume)
    assert "going on from step-00000006" in (out / "train.log").read_text()
    assert history == expected and result["params_sha256"] == whole["params_sha256"]


def test_a_checkpoint_that_is_not_there_is_named(text, tmp_path):
    with pytest.raises(
        RankError, match="step-00000007 is not there, or damaged; there are: none"
    ):
        run(text, tmp_path / "out", "--resume", "7")


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
    )
    assert result["train_loss"] == round(last["train_loss"], 4)
    assert history[3]["learning_rate"] == pytest.approx(2e-3) and history[0][
        "learning_rate"
    ] == pytest.approx(1e-5)
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
        (["--resume", "last"], "--resume last is no number of an update"),
        (["--node-rank", "1"], "--node-rank 1 is none of 1 machines"),
        (["--nproc", "2"], "torchrun has started the ranks already: leave out --nproc"),
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
    assert (
        json.loads((out / "result.json").read_text())["world_size"] == 2
        and "world_size          2" in output
    )
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
        timeout=100,
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
