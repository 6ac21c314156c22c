"""Fine-tuning a language model with LoRA, the frozen model whole or in 4 bits: Trainer and peft.

torchrun --nproc_per_node 2 ddp_course/lesson11.py --epochs 1 --train-samples 64
torchrun --nproc_per_node 2 ddp_course/lesson11.py --method qlora --epochs 1 --train-samples 64
python ddp_course/lesson11.py --method full --learning-rate 5e-4 --epochs 1 --train-samples 64
"""

import math
import os
import shutil
import time
import warnings

import ddp_course.quick_trainer  # noqa: F401, before transformers, which comes quicker then

# isort: split
import datasets
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from ddp_course import UsageError, base_model, runs
from ddp_course.distributed import choose_device, stay_on_this_machine, torchrun_environment
from ddp_course.lesson06 import PRECISIONS
from ddp_course.lesson08 import logged, prepare_checkpoints

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # the four matrices of attention
NON_REENTRANT = {"use_reentrant": False}
MOST_HELD_OUT = 128  # questions, and a tenth of them at the most
MOST_ON_A_CPU = 1024  # questions to train on, where nobody says how many

# transformers 5.23 has begun to call it activation checkpointing; peft, and versions before that, have not
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)

# ---- LoRA by hand ----


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it two thin matrices that learn: W x + b + (alpha / r) B A x.

    Takes float (..., inputs), returns (..., outputs). E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language
    Models", 2021. B begins as zeros, so the layer begins as the one it was.
    """

    def __init__(self, layer, r=8, alpha=32, dropout=0.05):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(r, layer.in_features))
        self.B = nn.Parameter(torch.zeros(layer.out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale, self.dropout = alpha / r, nn.Dropout(dropout)

    def forward(self, x):
        return self.layer(x) + self.scale * (self.dropout(x) @ self.A.T @ self.B.T)

    @torch.no_grad()
    def merge(self):
        """One linear layer that computes the same."""
        self.layer.weight += self.scale * self.B @ self.A
        return self.layer


# ---- questions ----


def load_questions(args, tokenizer, settings):
    """The tokens of questions with their answers: (to train on, held out), two datasets of `input_ids`."""
    path = base_model.questions() if args.data == "questions" else args.data
    with settings.main_process_first(desc="reading the questions"):  # the others read what it has cached
        try:
            rows = datasets.Dataset.from_csv(path, cache_dir=str(args.out / "cache"), keep_in_memory=True)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise UsageError(f"cannot read --data {path}: {str(error).splitlines()[0]}") from None
    if missing := {"user", "prompt"} - set(rows.column_names):
        raise UsageError(f"--data {path} has no column {' and no '.join(sorted(missing))}")
    if len(rows) < 2:
        raise UsageError(
            f"--data {path} has {len(rows)} rows: one to train on and one to hold out are the least"
        )
    for number, row in enumerate(rows, 1):
        if row["user"] is None or row["prompt"] is None:
            raise UsageError(f"--data {path} has an empty cell in row {number}")
    parts = rows.train_test_split(test_size=min(MOST_HELD_OUT, -(-len(rows) // 10)), seed=0)
    most = len(parts["train"]) if settings.device.type == "cuda" else min(MOST_ON_A_CPU, len(parts["train"]))
    if (wanted := args.train_samples or most) > len(parts["train"]):
        raise UsageError(f"--train-samples {wanted} is more than --data {path} has: {len(parts['train'])}")

    def encode(row):
        turns = conversation(str(row["user"]), str(row["prompt"]))
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        return tokenizer(text, truncation=True, max_length=args.longest, add_special_tokens=False)

    parts["train"] = parts["train"].select(range(wanted))
    encoded = parts.map(encode, remove_columns=rows.column_names, keep_in_memory=True)
    return encoded["train"], encoded["test"]


def conversation(user, prompt=None):
    """A question, and its answer where there is one, as chat templates want them."""
    answer = [] if prompt is None else [{"role": "assistant", "content": prompt}]
    return [{"role": "user", "content": user}, *answer]


def answer(model, tokenizer, user, length=40):
    """What the model answers: the most likely token each time, until it ends its answer."""
    text = tokenizer.apply_chat_template(conversation(user), tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
    model.eval()
    written = model.generate(**tokens, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True).strip()


# ---- the model ----


def load_tokenizer(name):
    """The tokenizer of a model, with a chat template and a token for padding. Raises UsageError where that cannot be."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        wanted = "a folder with a model and its tokenizer, or a name on the hub, and the hub within reach"
        raise UsageError(
            f"cannot load --model {name}, it must be {wanted}: {str(error).splitlines()[0]}"
        ) from None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = base_model.CHAT
    if tokenizer.pad_token is None:  # padding is no target: were it the end, no answer would learn to end
        if tokenizer.unk_token is None:
            raise UsageError(
                f"the tokenizer of {name} has neither a padding nor an unknown token: give it one"
            )
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def load_model(args, device):
    """The model that is trained: whole, frozen with adapters, or frozen in 4 bits with adapters."""
    precision = PRECISIONS[args.precision]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",  # 16 values, as they are spread in a normal distribution
        bnb_4bit_use_double_quant=True,  # the scale of each block of 64 is quantised, too
        bnb_4bit_compute_dtype=precision,  # unpacked to this for each product
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.base,
        dtype=torch.float32 if args.method == "full" else precision,  # small steps get lost in 16 bits
        quantization_config=quantization if args.method == "qlora" else None,
        device_map={"": device},
    )
    model.config.use_cache = False  # that is for writing
    if args.method == "full":
        return model
    if args.method == "qlora":
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=NON_REENTRANT)
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=args.dropout, target_modules=TARGETS
    )
    return get_peft_model(model, adapters)


