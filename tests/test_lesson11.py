"""Lesson 11: LoRA and QLoRA; only adapters change, merged equals unmerged, and n ranks
train as one.
"""

import contextlib
import csv
import io
import json
import math

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from ddp_course import UsageError, lesson11
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch, start_server
from ddp_course.scenery import questions, small_llama
from ddp_course.scenery.text import BPE, files_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning"
)  # as the lesson does
EXACT = ["--dropout", "0", "--precision", "fp32", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def server():
    start_server("transformers.trainer", "peft", "bitsandbytes", "datasets")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama that knows nothing, with the tokenizer of the course's own."""
    folder = tmp_path_factory.mktemp("base")
    sources = [path.read_bytes() for path in files_of("python")[1::40]]
    pieces = (source.decode() for source in sources)
    BPE.train(pieces, 400, folder / "pieces.json", [questions.END, questions.PAD])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "pieces.json"),
        eos_token=questions.END,
        pad_token=questions.PAD,
        chat_template=questions.CHAT,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = small_llama.SHAPE | {"hidden_size": 64, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def question_file(tmp_path_factory):
    """A CSV file of 140 questions, with answers of very different lengths."""
    file = tmp_path_factory.mktemp("questions") / "questions.csv"
    rows = [f"Add {n} to x.,def add_{n}(x{', y' * (n % 12)}):" for n in range(140)]
    file.write_text(
        "\n".join(
            ["user,prompt", *[row.replace(",def", ',"def', 1) + '"' for row in rows]]
        )
    )
    return file


def train(plant, flags):
    plant()
    with contextlib.redirect_stdout(io.StringIO()):
        return lesson11.main(flags)


def run(base, question_file, out, *options, nproc=2, plant=lambda: None):
    flags = [
        "--model",
        str(base),
        "--data",
        str(question_file),
        "--epochs",
        "1",
        "--train-samples",
        "48",
    ]
    flags += ["--batch-size", "4", "--accumulate", "2", "--out", str(out), *options]
    results = launch(train, plant, flags, nproc=nproc, timeout=200)
    losses = [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return results, losses


# ---- LoRA by hand ----


@pytest.mark.parametrize("bias", [True, False])
def test_our_layer_is_pefts_layer_and_merges_into_a_linear_one(bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(12, 7, bias=bias), torch.randn(3, 5, 12)
    ours = lesson11.LoRALinear(nn.Linear(12, 7, bias=bias), r=4, alpha=32, dropout=0.0)
    ours.layer.load_state_dict(linear.state_dict())
    torch.testing.assert_close(ours(x), linear(x))  # it begins as what it was
    config = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["0"])
    theirs = get_peft_model(nn.Sequential(linear), config)
    adapter = theirs.base_model.model[0]
    with torch.no_grad():
        ours.B.normal_()
        adapter.lora_A.default.weight.copy_(ours.A)
        adapter.lora_B.default.weight.copy_(ours.B)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).pow(2).sum().backward()
    theirs(x).pow(2).sum().backward()
    torch.testing.assert_close(ours.A.grad, adapter.lora_A.default.weight.grad)
    torch.testing.assert_close(ours.B.grad, adapter.lora_B.default.weight.grad)
    assert [name for name, value in ours.named_parameters() if value.requires_grad] == [
        "A",
        "B",
    ]
    unmerged, merged = ours(x), ours.merge()
    assert type(merged) is nn.Linear
    torch.testing.assert_close(merged(x), unmerged)


# ---- what it is trained on ----


def test_questions_are_functions_of_the_standard_library_and_come_from_every_second_file():
    with open(questions.questions_file(), newline="") as file:
        rows = list(csv.DictReader(file))
    others = questions.functions_in(
        path.read_bytes() for path in files_of("python")[1::2]
    )
    assert len(rows) > 2000 and len({row["user"] for row in rows}) == len(rows)
    assert all(
        row["prompt"].startswith("def ") and row["prompt"].endswith("):")
        for row in rows
    )
    pairs = {(row["user"], row["prompt"]) for row in rows}
    assert len(pairs & set(others)) < 0.05 * len(pairs)  # a few stand in several files


def test_the_end_of_an_answer_is_a_target_and_padding_is_not(base):
    tokenizer = questions.load_tokenizer(base)
    texts = [
        questions.conversation("Why?", "Because."),
        questions.conversation("And how so, if I may ask?", "So."),
    ]
    rows = [
        {"input_ids": tokenizer.apply_chat_template(text)["input_ids"]}
        for text in texts
    ]
    batch = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for row, labels in zip(rows, batch["labels"]):
        length = len(row["input_ids"])
        assert (
            labels[length - 1] == tokenizer.eos_token_id
            and (labels[length:] == -100).all()
        )


def test_a_tokenizer_without_padding_gets_one_that_is_not_the_end(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token, tokenizer.chat_template = None, None
    tokenizer.save_pretrained(tmp_path / "neither")
    with pytest.raises(UsageError, match="neither a padding nor an unknown token"):
        questions.load_tokenizer(tmp_path / "neither")
    tokenizer.unk_token = "def"
    tokenizer.save_pretrained(tmp_path / "unknown")
    loaded = questions.load_tokenizer(tmp_path / "unknown")
    assert loaded.pad_token == "def" and loaded.chat_template == questions.CHAT


def test_the_held_out_loss_is_the_mean_over_tokens_not_over_batches():
    logits, labels = torch.randn(3, 6, 9), torch.randint(9, (3, 6))
    labels[0, 2:], labels[1, 5:] = -100, -100
    losses = lesson11.token_losses(logits, labels)
    prediction = transformers.EvalPrediction(
        predictions=losses.numpy(), label_ids=labels.numpy()
    )
    shifted = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    assert lesson11.mean_loss(prediction)["token_loss"] == pytest.approx(
        shifted.item(), rel=1e-5
    )


# ---- the proofs ----


@pytest.mark.parametrize(
    "method, nproc, batch_size",
    [("lora", 2, 6), ("qlora", 2, 6), ("full", 3, 4)],
)
def test_n_ranks_train_as_one(method, nproc, batch_size, base, question_file, tmp_path):
    options = ["--method", method, *EXACT]
    [alone], one = run(
        base, question_file, tmp_path / "one", *options, "--batch-size", "12", nproc=1
    )
    results, many = run(
        base,
        question_file,
        tmp_path / "many",
        *options,
        "--batch-size",
        str(batch_size),
        nproc=nproc,
    )
    assert len(one) == 2 and one[0] != one[1]
    torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-3)
    assert results[0]["loss_after"] == pytest.approx(alone["loss_after"], abs=2e-3)
    assert len({result["params_sha256"] for result in results}) == 1


def test_in_4_bits_it_trains_as_on_the_same_weights_unpacked(
    base, question_file, tmp_path
):
    """On any CPU; see keep_layout."""
    args = lesson11.arguments(["--method", "qlora", *EXACT])
    args.base = base
    unpacked = lesson11.load_model(args, torch.device("cpu")).unload().dequantize()
    unpacked.save_pretrained(tmp_path / "unpacked")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "unpacked")
    options = [*EXACT, "--train-samples", "120", "--accumulate", "1"]
    [packed, _], losses = run(
        base, question_file, tmp_path / "4", *options, "--method", "qlora"
    )
    [whole, _], expected = run(
        tmp_path / "unpacked", question_file, tmp_path / "32", *options
    )
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    assert packed["loss_after"] == pytest.approx(whole["loss_after"], abs=2e-3)
    assert packed["loss_after"] < packed["loss_before"] - 0.3


