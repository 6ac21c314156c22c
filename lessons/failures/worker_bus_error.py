"""Shared memory that is too small for the workers

Run:    python lessons/failures/worker_bus_error.py
Text:   RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible
        that dataloader's workers are out of shared memory. Please try to raise your shared memory
        limit.
Text:   ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient
        shared memory (shm).
Text:   RuntimeError: unable to write to file </torch_4242_1>
Text:   RuntimeError: unable to mmap 1048576 bytes from file <filename not specified>: Cannot
        allocate memory (12)
Text:   RuntimeError: unable to allocate shared memory(shm) for file </torch_4321_778_12>: Resource
        temporarily unavailable (11)
Text:   RuntimeError: unable to allocate shared memory(shm) for file </torch_4321_778_12>: No space left
        on device (28)
Text:   OSError: [Errno 28] No space left on device: '/dev/shm'
Cause:  DataLoader workers hand their batches over in /dev/shm, and it is full. A Docker container
        has 64 MB of it by default. What is needed: batches of all workers of all ranks of the
        machine, times `prefetch_factor`.
Which:  `df -h /dev/shm` while it runs shows it. In the program here, the worker sends itself the
        signal.
Fix:    `docker run --shm-size=16g`, or `--ipc=host`; in Kubernetes, mount an `emptyDir` with
        `medium: Memory` at /dev/shm. Otherwise fewer workers, a smaller `prefetch_factor`, or
        smaller samples: crop and convert in the worker.
Lesson: 16
Source: https://github.com/pytorch/pytorch/issues/5040
Source: https://github.com/pytorch/pytorch/issues/108861
Source: https://github.com/pytorch/pytorch/pull/161910
"""

import os
import signal

from torch.utils.data import DataLoader


class Samples:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)  # what a write to a full /dev/shm does


def main():
    list(DataLoader(Samples(), num_workers=1))


if __name__ == "__main__":
    main()
