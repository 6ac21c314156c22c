"""The start method of processes, set twice

Run:    python lessons/failures/start_method_set_twice.py
Text:   RuntimeError: context has already been set
Cause:  `set_start_method` may be called once per process, and something has called it, or has started a
        process, before: a library at its import, a cell of a notebook that ran already, or the module
        itself, which a spawned process imports again.
Fix:    Call it once, below `if __name__ == "__main__":`, before anything else. Better, leave the
        process's own method alone: `multiprocessing.get_context("spawn")` for your processes, and
        `DataLoader(..., multiprocessing_context="spawn")` for the workers.
Lesson: 1
Source: https://github.com/pytorch/pytorch/issues/3492
Source: https://github.com/espnet/espnet/issues/1266
"""

import torch.multiprocessing

torch.multiprocessing.set_start_method("forkserver")
torch.multiprocessing.set_start_method("spawn")