def merge(base, adapter, folder):
    """Write the base model with an adapter's B A added to its weights: a model that needs no peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(folder)


# ---- the program ----


def token_losses(logits, labels):
    """The loss of each token, float (batch, tokens - 1); where there is nothing to guess, 0."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")


def mean_loss(prediction):
    """The mean of all tokens that are to be guessed: Trainer's own is a mean of batches' means."""
    counted = prediction.label_ids[:, 1:] != -100
    return {"token_loss": float(prediction.predictions[counted].mean())}


class Progress(TrainerCallback):
    """Logs a line after each evaluation, and notes how long each epoch's training took."""

    def __init__(self, log):
        self.log = log

    def on_epoch_begin(self, args, state, control, **_):
        self.begin = time.perf_counter()

    def on_epoch_end(self, args, state, control, **_):
        state.log_history.append({"epoch_seconds": time.perf_counter() - self.begin})

    def on_evaluate(self, args, state, control, metrics, **_):
        self.log.info(
            f"epoch {state.epoch or 0:.0f}: loss on held-out questions {metrics['eval_token_loss']:.3f}"
        )


def arguments(argv=None):
    parser = runs.parser(__file__, __doc__, trains="questions")
    parser.set_defaults(epochs=2, batch_size=4)
    parser.add_argument("--method", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument(
        "--model", help="a folder, or a name on the Hugging Face Hub; else a small one is made"
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="bf16 on a GPU and for qlora, else fp32"
    )
    parser.add_argument("--dropout", type=float, default=0.05, help="in the adapters (0.05)")
    parser.add_argument("--longest", type=runs.count, default=256, help="tokens; what is longer is cut (256)")
    parser.add_argument("--accumulate", type=runs.count, default=8, help="micro-batches an update (8)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="2e-4 suits models of billions")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument(
        "--merge", action="store_true", help="also write the base with the adapter merged into it"
    )
    args = parser.parse_args(argv)
    if args.merge and args.method == "full":
        parser.error("--merge is for adapters, and --method full has none")
    if args.longest < 2:
        parser.error("--longest 1 leaves no token to guess: 2 is the least")
    return args


def training_arguments(args, device):
    return TrainingArguments(
        output_dir=args.out / "checkpoints",
        use_cpu=device.type == "cpu",
        seed=args.seed,
        data_seed=args.seed,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=NON_REENTRANT,
        bf16=args.precision == "bf16",
        optim="paged_adamw_8bit" if device.type == "cuda" else "adamw_torch",
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,  # of all updates
        eval_strategy="epoch",
        eval_on_start=True,  # never trainer.evaluate() before train(): that would train without DDP
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=1,
        logging_nan_inf_filter=False,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


def main(argv=None):
    args = arguments(argv)
    device = choose_device(args.device)
    args.precision = args.precision or ("bf16" if device.type == "cuda" or args.method == "qlora" else "fp32")
    args.base = (
        args.model or base_model.small_llama()
    )  # before joining: in a job, transformers lets only rank 0 save
    stay_on_this_machine()
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # or Accelerate warns of it
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    settings = training_arguments(args, device)  # joins the group
    try:
        assert settings.world_size == torchrun_environment().world_size
        return train(args, settings)
    finally:
        settings.distributed_state.destroy_process_group()


def train(args, settings):
    log = runs.open_folder(args.out)
    tokenizer = load_tokenizer(args.base)
    train_set, test_set = load_questions(args, tokenizer, settings)
    runs.check_batch_size(args.batch_size, len(train_set), settings.world_size)
    prepare_checkpoints(args, settings)

    torch.manual_seed(args.seed)
    model = load_model(args, settings.device)
    trainer = Trainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        compute_metrics=mean_loss,
        preprocess_logits_for_metrics=token_losses,
        callbacks=[Progress(log)],
    )
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(args.seed + settings.process_index)  # each rank its own dropout
    trainer.train(resume_from_checkpoint=args.resume)
    save(trainer, args.out / ("model" if args.method == "full" else "adapter"))
    if args.merge and settings.process_index == 0:
        merge(args.base, args.out / "adapter", args.out / "merged")
    return finish(args, trainer)


def save(trainer, folder):
    """Write what was trained, the model or its adapter, whole or not at all. All ranks call it, and rank 0 writes."""
    temporary = folder.with_name(f".{folder.name}")
    trainer.save_model(temporary)
    if trainer.args.process_index == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)


def finish(args, trainer):
    """Write the result, which says how much was trained, and how well held-out questions were answered before and after."""
    model, settings, state = trainer.model, trainer.args, trainer.state
    trained = [value for value in model.parameters() if value.requires_grad]
    losses, seconds = logged(state, "loss"), sum(logged(state, "epoch_seconds"))
    held_out = logged(state, "eval_token_loss")  # before, and after each epoch
    result = {
        "lesson": args.lesson,
        "world_size": settings.world_size,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "device": settings.device.type,
        "method": args.method,
        "model": args.model or "small",
        "data": args.data,
        "train_samples": len(trainer.train_dataset),
        "test_samples": len(trainer.eval_dataset),
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "trained_parameters": sum(value.numel() for value in trained),
        "train_loss": round(losses[-1], 4),
        "loss_before": round(held_out[0], 4),
        "loss_after": round(held_out[-1], 4),
        "seconds": round(seconds, 2),
        "samples_per_second": round(args.epochs * len(trainer.train_dataset) / seconds),
        "params_sha256": runs.params_sha256(model),
    }
    if settings.process_index == 0:
        runs.write_result(
            args.out, result, [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
        )
    return result


if __name__ == "__main__":
    runs.start(main)
