"""Fine-tuning a language model with LoRA, whole or in 4 bits: Trainer and peft.

torchrun --nproc_per_node 2 ddp_course/lesson11.py --train-samples 256
torchrun --nproc_per_node 2 ddp_course/lesson11.py --method qlora --train-samples 64
python ddp_course/lesson11.py --method full --learning-rate 5e-4 --train-samples 64
"""

import dataclasses
import os
import warnings
from contextlib import nullcontext

import torch
import transformers

from ddp_course import lesson08, runs
from ddp_course.checkpoints.of_trainer import replace, save
from ddp_course.data.questions import card, load_questions, load_tokenizer
from ddp_course.lesson06 import PRECISIONS
from ddp_course.lesson08 import logged, one_gpu_per_process, prepare_checkpoints
from ddp_course.models.answers import mean_loss, token_losses
from ddp_course.models.llama import small_llama
from ddp_course.models.lora import keep_layout
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    torchrun_environment,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"attention": ATTENTION, "all-linear": "all-linear"}  # the latter is peft's

transformers.utils.logging.disable_progress_bar()
# peft 0.21 asks for this by a name that transformers 5.23 has replaced
warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)


def load_base(args, device):
    """The model to start from, with its linear layers packed into 4 bits for qlora."""
    precision = PRECISIONS[args.precision]
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",  # 16 values, closest to each other near zero
        bnb_4bit_use_double_quant=True,  # the scales of the blocks are packed, too
        bnb_4bit_compute_dtype=precision,  # a layer is unpacked to this when it is used
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.base,
        trust_remote_code=False,  # or it would ask whether to run the model's own code
        # 16 bits would lose the small updates of the weights themselves
        dtype=torch.float32 if args.method == "full" else precision,
        quantization_config=four_bits if args.method == "qlora" else None,
        device_map={"": device},
    )
    keep_layout(model)
    return model


def load_model(args, device):
    """The model to train: all of it, or frozen and with adapters."""
    # accelerate's advice: "keep these imports inside your training function" (lesson 8)
    from peft import LoraConfig, get_peft_model

    model = load_base(args, device)
    if args.method == "full":
        return model
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.r,
        lora_alpha=args.alpha,
        use_rslora=args.rslora,
        lora_dropout=args.dropout,
        target_modules=TARGETS[args.targets],
    )
    return get_peft_model(model, adapters)


def merge(args, adapter, folder):
    """Write a model that needs no peft: the base with the adapter's B A added in fp32.

    An adapter that was trained on 4 bits has learnt beside the rounded weights. So it
    is added to these, unpacked, and not to the weights as they were before.
    """
    from peft import PeftModel

    model = load_base(args, torch.device("cpu"))
    if args.method == "qlora":
        model = model.dequantize()
    model = PeftModel.from_pretrained(model.float(), adapter, torch_device="cpu")
    temporary = folder.with_name(f".{folder.name}")
    dtype = PRECISIONS[args.merge_precision]
    model.merge_and_unload().to(dtype).save_pretrained(temporary)
    load_tokenizer(adapter).save_pretrained(temporary)
    replace(folder, temporary)


def progress(log, model):
    """Lesson 8's callback, for a model that computes its own loss."""
    callback = lesson08.progress(log)

    def note(model, inputs, output):
        if model.training:
            callback.losses.append(output.loss.detach())  # this rank's own

    def on_evaluate(args, state, control, metrics, **_):
        loss = metrics["eval_token_loss"]
        log.info(f"epoch {state.epoch or 0:.0f}: held-out loss {loss:.3f}")

    model.register_forward_hook(note)
    callback.on_evaluate = on_evaluate
    return callback


def arguments(argv=()):
    parser = runs.parser(
        __file__, __doc__, trains="questions", most=1024, per="micro-batch"
    )
    parser.set_defaults(epochs=2, batch_size=4)
    flag, number = parser.add_argument, {"type": runs.count}
    methods = ["lora", "qlora", "full"]
    flag("--method", choices=methods, default="lora", help="of fine-tuning (lora)")
    flag("--model", help="a folder, or a name on the Hugging Face Hub (a small Llama)")
    flag("--precision", choices=["fp32", "bf16"], help="bf16 on GPUs and for qlora")
    flag("--r", **number, default=8, help="rank of the adapters' matrices (8)")
    flag("--alpha", **number, default=32, help="their scale is alpha / r (32)")
    flag("--rslora", action="store_true", help="scale by alpha / sqrt(r)")
    flag("--targets", choices=TARGETS, default="all-linear", help="layers (all-linear)")
    alias = {"dest": "targets", "action": "store_const", "const": "all-linear"}
    flag("--all-linear", **alias, help="the same as --targets all-linear")
    flag("--dropout", type=runs.share, default=0.05, help="in the adapters (0.05)")
    flag("--longest", **number, default=256, help="tokens; the rest is cut off (256)")
    flag("--all-tokens", action="store_true", help="learn the questions, too")
    pack = "put a micro-batch into one row, instead of padding it"
    flag("--pack", action="store_true", help=pack)
    flag("--accumulate", **number, default=2, help="micro-batches per update (2)")
    less = "recompute them in backward: less memory, more work"
    flag("--checkpoint-activations", action="store_true", help=less)
    rate_help = "(2e-4 with --model; 1e-2 for the small Llama, which is hardly trained)"
    flag("--learning-rate", type=runs.number, help=rate_help)
    patience = "end after N epochs without a lower held-out loss, and keep the best"
    flag("--patience", type=runs.count, metavar="N", help=patience)
    flag("--resume", action="store_true", help="from the newest checkpoint in --out")
    flag("--merge", action="store_true", help="also write base and adapter in one")
    merged = {"choices": ["fp32", "bf16"], "default": "fp32"}
    flag("--merge-precision", **merged, help="of the merged model (fp32)")
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = 2e-4 if args.model else 1e-2
    if args.merge and args.method == "full":
        parser.error("--merge is for adapters, and --method full has none")
    return args


