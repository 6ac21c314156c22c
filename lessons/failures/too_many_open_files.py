"""Batches that are kept

Run:    python lessons/failures/too_many_open_files.py
Text:   RuntimeError: Too many open files. Communication with the workers is no longer possible.
        Please increase the limit using `ulimit -n` in the shell or change the sharing strategy by
        calling `torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your
        code
Text:   RuntimeError: received 0 items of ancdata
Text:   OSError: [Errno 24] Too many open files
Text:   RuntimeError: unable to open shared memory object in read-write mode: Too many open files
        (24)
Cause:  A DataLoader worker sends each tensor through shared memory, and each tensor holds a file
        descriptor while it exists. The loop keeps tensors of every batch, for example in a list of
        labels, so the number of open files grows until the limit (`ulimit -n`).
Which:  If the error comes at the first batches, the limit is too small for the workers of all
        ranks. If it comes late, something keeps batches.
Fix:    Keep a copy that does not share memory: `labels.append(batch["label"].clone())`, or
        `.item()` or `.tolist()`. If nothing keeps batches, raise the limit with `ulimit -n 4096`,
        or call `torch.multiprocessing.set_sharing_strategy("file_system")` first.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/973
Source: https://github.com/pytorch/pytorch/issues/11201
"""

import resource

import torch
from torch.utils.data import DataLoader


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    labels = []
    for batch in DataLoader(torch.arange(3000), batch_size=4, num_workers=1):
        labels.append(batch)  # batch.clone() needs no file


if __name__ == "__main__":
    main()
