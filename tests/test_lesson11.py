"""Lesson 11: LoRA and QLoRA; only adapters change, merged equals unmerged, only answers
are learnt, and n ranks train as one.
"""

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from functools import partial
from random import Random

import accelerate
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

from ddp_course import UsageError, lesson11, runs
from ddp_course.data import questions
from ddp_course.data.text import BPE, files_of
from ddp_course.models import answers, llama
from ddp_course.models.lora import LoRALinear
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch, start_server

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # as the lesson does
EXACT = ["--dropout", "0", "--precision", "fp32", "--device", "cpu"]
CPU = torch.device("cpu")
ADAPTER = "adapter_model.safetensors"
# as chat models have them: ChatML with a system prompt, Llama 2's, and one that thinks
CHATML = (
    "{{ bos_token }}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
THINKS = CHATML.replace(
    "message['role'] + '\n'",
    "message['role'] + '\n' + ('<think>\n\n</think>\n\n' if loop.index == 2 else '')",
).replace("assistant\n'", "assistant\n<think>\n'")


@pytest.fixture(scope="module", autouse=True)
def server():
    start_server("transformers.trainer", "peft", "bitsandbytes", "datasets")


def make_model(folder, special, **tokens):
    """A Llama that knows nothing, in a folder, with a tokenizer of the course's own."""
    sources = [path.read_bytes() for path in files_of("python")[1::40]]
    pieces = (source.decode() for source in sources)
    BPE.train(pieces, 400, folder / "pieces.json", special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "pieces.json"), **tokens
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = llama.SHAPE | {"hidden_size": 64, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("base"),
        [questions.END, questions.PAD],
        eos_token=questions.END,
        pad_token=questions.PAD,
        chat_template=questions.CHAT,
    )


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """As many small chat models come: a template and a BOS of its own, and pad = eos."""
    return make_model(
        tmp_path_factory.mktemp("chat"),
        ["<s>", "<|im_start|>", "<|im_end|>"],
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


@pytest.fixture(scope="module")
def question_file(tmp_path_factory):
    """A CSV file of 140 questions, with answers of very different lengths."""
    file = tmp_path_factory.mktemp("questions") / "questions.csv"
    rows = [f'Add {n} to x.,"def add_{n}(x{", y" * (n % 12)}):"' for n in range(140)]
    file.write_text("\n".join(["user,prompt", *rows]))
    return file


def train(plant, flags):
    noted = plant()
    with contextlib.redirect_stdout(io.StringIO()):
        return lesson11.main(flags) | {"noted": noted}


def note_norms():
    """A list that gets the gradients' norm before each update: Adam and clipping hide a
    wrong scale of all gradients from the losses.
    """
    norms, clip = [], accelerate.Accelerator.clip_grad_norm_

    def noted(*args, **options):
        norm = clip(*args, **options)
        norms.append(norm.item())
        return norm

    accelerate.Accelerator.clip_grad_norm_ = noted
    return norms


def run(base, question_file, out, *options, nproc=2, plant=lambda: None):
    """Run the program on ranks; the results and the losses."""
    flags = ["--model", str(base), "--data", str(question_file), "--out", str(out)]
    flags += ["--learning-rate", "1e-2"]  # the model is small
    flags += ["--epochs", "1", "--train-samples", "48", *options]
    results = launch(train, plant, flags, nproc=nproc, timeout=600)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return results, [json.loads(line)["loss"] for line in lines]


def arguments(base, *options):
    args = lesson11.arguments([*EXACT, *options])
    args.base = base
    return args


def logits_of(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


# ---- LoRA by hand ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_our_layer_is_pefts_layer(bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(12, 7, bias=bias, dtype=dtype)
    copy = nn.Linear(12, 7, bias=bias, dtype=dtype)
    copy.load_state_dict(linear.state_dict())
    ours = LoRALinear(copy, r=4, alpha=32, dropout=0.0)
    inputs = [torch.randn(3, 5, 12).to(dtype).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    assert torch.equal(ours(inputs[0]), linear(inputs[0]))  # it starts as it was
    config = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["0"])
    theirs = get_peft_model(nn.Sequential(linear), config)
    adapter = theirs.base_model.model[0]
    with torch.no_grad():
        ours.B.normal_()
        adapter.lora_A.default.weight.copy_(ours.A)
        adapter.lora_B.default.weight.copy_(ours.B)
    outputs = ours(inputs[0]), theirs(inputs[1])
    assert outputs[0].dtype == outputs[1].dtype == dtype
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.pow(2).sum().backward()
    torch.testing.assert_close(ours.A.grad, adapter.lora_A.default.weight.grad)
    torch.testing.assert_close(ours.B.grad, adapter.lora_B.default.weight.grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    trained = [name for name, value in ours.named_parameters() if value.requires_grad]
    assert trained == ["A", "B"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_can_be_merged_twice_and_stays_as_it_is(dtype):
    torch.manual_seed(0)
    lora = LoRALinear(nn.Linear(12, 7, dtype=dtype), r=4, dropout=0.0)
    with torch.no_grad():
        lora.B.normal_()
    x = torch.randn(5, 12).to(dtype)
    before, merged = lora(x), lora.merge()
    assert type(merged) is nn.Linear and merged.weight.dtype == dtype
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(merged(x), before, **tolerance)
    assert torch.equal(lora(x), before)
    assert torch.equal(lora.merge()(x), merged(x))


# ---- what it is trained on ----


def test_questions_are_functions_of_the_standard_library_from_every_second_file():
    with open(questions.questions_file(), newline="") as file:
        rows = list(csv.DictReader(file))
    others = questions.functions_in(
        path.read_bytes() for path in files_of("python")[1::2]
    )
    assert len(rows) > 2000 and len({row["user"] for row in rows}) == len(rows)
    for row in rows:
        assert row["answer"].startswith("def ") and row["answer"].endswith("):")
    pairs = {(row["user"], row["answer"]) for row in rows}
    assert len(pairs & set(others)) < 0.05 * len(pairs)  # a few are in several files


ADD = questions.conversation("Add it.", "def f(x):")


def learnt(encoded, tokenizer):
    """The text of the tokens that have a label."""
    return tokenizer.decode(
        [label for label in encoded["labels"] if label != questions.IGNORED]
    )


@pytest.mark.parametrize(
    "template, asked, answered",
    [
        (questions.CHAT, "<s>user: Add it.\nassistant:", " def f(x):<|im_end|>"),
        (
            CHATML,
            "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd it."
            "<|im_end|>\n<|im_start|>assistant\n",
            "def f(x):<|im_end|>\n",
        ),
        (
            llama.SMOLLM2,
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
            "Hugging Face<|im_end|>\n<|im_start|>user\nAdd it.<|im_end|>\n"
            "<|im_start|>assistant\n",
            "def f(x):<|im_end|>\n",
        ),
        (INST, "<s>[INST] Add it. [/INST]", " def f(x):<|im_end|>"),
        (
            THINKS,
            "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd it."
            "<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "\n</think>\n\ndef f(x):<|im_end|>\n",
        ),
    ],
    ids=["ours", "chatml", "smollm2", "inst", "thinks"],
)
def test_only_the_answer_is_learnt_whatever_the_template(
    template, asked, answered, chat_model
):
    tokenizer = questions.load_tokenizer(chat_model)
    tokenizer.chat_template = template
    encoded = questions.encode(ADD, tokenizer, 256)
    assert tokenizer.decode(encoded["input_ids"]) == asked + answered
    assert encoded["input_ids"].count(tokenizer.bos_token_id) == asked.count("<s>")
    assert learnt(encoded, tokenizer) == answered
    everything = questions.encode(ADD, tokenizer, 256, True)
    assert everything["labels"] == everything["input_ids"] == encoded["input_ids"]


@pytest.mark.parametrize("lacks", ["nothing", "padding", "padding and template"])
def test_the_end_of_an_answer_is_learnt_and_padding_is_not(lacks, chat_model, tmp_path):
    """With pad = eos, and with neither a padding nor an unknown token, as Llama 3."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    assert tokenizer.pad_token == tokenizer.eos_token and not tokenizer.unk_token
    if "padding" in lacks:
        tokenizer.pad_token = None
    if "template" in lacks:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tokenizer = questions.load_tokenizer(tmp_path)
    rows = [
        questions.encode(questions.conversation(*pair), tokenizer, 256)
        for pair in [("Why?", "Because."), ("And how so, if at all?", "So.")]
    ]
    batch = transformers.DataCollatorForSeq2Seq(tokenizer)(rows)
    for row, labels, mask in zip(rows, batch["labels"], batch["attention_mask"]):
        length = len(row["input_ids"])
        assert tokenizer.eos_token_id in labels[:length]
        assert (labels[length:] == questions.IGNORED).all()
        assert mask.sum() == length
    by_number = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    hidden = by_number([{"input_ids": row["input_ids"]} for row in rows])["labels"]
    assert not (hidden == tokenizer.eos_token_id).any()  # the trap


def test_our_small_model_can_talk_as_smollm2_does(base, tmp_path):
    folder = llama.with_chat_of_smollm2(base, tmp_path / "chat")
    tokenizer = questions.load_tokenizer(folder)
    named = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    encoded = questions.encode(ADD, tokenizer, 256)
    assert learnt(encoded, tokenizer) == "def f(x):<|im_end|>\n"
    ids = encoded["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == ids.count(tokenizer.eos_token_id) == 3
    before = AutoTokenizer.from_pretrained(base)
    assert len(tokenizer) == len(before)
    assert tokenizer.eos_token_id == before.eos_token_id  # so its embedding has learnt
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def test_a_tokenizer_that_cannot_end_an_answer_is_refused(chat_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no token that ends a text"):
        questions.load_tokenizer(tmp_path)


def test_the_held_out_loss_is_the_mean_over_tokens_not_over_batches():
    logits, labels = torch.randn(3, 6, 9), torch.randint(9, (3, 6))
    labels[0, 2:], labels[1, 5:] = -100, -100
    losses = lesson11.token_losses(logits, labels)
    prediction = transformers.EvalPrediction(losses.numpy(), labels.numpy())
    shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    expected = pytest.approx(nn.functional.cross_entropy(*shifted).item(), rel=1e-5)
    assert lesson11.mean_loss(prediction)["token_loss"] == expected


# ---- the proofs ----


@pytest.mark.parametrize(
    "method, nproc, batch_size",
    [("lora", 2, 6), ("qlora", 2, 6), ("full", 3, 4)],
)
def test_n_ranks_train_as_one(method, nproc, batch_size, base, question_file, tmp_path):
    def on(ranks, batch_size):
        options = ["--method", method, *EXACT, "--batch-size", str(batch_size)]
        folder = tmp_path / str(ranks)
        how = {"nproc": ranks, "plant": note_norms}
        return run(base, question_file, folder, *options, **how)

    [alone], one = on(1, 12)
    results, many = on(nproc, batch_size)
    assert len(one) == 2 and one[0] != one[1]
    torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-3)
    assert len(alone["noted"]) == len(one)
    assert results[0]["noted"] == pytest.approx(alone["noted"], rel=1e-2)
    assert results[0]["loss_after"] == pytest.approx(alone["loss_after"], abs=2e-3)
    assert len({result["params_sha256"] for result in results}) == 1


def keep_a_cache():
    """The fault of a loop of one's own: transformers then does not see what is packed."""
    arguments = lesson11.training_arguments
    lesson11.training_arguments = lambda *given: dataclasses.replace(
        arguments(*given), use_cache=True
    )


def test_packed_it_trains_as_padded_unless_the_model_keeps_a_cache(
    base, question_file, tmp_path
):
    [padded, _], losses = run(base, question_file, tmp_path / "padded", *EXACT)
    options = [*EXACT, "--pack"]
    [packed, _], same = run(base, question_file, tmp_path / "packed", *options)
    torch.testing.assert_close(same, losses, rtol=1e-4, atol=1e-4)
    assert packed["loss_after"] == pytest.approx(padded["loss_after"], abs=1e-4)
    faulty = tmp_path / "faulty"
    _, others = run(base, question_file, faulty, *options, plant=keep_a_cache)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(others, losses, rtol=1e-4, atol=1e-4)


def test_in_4_bits_it_trains_as_on_the_same_weights_unpacked(
    base, question_file, tmp_path
):
    """On any CPU; see keep_layout."""
    unpacked = lesson11.load_base(arguments(base, "--method", "qlora"), CPU)
    unpacked.dequantize().save_pretrained(tmp_path / "unpacked")
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


def test_in_4_bits_nothing_that_stays_unpacked_grows(base):
    """peft's prepare_model_for_kbit_training would make it fp32."""
    args = arguments(base, "--method", "qlora", "--precision", "bf16")
    model = lesson11.load_model(args, CPU)
    kinds = {value.dtype for value in model.parameters() if not value.requires_grad}
    assert kinds == {torch.uint8, torch.bfloat16}


def evaluates_first():
    """Plant what our program is careful not to do."""

    class EvaluatesFirst(lesson11.transformers.Trainer):
        def train(self, **options):
            self.evaluate()
            return super().train(**options)

    lesson11.transformers.Trainer = EvaluatesFirst


def test_to_evaluate_before_training_would_train_without_ddp_and_the_fingerprints_tell(
    base, question_file, tmp_path
):
    results, _ = run(base, question_file, tmp_path, *EXACT, plant=evaluates_first)
    assert len({result["params_sha256"] for result in results}) == 2


def keeps_the_model():
    """Let the result say which tensors of the model have changed."""
    load, report, before = lesson11.load_model, lesson11.report, {}

    def load_and_keep(args, device):
        model = load(args, device)
        state = model.state_dict().items()
        before.update({name: value.detach().clone() for name, value in state})
        return model

    def compare(args, trainer):
        after = trainer.model.state_dict()
        changed = [name for name in after if not torch.equal(before[name], after[name])]
        return report(args, trainer) | {"changed": changed, "names": list(after)}

    lesson11.load_model, lesson11.report = load_and_keep, compare


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
    assert len(adapters) == 2 * 7 * 2 and sorted(result["changed"]) == sorted(adapters)
    assert any("quant_state" in name for name in result["names"]) == (method == "qlora")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(adapters)
    numbers = sum(value.numel() for value in saved.values())
    assert numbers == result["trained_parameters"]
    assert not (tmp_path / ".adapter").exists()


def counts_forwards(path):
    """Have a process write how often it has begun an MLP of the model. (Torch stops
    recomputing in the middle of the last one that it needs.)
    """
    calls, load_model = [], lesson11.load_model

    def load(args, device):
        model = load_model(args, device)
        for module in model.modules():
            if type(module).__name__ == "LlamaDecoderLayer":
                module.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    def report(*arguments, real=lesson11.report):
        path.write_text(str(len(calls)))
        return real(*arguments)

    lesson11.load_model, lesson11.report = load, report


def test_checkpointing_computes_activations_twice_and_ends_with_the_same_bits(
    base, question_file, tmp_path
):
    ends, forwards = [], []
    for name, flags in (("plain", []), ("again", ["--checkpoint-activations"])):
        plant = partial(counts_forwards, tmp_path / f"{name}.txt")
        results, losses = run(
            base, question_file, tmp_path / name, *EXACT, *flags, nproc=1, plant=plant
        )
        ends.append((results[0]["params_sha256"], losses))
        forwards.append(int((tmp_path / f"{name}.txt").read_text()))
    assert ends[0] == ends[1]
    assert forwards[1] > 1.3 * forwards[0]


def test_alpha_over_r_is_the_scale_of_the_adapters(base):
    four = ["--r", "4", "--alpha", "8"]
    for flags, scale in ((["--r", "8"], 4), (four, 2), ([*four, "--rslora"], 4)):
        model = lesson11.load_model(arguments(base, *flags), torch.device("cpu"))
        scales = [
            m.scaling["default"]
            for m in model.modules()
            if hasattr(m, "scaling") and isinstance(m.scaling, dict)
        ]
        assert scales and set(scales) == {scale}


@pytest.mark.parametrize(
    "flags, mlp",
    [([], True), (["--all-linear"], True), (["--targets", "attention"], 0)],
)
def test_adapters_are_beside_all_linear_layers_but_the_head_or_attentions_only(
    flags, mlp, base
):
    """--all-linear is the old name of what is now the default."""
    model = lesson11.load_model(arguments(base, *flags, "--r", "2"), CPU)
    adapted = {
        name.split(".")[-4]
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    more = {"gate_proj", "up_proj", "down_proj"} if mlp else set()
    assert adapted == {*lesson11.ATTENTION} | more


def test_with_patience_a_run_ends_early_and_keeps_the_best_epoch(base, tmp_path):
    """Random names cannot be learnt, and the rate is far too high."""
    random, file = Random(0), tmp_path / "random.csv"
    names = ["".join(random.choices("abcdefghijklmnop", k=12)) for _ in range(60)]
    rows = [f'Add {n} to x.,"def {name}(x):"' for n, name in enumerate(names)]
    file.write_text("\n".join(["user,prompt", *rows]))
    options = [*EXACT, "--epochs", "12", "--learning-rate", "3", "--accumulate", "1"]
    results, _ = run(base, file, tmp_path, *options, "--patience", "1")
    log = (tmp_path / "train.log").read_text()
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", log)][1:]
    assert len(losses) == results[0]["epochs"] < 12  # it has ended early
    assert losses[-1] >= min(losses[:-1]) == losses[-2]
    assert results[0]["loss_after"] == pytest.approx(min(losses), abs=1e-3)
    assert len({result["params_sha256"] for result in results}) == 1
    # what is saved is the best epoch's, and so is what the ranks hold
    saved = tmp_path / "adapter"
    model = lesson11.load_base(arguments(base), CPU)
    model = PeftModel.from_pretrained(model, saved, torch_device="cpu")
    assert runs.params_sha256(model) == results[0]["params_sha256"]
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    updates = 48 // (2 * 4) * (len(losses) - 1)
    assert checkpoint.name == f"checkpoint-{updates}"
    best = load_file(checkpoint / ADAPTER)
    kept = load_file(saved / ADAPTER)
    assert all(torch.equal(best[name], kept[name]) for name in best)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_merged_equals_unmerged(method, base, question_file, tmp_path):
    """After qlora the unpacked weights are merged: with the original ones it differs."""
    options = ["--method", method, *EXACT, "--learning-rate", "0.05", "--merge"]
    run(base, question_file, tmp_path, *options)
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    merged = logits_of(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tokens
    )

    def adapted(model):
        return logits_of(PeftModel.from_pretrained(model, tmp_path / "adapter"), tokens)

    trained = adapted(lesson11.load_base(arguments(base, *options), CPU))
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    original = AutoModelForCausalLM.from_pretrained(base)
    assert (trained - logits_of(original, tokens)).abs().max() > 0.05
    if method == "lora":
        half = ["--merge-precision", "bf16"]
        args = arguments(base, *options, *half)
        lesson11.merge(args, tmp_path / "adapter", tmp_path / "half")
        short = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
        assert short.dtype == torch.bfloat16
        torch.testing.assert_close(
            logits_of(short, tokens), merged, rtol=0.05, atol=0.05
        )
    away = (trained - adapted(original)).abs().max()
    assert away > 0.01 if method == "qlora" else away < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == questions.CHAT
    assert not (tmp_path / ".merged").exists()


def test_the_loss_on_held_out_questions_falls(base, question_file, tmp_path):
    options = ["--train-samples", "120", "--epochs", "3", "--accumulate", "1"]
    [result, _], losses = run(base, question_file, tmp_path, *options)
    assert result["test_samples"] == 14
    knows_nothing = pytest.approx(math.log(400), abs=0.3)
    assert result["loss_before"] == knows_nothing
    assert result["loss_after"] < result["loss_before"] - 0.4
    assert losses[-1] < losses[0] - 0.4


def test_with_a_chat_models_own_template_bos_and_pad_as_eos_answers_end(
    chat_model, question_file, tmp_path
):
    """All weights are trained, since this model has never seen anything."""
    options = ["--method", "full", "--learning-rate", "5e-3", "--train-samples", "120"]
    # long enough for the tokens of every Python's sources, which are never the same
    options += ["--epochs", "16", "--accumulate", "1"]
    run(chat_model, question_file, tmp_path, *options)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == CHATML
    assert tokenizer.pad_token == tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = [f"Add {number} to x." for number in range(10)]
    said = questions.answers(model, tokenizer, asked, 60)
    assert sum(text.endswith("<|im_end|>") for text in said) >= 8, said


def stops_after_an_epoch():
    class Stops(lesson11.transformers.Trainer):
        def _save_checkpoint(self, *args, **options):
            super()._save_checkpoint(*args, **options)
            raise RuntimeError("planted")

    lesson11.transformers.Trainer = Stops


def counts_batches():
    """Let the result say how many batches this rank has trained on.

    A run that starts again from the beginning would end alike.
    """
    batches, report = [], lesson11.report

    class Counts(lesson11.transformers.Trainer):
        def training_step(self, *args, **options):
            batches.append(1)
            return super().training_step(*args, **options)

    lesson11.transformers.Trainer = Counts
    lesson11.report = lambda args, trainer: (
        report(args, trainer) | {"batches": len(batches)}
    )


def test_a_resumed_run_goes_on_where_it_stopped(base, question_file, tmp_path):
    options = ["--epochs", "2", "--dropout", "0.1"]
    [whole, _], expected = run(base, question_file, tmp_path / "whole", *options)
    parts = [base, question_file, tmp_path / "parts", *options]
    with pytest.raises(RankError, match="planted"):
        run(*parts, plant=stops_after_an_epoch)
    [resumed, _], losses = run(*parts, "--resume", plant=counts_batches)
    assert losses == expected and resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["batches"] == 48 // 2 // 4  # of the second epoch only


def backward_with(base, find_unused_parameters):
    with process_group():
        network = lesson11.load_model(arguments(base), CPU).train()
        network.activation_checkpointing_enable()
        model = DistributedDataParallel(
            network, find_unused_parameters=find_unused_parameters
        )
        tokens = torch.arange(20)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        trained = [value for value in network.parameters() if value.requires_grad]
        return [value.grad.norm().item() for value in trained]


def test_without_reentrance_checkpointing_works_also_where_ddp_looks_for_unused_parameters(
    base,
):
    looking, not_looking = (
        launch(backward_with, base, unused)[0] for unused in (True, False)
    )
    assert looking == not_looking and max(looking) > 0


# ---- preferences ----


def test_the_loss_of_a_preference_is_equation_7_of_the_paper(base):
    """Rafailov et al., 2023: computed here token by token; TRL's `sigmoid` loss, too."""
    torch.manual_seed(0)
    network = lesson11.load_model(arguments(base, "--r", "2"), CPU).train()
    tokenizer = questions.load_tokenizer(base)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)
    texts = [("Add it.", "def f(x):", "def g():"), ("Why?", "def why(x, y):", "So.")]
    rows = [
        [questions.encode(questions.conversation(user, each), tokenizer, 256)
         for each in both]
        for user, *both in texts
    ]  # fmt: skip
    batches = [collate([row[side] for row in rows]) for side in (0, 1)]
    before = answers.before_training(network, *batches)
    start = answers.margins(network, *batches, before)
    assert torch.equal(start, torch.zeros(2))  # the model is its own reference
    assert answers.dpo_loss(start).item() == pytest.approx(math.log(2))
    for name, value in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.5)

    def log_likelihood(row):
        tokens = torch.tensor([row["input_ids"]])
        each = network(tokens).logits[0].log_softmax(dim=-1)
        return sum(
            each[at - 1, label]
            for at, label in enumerate(row["labels"])
            if label != questions.IGNORED
        )

    losses = []
    for chosen, rejected in rows:
        trained = [log_likelihood(row) for row in (chosen, rejected)]
        with network.disable_adapter():
            reference = [log_likelihood(row) for row in (chosen, rejected)]
        gains = [now - then for now, then in zip(trained, reference)]
        losses.append(-torch.log(torch.sigmoid(0.1 * gains[0] - 0.1 * gains[1])))
    margins = answers.margins(network, *batches, before)
    assert margins.abs().min() > 0.01
    loss = answers.dpo_loss(margins, beta=0.1)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


# ---- wrong use ----


def test_importing_the_lesson_does_not_import_bitsandbytes():
    """Or Accelerate's notebook_launcher would refuse to start main."""

    def loads(module):
        found = f"import sys, {module}; print('bitsandbytes' in sys.modules)"
        command = [sys.executable, "-c", found]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    assert loads("ddp_course.lesson11") == "False"
    assert loads("transformers.trainer") == "True"  # that is why


def spoils_a_batch_on_rank_1():
    """Let the second micro-batch of rank 1 have a loss that is no number."""
    load = lesson11.load_model

    def load_and_spoil(args, device):
        model, seen = load(args, device), []

        def spoil(model, inputs, output):
            if model.training:
                seen.append(1)
                output.loss = output.loss * (math.nan if len(seen) == 2 else 1)
            return output

        if torch.distributed.get_rank() == 1:
            model.register_forward_hook(spoil)
        return model

    lesson11.load_model = load_and_spoil


def test_a_loss_that_is_no_number_ends_the_run_and_names_step_and_rank(
    base, question_file, tmp_path
):
    with pytest.raises(RankError) as error:
        run(base, question_file, tmp_path, plant=spoils_a_batch_on_rank_1)
    assert "the loss is not a number in step 2 of the epoch, on rank 1" in str(
        error.value
    )
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "adapter").exists()


def test_numbers_are_read_as_text(base, tmp_path):
    file = tmp_path / "sums.csv"
    file.write_text("user,prompt\n" + "\n".join(f"{n},{n + 1}" for n in range(40)))
    options = ["--train-samples", "36"]
    [result, _], _ = run(base, file, tmp_path / "out", *options)
    assert result["train_samples"] == 36 and result["test_samples"] == 4


def test_columns_may_be_written_in_any_case_and_order_among_others(base, tmp_path):
    file = tmp_path / "questions.csv"
    rows = "\n".join(f"{n},def f_{n}():,Give {n}." for n in range(40))
    file.write_text(f"id,PROMPT, User\n{rows}\n")
    options = ["--train-samples", "36"]
    [result, _], _ = run(base, file, tmp_path / "out", *options)
    assert result["train_samples"] == 36


@pytest.mark.parametrize(
    "content, said",
    [
        (
            "question,id\na,b\nc,d\n",
            "has no column answer; its columns are question, id",
        ),
        ("answer,id\na,b\nc,d\n", "has no column user"),
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
    assert_one_line(said, base, file, tmp_path / "out")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--train-samples", "999"], "--train-samples 999 is more than --data"),
        (["--batch-size", "40"], "--batch-size 40 is more than a rank's share"),
        (["--method", "full", "--merge"], "--merge is for adapters"),
        (["--longest", "12"], "--longest 12 cuts off all of the answer in"),
        (["--longest", "1", "--all-tokens"], "--longest 1 cuts off all of the answer"),
        (["--model", "./no/folder"], "cannot load --model ./no/folder"),
        (["--resume"], "there is no checkpoint in"),
    ],
)
def test_wrong_use_gives_one_line(options, said, base, question_file, tmp_path):
    assert_one_line(said, base, question_file, tmp_path / "out", *options)


def test_with_a_model_of_ones_own_the_rate_suits_large_models():
    rate = lambda *options: lesson11.arguments(options).learning_rate
    assert rate() == 1e-2 and rate("--model", "runs/smollm2") == 2e-4
    assert rate("--model", "runs/smollm2", "--learning-rate", "0") == 0


def assert_one_line(said, *given):
    with pytest.raises(RankError) as error:
        run(*given)
    message = error.value.message
    assert message.startswith("ddp_course.UsageError: ") and said in message
    assert "\n" not in message