def training_arguments(args, device):
    """Lesson 8's, and what changes for a language model that is fine-tuned."""
    return dataclasses.replace(
        lesson08.training_arguments(args, device),
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,  # of all updates
        max_grad_norm=1.0,
        bf16=args.precision == "bf16",
        optim="paged_adamw_8bit" if device.type == "cuda" else "adamw_torch",
        activation_checkpointing=args.checkpoint_activations,
        per_device_eval_batch_size=1 if args.pack else 16,  # a row counts as one
        # never trainer.evaluate() before train(): that would train without DDP
        eval_on_start=True,
        load_best_model_at_end=args.patience is not None,
        metric_for_best_model="token_loss",
        greater_is_better=False,
        remove_unused_columns=True,
        dataloader_pin_memory=True,
        log_level_replica="error",
    )


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    short = device.type == "cuda" or args.method == "qlora"
    args.precision = args.precision or ("bf16" if short else "fp32")
    # its backward can give nan with a padding mask: pytorch/pytorch#196678
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Accelerate warns where nobody has set it
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    # before the ranks join: from then on, transformers lets only rank 0 save
    args.base = args.model or small_llama()
    world_size = torchrun_environment().world_size
    group = process_group(backend_for(device), args.timeout)
    with group if world_size > 1 else nullcontext():
        settings = training_arguments(args, device)
        one_gpu_per_process(settings, world_size)
        trainer = prepare(args, settings)
        train(args, trainer)
        return report(args, trainer)


def prepare(args, settings):
    """The data and the model of this rank, in a Trainer."""
    log = runs.open_folder(args.out)
    tokenizer = load_tokenizer(args.base)
    train_set, test_set = load_questions(args, tokenizer, settings)
    runs.check_batch_size(args.batch_size, len(train_set), settings.world_size)
    log.info(card(train_set, args.longest))
    prepare_checkpoints(args, settings)

    torch.manual_seed(args.seed)
    model = load_model(args, settings.device)
    pads = transformers.DataCollatorForSeq2Seq(tokenizer)  # with -100
    stop = [transformers.EarlyStoppingCallback(args.patience)] if args.patience else []
    trainer = transformers.Trainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithFlattening() if args.pack else pads,
        compute_metrics=mean_loss,
        preprocess_logits_for_metrics=token_losses,
        callbacks=[progress(log, model), *stop],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(args, trainer):
    torch.manual_seed(args.seed + trainer.args.process_index)  # its own dropout
    trainer.train(resume_from_checkpoint=args.resume)
    save(trainer, args.out / ("model" if args.method == "full" else "adapter"))
    if args.merge and trainer.args.process_index == 0:
        merge(args, args.out / "adapter", args.out / "merged")


def report(args, trainer):
    """The result, with the loss on held-out questions before and after."""
    model, state = trainer.model, trainer.state
    losses, seconds = logged(state, "loss"), sum(logged(state, "epoch_seconds"))
    held_out = logged(state, "eval_token_loss")
    args.epochs = round(state.epoch)  # fewer than were asked for, with --patience
    parameters = [value for value in model.parameters() if value.requires_grad]
    more = {
        "method": args.method,
        "model": args.model or "small",
        "test_samples": len(trainer.eval_dataset),
        "trained_parameters": sum(value.numel() for value in parameters),
        "train_loss": round(losses[-1], 4),
        "loss_before": round(held_out[0], 4),
        "loss_after": round(state.best_metric if args.patience else held_out[-1], 4),
    }
    train_set, device = trainer.train_dataset, trainer.args.device
    return runs.finish(args, device, model, train_set, losses, seconds, more=more)


if __name__ == "__main__":
    runs.start(main)
