"""A streamed data set without a length

Run:    python lessons/failures/data_without_a_length.py
Text:   ValueError: The train_dataset does not implement __len__, max_steps has to be specified. The
        number of steps needs to be known in advance for the learning rate scheduler.
Text:   TypeError: object of type 'IterableDataset' has no len()
Text:   ValueError: DataLoader with IterableDataset: expected unspecified sampler option, but got
        sampler=
Text:   ValueError: DataLoader with IterableDataset: expected unspecified shuffle option, but got
        shuffle=True
Text:   ValueError: The train_dataset does not implement __len__, so the number of training steps
        cannot be inferred; max_steps has to be specified. The total number of steps must be known
        in advance to bound the training loop and to configure the learning rate scheduler.
Cause:  An IterableDataset, such as a streamed one, yields samples and knows neither how many there
        are nor the seventh of them. Trainer cannot compute the number of steps, and a sampler,
        DistributedSampler too, has nothing to choose from.
Fix:    Set `max_steps` (per rank: samples / (ranks x batch size x accumulation)). Divide the stream
        yourself, by rank and by worker: `datasets.distributed.split_dataset_by_node`, and give each
        rank the same number of batches.
Lesson: 8
Source: https://github.com/huggingface/datasets/issues/5773
Source: https://github.com/huggingface/transformers/issues/5990
"""

from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10)


arguments = TrainingArguments("runs", use_cpu=True)
Trainer(nn.Linear(2, 2), arguments, train_dataset=Stream())
