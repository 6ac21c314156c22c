"""The program of lesson 4 in transformers' Trainer, with a model and loss of our own.

torchrun --nproc_per_node 2 ddp_course/lesson08.py --epochs 1
torchrun --nproc_per_node 2 ddp_course/lesson08.py --epochs 2 --resume
torchrun --nproc_per_node 3 ddp_course/lesson08.py --data digits --accumulate 2
python ddp_course/lesson08.py --epochs 1 --learning-rate 2e-3
"""

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

# Only this line at the top: transformers loads Trainer where it is first used, and with
# it peft and bitsandbytes. accelerate's notebook_launcher does not start once a process
# has bitsandbytes, and says: "Please keep these imports inside your training function".
import transformers
from torch import nn
from torch.nn import functional as F

from ddp_course import UsageError, runs
from ddp_course.checkpoints.of_trainer import newest_usable
from ddp_course.data.images import load_images
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.environment import (
    backend_for,
    choose_device,
    process_group,
    torchrun_environment,
)


class Network(nn.Module):
    """A network as Trainer calls it: inputs by name, and a dict as its result."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return {"logits": self.network(images)}


def collate(batch):
    """A batch by name: the model's inputs, and `labels`."""
    [(images, labels)] = batch  # our data set gives whole batches
    return {"images": images, "labels": labels}


def mean_loss(outputs, labels, num_items_in_batch):
    """This micro-batch's part of the mean over all items of the update, on all ranks.

    Trainer multiplies by the number of processes, since DDP divides by it.
    """
    return F.nll_loss(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def count_right(prediction):
    """How many predictions are right, and how many there are, on all ranks.

    prediction: arrays from all ranks, without the padding.
    """
    right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    return {"right": int(right.sum()), "counted": len(right)}


def progress(log):
    """A callback that logs and times each epoch, and ends a run whose loss is NaN."""

    class Progress(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            self.begin, self.losses = time.perf_counter(), []

        def mean_loss(self, *batch, **items):
            """`mean_loss`, noted for this rank: Trainer logs the mean of all ranks."""
            loss = mean_loss(*batch, **items)
            self.losses.append(loss.detach())
            return loss

        def on_epoch_end(self, args, state, control, **_):
            seconds = time.perf_counter() - self.begin
            state.log_history.append({"epoch_seconds": seconds})
            runs.check_finite(torch.stack(self.losses))

        def on_evaluate(self, args, state, control, metrics, **_):
            accuracy = metrics["eval_right"] / metrics["eval_counted"]
            loss = logged(state, "loss")[-1]
            log.info(
                f"epoch {state.epoch:.0f}: loss {loss:.3f}, accuracy {accuracy:.1%}"
            )

    return Progress()


def logged(state, name):
    """All that has been logged under a name, in order."""
    return [entry[name] for entry in state.log_history if name in entry]


def arguments(argv=()):
    parser = runs.parser(__file__, __doc__, per="micro-batch")
    flag, count = parser.add_argument, runs.count
    flag("--learning-rate", type=runs.number, default=1e-3, help="of AdamW (1e-3)")
    flag("--accumulate", type=count, default=1, help="micro-batches per update (1)")
    flag("--resume", action="store_true", help="from the newest checkpoint in --out")
    return parser.parse_args(argv)


def training_arguments(args, device):
    return transformers.TrainingArguments(
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
        logging_nan_inf_filter=False,  # a loss that is not a number should be seen
        label_names=["labels"],  # so that evaluation knows that it has labels
        remove_unused_columns=False,  # our data set has no columns
        dataloader_pin_memory=False,  # our images are on the device already
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",  # our own log says the rest
    )


def main(argv=()):
    args = arguments(argv)
    device = choose_device(args.device, deterministic=args.deterministic)
    # Accelerate warns where nobody has set it
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    world_size = torchrun_environment().world_size
    # Trainer would join the group itself, but on a CPU it ignores ddp_timeout
    group = process_group(backend_for(device), args.timeout)
    with group if world_size > 1 else nullcontext():
        settings = training_arguments(args, device)
        one_gpu_per_process(settings, world_size)
        trainer = prepare(args, settings)
        train(args, trainer)
        return report(args, trainer)


def one_gpu_per_process(settings, world_size):
    """Keep Trainer from taking all GPUs in one process, with DataParallel."""
    if settings.world_size != world_size:
        raise UsageError("each process would train alone: Trainer sees no others")
    settings._n_gpu = min(settings.n_gpu, 1)  # there is no public setting for it


def prepare(args, settings):
    """The data and the model of this rank, in a Trainer."""
    log = runs.open_folder(args.out)
    device, world_size = settings.device, settings.world_size
    train_set, test_set = load_images(args.data, args.train_samples, device)
    runs.check_batch_size(args.batch_size, len(train_set), world_size)
    prepare_checkpoints(args, settings)

    torch.manual_seed(args.seed)
    model = Network(ConvNet(dropout=not args.no_dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    callback = progress(log)
    trainer = transformers.Trainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=collate,
        compute_loss_func=callback.mean_loss,
        compute_metrics=count_right,
        optimizers=(optimizer, None),
        callbacks=[callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(args, trainer):
    torch.manual_seed(args.seed + trainer.args.process_index)  # its own dropout
    trainer.train(resume_from_checkpoint=args.resume)


def report(args, trainer):
    state, network = trainer.state, trainer.model.network
    device, train_set = trainer.args.device, trainer.train_dataset
    losses, seconds = logged(state, "loss"), sum(logged(state, "epoch_seconds"))
    seen = logged(state, "eval_counted")[-1]
    accuracy = logged(state, "eval_right")[-1] / seen
    return runs.finish(
        args, device, network, train_set, losses, seconds, accuracy, seen
    )


def prepare_checkpoints(args, settings):
    """Delete an earlier run's checkpoints, or see that there is one to resume from."""
    folder = Path(settings.output_dir)
    if settings.process_index == 0:
        if not args.resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        newest_usable(folder)  # renames what is newer and damaged
    if dist.is_initialized():
        dist.barrier()
    if args.resume and not transformers.trainer_utils.get_last_checkpoint(folder):
        raise UsageError(f"there is no checkpoint in {folder}: run without --resume")


if __name__ == "__main__":
    runs.start(main)
