"""Streamed batches of different sizes

Run:    torchrun --nproc_per_node 2 lessons/failures/batches_of_different_sizes.py
Text:   RuntimeError: You can't use batches of different size with `dispatch_batches=True` or when
        using an `IterableDataset`.either pass `dispatch_batches=False` and have each process fetch
        its own batch or pass `split_batches=True`. By doing so, the main process will fetch a full
        batch and slice it into `num_processes` batches for each process.
Cause:  From an IterableDataset, Accelerate reads on rank 0 only: it takes a batch per rank, joins
        them into one tensor and sends each rank its part. Batches that were padded to their own
        longest sample cannot be joined.
Which:  Older versions of Accelerate say only `Sizes of tensors must match except in dimension 0`, in
        `concatenate` of accelerate/utils/operations.py.
Fix:    `dispatch_batches=False`, so that each rank reads its own batches: in
        `Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))`, or in
        `TrainingArguments(accelerator_config={"dispatch_batches": False})`. Or pad all batches to
        one length (`padding="max_length"`). `split_batches=True` cuts one batch for all ranks.
Lesson: 7
Source: https://github.com/huggingface/transformers/issues/26548
Source: https://github.com/huggingface/accelerate/issues/348
Source: https://github.com/huggingface/accelerate/issues/3788
"""

from functools import partial

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.ones(tokens) for tokens in (6, 5, 4, 3))


padded = partial(pad_sequence, batch_first=True)  # to the longest of the batch
loader = DataLoader(Stream(), batch_size=2, collate_fn=padded)
next(iter(Accelerator(cpu=True).prepare(loader)))
