"""The program of lesson 4 in transformers' Trainer, with a model and loss of our own.

torchrun --nproc_per_node 2 ddp_course/lesson08.py --epochs 1
torchrun --nproc_per_node 2 ddp_course/lesson08.py --epochs 2 --resume
torchrun --nproc_per_node 3 ddp_course/lesson08.py --data digits --accumulate 2
python ddp_course/lesson08.py --epochs 1 --learning-rate 2e-3
"""

import os
import shutil
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ddp_course import UsageError, runs
from ddp_course.ranks.environment import (
    choose_device,
    stay_on_this_machine,
    torchrun_environment,
)
from ddp_course.scenery.images import load_images
from ddp_course.scenery.models import ConvNet


class Network(nn.Module):
    """A network as Trainer calls it: by the names of its inputs, and with a dict as its
    result.
    """

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return {"logits": self.network(images)}


def collate(batch):
    """A batch by name: the model's inputs, and `labels`."""
    [(images, labels)] = batch  # Images hands out whole batches
    return {"images": images, "labels": labels}


def mean_loss(outputs, labels, num_items_in_batch):
    """This rank's part of the mean over all items of the window, on all ranks.

    Trainer multiplies by the number of processes, since DDP divides by it.
    """
    return F.nll_loss(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def count_right(prediction):
    """How many predictions are right, and how many there are: arrays of all ranks,
    without the padding.
    """
    right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    return {"right": int(right.sum()), "counted": len(right)}


class Progress(TrainerCallback):
    """Logs a line after each epoch's evaluation, and notes in the history how long its
    training took.
    """

    def __init__(self, log):
        self.log = log

    def on_epoch_begin(self, args, state, control, **_):
        self.begin = time.perf_counter()

    def on_epoch_end(self, args, state, control, **_):
        state.log_history.append({"epoch_seconds": time.perf_counter() - self.begin})

    def on_evaluate(self, args, state, control, metrics, **_):
        loss, accuracy = (
            logged(state, "loss")[-1],
            metrics["eval_right"] / metrics["eval_counted"],
        )
        self.log.info(
            f"epoch {state.epoch:.0f}: loss {loss:.3f}, test accuracy {accuracy:.1%}"
        )


def logged(state, name):
    """All that has been logged under a name, in order."""
    return [entry[name] for entry in state.log_history if name in entry]


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--accumulate", type=runs.count, default=1, help="micro-batches an update (1)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out",
    )
    return parser.parse_args(argv)


def training_arguments(args, device):
    return TrainingArguments(
        output_dir=args.out / "checkpoints",
        use_cpu=device.type == "cpu",
        seed=args.seed,
        data_seed=args.seed,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=250,
        gradient_accumulation_steps=args.accumulate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # no clipping, as in lesson 4
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not a number is to be seen
        label_names=["labels"],
        remove_unused_columns=False,  # of our own data set, all is used
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",  # what there is to say, our own log says
    )


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device)
    stay_on_this_machine()
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(torch.get_num_threads())
    )  # or Accelerate warns of it
    settings = training_arguments(
        args, device
    )  # joins the group, as Accelerator() does
    try:
        assert settings.world_size == torchrun_environment().world_size
        return train(args, settings)
    finally:
        settings.distributed_state.destroy_process_group()


def train(args, settings):
    log = runs.open_folder(args.out)
    train_set, test_set = load_images(args.data, args.train_samples, settings.device)
    runs.check_batch_size(args.batch_size, len(train_set), settings.world_size)
    prepare_checkpoints(args, settings)

    torch.manual_seed(args.seed)
    model = Network(ConvNet(dropout=not args.no_dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    trainer = Trainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=collate,
        compute_loss_func=mean_loss,
        compute_metrics=count_right,
        optimizers=(optimizer, None),
        callbacks=[Progress(log)],
    )
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(args.seed + settings.process_index)  # each rank its own dropout
    trainer.train(resume_from_checkpoint=args.resume)

    state, network = trainer.state, model.network
    losses, seconds = logged(state, "loss"), sum(logged(state, "epoch_seconds"))
    correct, seen = logged(state, "eval_right")[-1], logged(state, "eval_counted")[-1]
    return runs.finish(
        args, settings.device, network, train_set, losses, seconds, correct / seen, seen
    )


def prepare_checkpoints(args, settings):
    """Begin without the checkpoints of an earlier run, or see that there is one to go
    on from.
    """
    if args.resume and not list(Path(settings.output_dir).glob("checkpoint-*")):
        raise UsageError(
            f"there is no checkpoint in {settings.output_dir}: run without --resume first"
        )
    if not args.resume and settings.process_index == 0:
        shutil.rmtree(settings.output_dir, ignore_errors=True)


if __name__ == "__main__":
    runs.start(main)
