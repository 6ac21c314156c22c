"""Trainer on ranks that can leave notes for each other."""

import gc
import json
import os
import tempfile
import time
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from ddp_course.ranks.environment import process_group

# what the ranks begin with: Trainer, and what it imports on the way
PRELOADED = ["transformers.trainer", "datasets", "deepspeed"]
TIMEOUT = 40  # seconds, enough for ranks that must first import these; otherwise two are enough
PATIENCE = 4  # seconds that a rank waits for the others at the end of a step
LEARNING_RATE = 0.1


class Meeting:
    """Notes between ranks without collectives, which are left to the answers."""

    def __init__(self):
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*address, is_master=False)

    def leave(self, topic, note):
        self.store.set(f"{topic}, {self.rank}", json.dumps(note))

    def notes(self, topic, note, patience=PATIENCE):
        """Leave a note; return the notes of all ranks in rank order, with None for
        ranks that left none.
        """
        self.leave(topic, note)
        keys, deadline = ([f"{topic}, {rank}" for rank in range(self.n)], time.monotonic() + patience)
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.002)
        return [self.left_by(rank, topic) for rank in range(self.n)]

    def left_by(self, rank, topic):
        """The note of a rank, None where there is none."""
        key = f"{topic}, {rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


@contextmanager
def settings(meeting, **options):
    """TrainingArguments for small trainings on a CPU; and the process group, where a
    launch has set it up.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Accelerate warns about it
    from transformers.trainer import TrainingArguments

    gc.freeze()  # Trainer collects garbage: not in all that was imported
    meeting.notes("imported", True, patience=TIMEOUT)
    launched = "RANK" in os.environ
    group = process_group(timeout=2 * PATIENCE) if launched else nullcontext()
    with group, tempfile.TemporaryDirectory() as folder:
        defaults = {
            "output_dir": folder,
            "use_cpu": True,
            "ddp_find_unused_parameters": False,
            "train_sampling_strategy": "sequential",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "remove_unused_columns": False,
            "report_to": "none",
            "disable_tqdm": True,
        }
        yield TrainingArguments(**(defaults | options))


def a_trainer(model, made, examples, **options):
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = Trainer(model, made, train_dataset=examples, optimizers=(optimizer, None), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def ranks(n):
    return f"{n} rank{'s' * (n > 1)}"


def in_row(things):
    """'1', '1 and 2', '1, 2 and 3'"""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last
