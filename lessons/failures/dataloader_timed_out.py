"""A DataLoader worker that does not answer

Run:    python lessons/failures/dataloader_timed_out.py
Text:   RuntimeError: DataLoader timed out after 1 seconds
Text:   RuntimeError: DataLoader timed out after 600 seconds
Cause:  The DataLoader has a `timeout`, and no worker delivered a batch within it: the disk or the
        network storage is slow or gone, a sample takes very long, or the worker hangs in a lock that
        was copied by `fork` (OpenCV, tokenizers, HDF5, a thread that already ran).
Which:  `py-spy dump --pid` of the worker shows the line (lesson 15). With `num_workers=0`, a slow
        sample stays slow, and a hang of the fork is gone.
Fix:    Slow: more workers, a local copy of the data, or a longer `timeout`. A hang:
        `multiprocessing_context="forkserver"`, `cv2.setNumThreads(0)`, `TOKENIZERS_PARALLELISM=false`,
        and open files inside the worker, not before.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/33296
Source: https://github.com/ray-project/ray/issues/52641
"""

import time

from torch.utils.data import DataLoader


class Slow(list):
    def __getitem__(self, place):
        time.sleep(3)


if __name__ == "__main__":
    next(iter(DataLoader(Slow([1]), num_workers=1, timeout=1)))
