"""A folder that all ranks make

Run:    torchrun --nproc_per_node 2 lessons/failures/folder_made_by_all_ranks.py
Text:   FileExistsError: [Errno 17] File exists: '/tmp/run'
Text:   RuntimeError: Parent directory runs/1 does not exist.
Cause:  All ranks run the same lines. Each asks whether the folder exists, none finds it, all make
        it, and all but one fail. Or rank 0 alone makes it, and another rank writes into it before.
Fix:    `os.makedirs(path, exist_ok=True)` on every rank. A name with a time in it must come from
        rank 0: broadcast it. On a network disk, let rank 0 make it and put a barrier behind.
Lesson: 9
Source: https://github.com/allenai/allennlp/issues/3841
Source: https://github.com/Nixtla/neuralforecast/pull/1460
"""

import os
import tempfile

import torch.distributed as dist

dist.init_process_group("gloo")
run = [tempfile.mkdtemp() + "/run"]
dist.broadcast_object_list(run)
dist.barrier()
os.makedirs(run[0])  # exist_ok=True is missing
