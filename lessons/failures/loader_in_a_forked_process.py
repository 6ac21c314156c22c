"""A DataLoader in a process that did not start its workers

Run:    python lessons/failures/loader_in_a_forked_process.py
Text:   AssertionError: can only test a child process
Text:   AssertionError: can only join a child process
Cause:  A process was forked while a DataLoader with workers was in use: the workers of another loader,
        a logger, or a launcher. The child got a copy of the iterator, and when it drops the copy, it
        wants to end workers that belong to its parent. Python ignores the error, so training goes on.
Which:  `Exception ignored in` stands above it: a note. If the program stops, look for another error. A
        notebook, and tqdm's bar around a loader, make it frequent: they keep iterators alive.
Fix:    Nothing, if it goes on. To be rid of it: let one loader end before the next one starts, or
        `del` the iterator before; keep workers (`persistent_workers=True`) instead of new ones per
        epoch; or start them with `multiprocessing_context="spawn"`. `num_workers=0` shows that it is
        this.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/149837
Source: https://github.com/huggingface/transformers/issues/25785
"""

import os

from torch.utils.data import DataLoader


def main():
    batches = iter(DataLoader(range(8), num_workers=1))
    next(batches)
    if os.fork() == 0:
        del batches  # it ends its workers, which are not this process's
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    main()
