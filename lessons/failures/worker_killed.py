"""A DataLoader worker that ran out of memory

Run:    python lessons/failures/worker_killed.py
Text:   RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.
Text:   RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly
Cause:  The system killed a worker, almost always because the machine's or the container's memory
        ran out. The usual reason is a data set that keeps Python objects, such as a list of file
        names or dictionaries: each worker of each rank begins with the parent's memory, and copies
        it page by page as it counts references. The memory grows for a whole epoch, with the number
        of workers times the number of ranks.
Which:  `dmesg | grep -i kill`, or the scheduler's `oom-kill` line, confirms the lack of memory.
        `killed by signal: Bus error` is about /dev/shm, and `Segmentation fault` is about a
        library. `exited unexpectedly` with a Python error above it is the worker's own error. In
        the program here, the worker sends itself the signal.
Fix:    Keep the list as one numpy array, torch tensor, pyarrow table or memory-mapped file. Use
        fewer workers, and a smaller `prefetch_factor`. Count: workers per rank x ranks per machine.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/13246
Source: https://github.com/pytorch/pytorch/issues/20433
"""

import os
import signal

from torch.utils.data import DataLoader


class Samples:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)  # what the system does


def main():
    list(DataLoader(Samples(), num_workers=1))


if __name__ == "__main__":
    main()
