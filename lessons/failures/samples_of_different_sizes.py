"""Samples that do not fit into one batch

Run:    python lessons/failures/samples_of_different_sizes.py
Text:   RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and [2] at
        entry 1
Text:   ValueError: Unable to create tensor, you should probably activate truncation and/or padding
        with 'padding=True' 'truncation=True' to have batched tensors with the same length.
Text:   RuntimeError: Trying to resize storage that is not resizable
Cause:  The DataLoader stacks the samples of a batch, and they have different sizes: texts, sounds,
        boxes, images that were not resized. In a worker it may say `storage that is not resizable`:
        the memory for the batch was measured by its first sample. Under DDP one rank meets such a
        batch first and fails; the others then report a closed connection.
Fix:    Pass a `collate_fn` that pads, such as `torch.nn.utils.rnn.pad_sequence` or transformers'
        `DataCollatorWithPadding`, or bring all samples to one size in the data set.
Lesson: 1
Source: https://github.com/milesial/Pytorch-UNet/issues/285
Source: https://github.com/open-edge-platform/anomalib/issues/1862
Source: https://github.com/open-edge-platform/anomalib/issues/1855
"""

import torch
from torch.utils.data import DataLoader

texts = [torch.ones(3), torch.ones(2)]
next(iter(DataLoader(texts, batch_size=2)))
