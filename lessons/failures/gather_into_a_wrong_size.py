"""A gather into a tensor of the wrong size

Run:    torchrun --nproc_per_node 2 lessons/failures/gather_into_a_wrong_size.py
Text:   ValueError: output tensor size must be equal to world_size times input tensor size
Text:   RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (2), got
        (3))
Text:   ValueError: input tensor must be the same size as output size times world size
Cause:  `all_gather_into_tensor` needs an output of as many numbers as all ranks' inputs have together,
        and `reduce_scatter_tensor` an input of as many as all outputs. "All ranks" are those of the
        *group* that was given, not of the job. Where a library calls it (DeepSpeed's ZeRO, FSDP), a
        parameter was changed or replaced after it had been divided, such as a resized embedding,
        or `torch.compile` has taken a part of it out of the engine's sight.
Fix:    Build the output with `dist.get_world_size(group)`, and pad inputs that differ between ranks:
        each must have the same size. For a library: change the model before it is wrapped; resize
        embeddings before `initialize`; try without `torch.compile`.
Lesson: 2
Source: https://github.com/hiyouga/LlamaFactory/issues/9194
Source: https://github.com/intel/torch-xpu-ops/issues/2738
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_gather_into_tensor(torch.empty(6), torch.ones(2))  # 2 ranks: it needs 4
