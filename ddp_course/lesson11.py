"""Fine-tuning a language model with LoRA, whole or in 4 bits: Trainer and peft.

torchrun --nproc_per_node 2 ddp_course/lesson11.py --epochs 1 --train-samples 64
torchrun --nproc_per_node 2 ddp_course/lesson11.py --method qlora --train-samples 64
python ddp_course/lesson11.py --method full --learning-rate 5e-4 --train-samples 64
"""

import math
import os
import shutil
import warnings

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
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from ddp_course import lesson08, runs
from ddp_course.lesson06 import PRECISIONS
from ddp_course.lesson08 import logged, prepare_checkpoints
from ddp_course.ranks.environment import (
    choose_device,
    stay_on_this_machine,
    torchrun_environment,
)
from ddp_course.scenery.questions import load_questions, load_tokenizer
from ddp_course.scenery.small_llama import small_llama

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # the four matrices of attention
NON_REENTRANT = {"use_reentrant": False}

# transformers 5.23 has begun to call it activation checkpointing; peft, and versions
# before that, have not
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)

# ---- LoRA by hand ----


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it two thin matrices that learn: W x + b +
    (alpha / r) B A x.

    Takes float (..., inputs), returns (..., outputs). E. J. Hu et al., "LoRA: Low-Rank
    Adaptation of Large Language Models", 2021. B begins as zeros, so the layer begins
    as the one it was.
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


# ---- the model ----


def load_model(args, device):
    """The model that is trained: whole, frozen with adapters, or frozen in 4 bits with
    adapters.
    """
    precision = PRECISIONS[args.precision]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        # 16 values, as they are spread in a normal distribution
        bnb_4bit_quant_type="nf4",
        # the scale of each block of 64 is quantised, too
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,  # unpacked to this for each product
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.base,
        dtype=torch.float32
        if args.method == "full"
        else precision,  # small steps get lost in 16 bits
        quantization_config=quantization if args.method == "qlora" else None,
        device_map={"": device},
    )
    model.config.use_cache = False  # that is for writing
    if args.method == "full":
        return model
    if args.method == "qlora":
        keep_layout(model)
        model = prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs=NON_REENTRANT
        )
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        lora_dropout=args.dropout,
        target_modules=TARGETS,
    )
    return get_peft_model(model, adapters)


def keep_layout(model):
    """Have an evaluation leave packed weights as they are.

    On CPUs with AVX512-BF16 instructions, bitsandbytes lays them out anew for the first
    one, for a faster product that has no backward pass: whoever evaluates and then
    trains gets next to no gradients, and one warning.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def merge(base, adapter, folder):
    """Write the base model with an adapter's B A added to its weights: a model that
    needs no peft.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(folder)


# ---- the program ----


def token_losses(logits, labels):
    """The loss of each token, float (batch, tokens - 1); where there is nothing to
    guess, 0.
    """
    return F.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none"
    )


def mean_loss(prediction):
    """The mean of all tokens that are to be guessed: Trainer's own is a mean of
    batches' means.
    """
    counted = prediction.label_ids[:, 1:] != -100
    return {"token_loss": float(prediction.predictions[counted].mean())}


class Progress(lesson08.Progress):
    """Lesson 8's, with another line."""

    def on_evaluate(self, args, state, control, metrics, **_):
        loss = metrics["eval_token_loss"]
        self.log.info(
            f"epoch {state.epoch or 0:.0f}: loss on held-out questions {loss:.3f}"
        )


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, trains="questions")
    parser.set_defaults(epochs=2, batch_size=4)
    parser.add_argument("--method", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument(
        "--model",
        help="a folder, or a name on the Hugging Face Hub; else a small one is made",
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        help="bf16 on a GPU and for qlora, else fp32",
    )
    parser.add_argument(
        "--dropout", type=float, default=0.05, help="in the adapters (0.05)"
    )
    parser.add_argument(
        "--longest",
        type=runs.count,
        default=256,
        help="tokens; what is longer is cut (256)",
    )
    parser.add_argument(
        "--accumulate", type=runs.count, default=8, help="micro-batches an update (8)"
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=1e-2,
        help="2e-4 suits models of billions",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="also write the base with the adapter merged into it",
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
        # never trainer.evaluate() before train(): that would train without DDP
        eval_on_start=True,
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


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    args.precision = args.precision or (
        "bf16" if device.type == "cuda" or args.method == "qlora" else "fp32"
    )
    # before the ranks join each other: from then on, transformers lets rank 0 save, and
    # no other
    args.base = args.model or small_llama()
    stay_on_this_machine()
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(torch.get_num_threads())
    )  # or Accelerate warns of it
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
    """Write what was trained, the model or its adapter, whole or not at all. All ranks
    call it, and rank 0 writes.
    """
    temporary = folder.with_name(f".{folder.name}")
    trainer.save_model(temporary)
    if trainer.args.process_index == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)


def finish(args, trainer):
    """Write the result, which says how much was trained, and how well held-out
    questions were answered before and after.
    """
    model, settings, state = trainer.model, trainer.args, trainer.state
    trained = [value for value in model.parameters() if value.requires_grad]
    losses, seconds = logged(state, "loss"), sum(logged(state, "epoch_seconds"))
    held_out = logged(state, "eval_token_loss")  # before, and after each epoch
    result = {
        "lesson": args.lesson, "world_size": settings.world_size,
        "backend": dist.get_backend() if dist.is_initialized() else "none", "device": settings.device.type,
        "method": args.method, "model": args.model or "small", "data": args.data,
        "train_samples": len(trainer.train_dataset), "test_samples": len(trainer.eval_dataset), "epochs": args.epochs,
        "batch_size": args.batch_size, "trained_parameters": sum(value.numel() for value in trained),
        "train_loss": round(losses[-1], 4), "loss_before": round(held_out[0], 4), "loss_after": round(held_out[-1], 4),
        "seconds": round(seconds, 2), "samples_per_second": round(args.epochs * len(trainer.train_dataset) / seconds),
        "params_sha256": runs.params_sha256(model),
    }  # fmt: skip
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    if settings.process_index == 0:
        runs.write_result(args.out, result, metrics)
    return result


if __name__ == "__main__":
    runs.start(main)