def evaluates_first():
    """Plant what our program is careful not to do."""

    class EvaluatesFirst(lesson11.Trainer):
        def train(self, **options):
            self.evaluate()
            return super().train(**options)

    lesson11.Trainer = EvaluatesFirst


def test_to_evaluate_before_training_would_train_without_ddp_and_the_fingerprints_tell(
    base, question_file, tmp_path
):
    results, _ = run(base, question_file, tmp_path, *EXACT, plant=evaluates_first)
    assert len({result["params_sha256"] for result in results}) == 2


def keeps_the_model():
    """Let `finish` write what the model was, and is."""
    load, finish = lesson11.load_model, lesson11.finish

    def load_and_keep(args, device):
        model = load(args, device)
        lesson11.before = {
            name: value.detach().clone() for name, value in model.state_dict().items()
        }
        return model

    def compare(args, trainer):
        after = trainer.model.state_dict()
        changed = [
            name
            for name, value in lesson11.before.items()
            if not torch.equal(value, after[name])
        ]
        return finish(args, trainer) | {"changed": changed, "names": list(after)}

    lesson11.load_model, lesson11.finish = load_and_keep, compare


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_only_adapters_change_and_only_they_are_saved(
    method, base, question_file, tmp_path
):
    [result, _], _ = run(
        base, question_file, tmp_path, "--method", method, plant=keeps_the_model
    )
    adapters = [
        name for name in result["names"] if ".lora_A." in name or ".lora_B." in name
    ]
    assert len(adapters) == 2 * 4 * 2 and sorted(result["changed"]) == sorted(adapters)
    assert any("quant_state" in name for name in result["names"]) == (method == "qlora")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(adapters)
    assert (
        sum(value.numel() for value in saved.values()) == result["trained_parameters"]
    )
    assert not (tmp_path / ".adapter").exists()


