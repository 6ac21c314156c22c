"""A file that ends too early

Run:    python lessons/failures/file_that_ends_too_early.py
Text:   EOFError: Ran out of input
Cause:  Something is to be unpickled, and there is nothing. A checkpoint is empty: its writer was
        killed, the disk was full, or another rank is still writing it. Or, on Windows, a DataLoader
        worker waits for its data set, which the parent could not pickle.
Which:  `torch.load` in the traceback: look at the file's size. `spawn_main` in the traceback: a
        consequence; the error of the parent, such as "Can't pickle local object", is above or below.
Fix:    Save on rank 0 under another name, then `os.replace(temporary, path)`, and let all ranks load
        behind a barrier. On Windows make the data set picklable, or `num_workers=0`.
Lesson: 9
Source: https://github.com/JIA-Lab-research/VFIformer/issues/13
Source: https://github.com/kkoutini/PaSST/issues/48
Source: https://github.com/KeYang8/WITT/issues/7
"""

import torch

open("checkpoint.pt", "wb").close()  # a writer that was killed before it wrote
torch.load("checkpoint.pt", weights_only=False)
