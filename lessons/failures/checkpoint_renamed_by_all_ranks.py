"""A checkpoint that all ranks rename

Run:    torchrun --nproc_per_node 2 lessons/failures/checkpoint_renamed_by_all_ranks.py
Text:   No such file or directory: 'tmp-checkpoint-49' -> 'checkpoint-49'
Text:   FileNotFoundError: [Errno 2] No such file or directory:
        'model/tmp-checkpoint-49/trainer_state.json'
Text:   OSError: [Errno 39] Directory not empty: 'model/tmp-checkpoint-s0yubqtr' ->
        'model/checkpoint-50'
Cause:  A checkpoint is written into a temporary folder, and this one is renamed. Each rank renamed
        it: the first one succeeded, and the next ones no longer find it, or find the new one there.
        Trainer did so in transformers 4.36, and in the development version of February 2025.
Which:  One machine: the version. Several machines with a newer version: they do not share the
        folder, or their file system shows a rename late.
Fix:    `pip install -U transformers`. Without a common folder, `save_on_each_node=True`. In your own
        program rename on rank 0 alone, between two barriers.
Lesson: 8
Source: https://github.com/huggingface/transformers/issues/27925
Source: https://github.com/huggingface/transformers/issues/36076
Source: https://github.com/axolotl-ai-cloud/axolotl/issues/948
"""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    os.mkdir("tmp-checkpoint-49")
dist.barrier()
os.rename("tmp-checkpoint-49", "checkpoint-49")  # rank 0 alone should do it