def test_merged_equals_unmerged(base, question_file, tmp_path):
    run(base, question_file, tmp_path, "--learning-rate", "0.05", "--merge")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.randint(300, (2, 20))
    with torch.no_grad():
        untouched = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(
            merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4
        )
    assert (merged(tokens).logits - untouched).abs().max() > 0.05
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
        == questions.CHAT
    )


def test_the_loss_on_held_out_questions_falls(base, question_file, tmp_path):
    [result, _], losses = run(
        base,
        question_file,
        tmp_path,
        "--train-samples",
        "120",
        "--epochs",
        "3",
        "--accumulate",
        "1",
    )
    assert result["test_samples"] == 14
    assert result["loss_before"] == pytest.approx(
        math.log(400), abs=0.2
    )  # it knows nothing
    assert (
        result["loss_after"] < result["loss_before"] - 0.4
        and losses[-1] < losses[0] - 0.4
    )


def stops_after_an_epoch():
    class Stops(lesson11.Trainer):
        def _save_checkpoint(self, *args, **options):
            super()._save_checkpoint(*args, **options)
            raise RuntimeError("planted")

    lesson11.Trainer = Stops


def counts_batches():
    """Let the result say how many batches this rank has trained on: to begin anew would
    end alike, too.
    """
    batches, finish = [], lesson11.finish

    class Counts(lesson11.Trainer):
        def training_step(self, *args, **options):
            batches.append(1)
            return super().training_step(*args, **options)

    lesson11.Trainer = Counts
    lesson11.finish = lambda args, trainer: (
        finish(args, trainer) | {"batches": len(batches)}
    )


def test_a_resumed_run_goes_on_where_it_stopped(base, question_file, tmp_path):
    options = ["--epochs", "2", "--dropout", "0.1"]
    [whole, _], expected = run(base, question_file, tmp_path / "whole", *options)
    with pytest.raises(RankError, match="planted"):
        run(
            base,
            question_file,
            tmp_path / "parts",
            *options,
            plant=stops_after_an_epoch,
        )
    [resumed, _], losses = run(
        base,
        question_file,
        tmp_path / "parts",
        *options,
        "--resume",
        plant=counts_batches,
    )
    assert losses == expected and resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["batches"] == 48 // 2 // 4  # of the second epoch only


def backward_with(base, find_unused_parameters):
    args = lesson11.arguments(EXACT)
    args.base = base
    with process_group():
        network = lesson11.load_model(args, torch.device("cpu")).train()
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=lesson11.NON_REENTRANT
        )
        model = DistributedDataParallel(
            network, find_unused_parameters=find_unused_parameters
        )
        tokens = torch.arange(20)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [
            value.grad.norm().item()
            for value in network.parameters()
            if value.requires_grad
        ]


def test_without_reentrance_checkpointing_works_also_where_ddp_looks_for_unused_parameters(
    base,
):
    looking, not_looking = (
        launch(backward_with, base, unused)[0] for unused in (True, False)
    )
    assert looking == not_looking and max(looking) > 0


# ---- wrong use ----


def test_numbers_are_read_as_text(base, tmp_path):
    file = tmp_path / "sums.csv"
    file.write_text("user,prompt\n" + "\n".join(f"{n},{n + 1}" for n in range(40)))
    [result, _], _ = run(base, file, tmp_path / "out", "--train-samples", "36")
    assert result["train_samples"] == 36 and result["test_samples"] == 4


@pytest.mark.parametrize(
    "content, said",
    [
        ("question,answer\na,b\nc,d\n", "has no column prompt and no user"),
        ("user,prompt\na,b\n", "has 1 rows"),
        ("user,prompt\na,b\nc,\n", "has an empty cell in row 2"),
        ("", "cannot read --data"),
        (None, "cannot read --data"),
    ],
)
def test_a_csv_that_will_not_do_gives_one_line(content, said, base, tmp_path):
    file = tmp_path / "questions.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RankError) as error:
        run(base, file, tmp_path / "out")
    assert (
        error.value.message.startswith("ddp_course.UsageError: ")
        and said in error.value.message
    )
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    "options, said",
    [
        (["--train-samples", "999"], "--train-samples 999 is more than --data"),
        (["--batch-size", "40"], "--batch-size 40 is more than a rank's share"),
        (["--method", "full", "--merge"], "--merge is for adapters"),
        (["--longest", "1"], "--longest 1 leaves no token to guess"),
        (
            ["--model", "./no/such/folder/here"],
            "cannot load --model ./no/such/folder/here",
        ),
        (["--resume"], "there is no checkpoint in"),
    ],
)
def test_wrong_use_gives_one_line(options, said, base, question_file, tmp_path):
    with pytest.raises(RankError) as error:
        run(base, question_file, tmp_path / "out", *options)
    assert (
        error.value.message.startswith("ddp_course.UsageError: ")
        and said in error.value.message
    )
    assert "\n" not in error.value.message
