"""find_unused_parameters without need

Run:    torchrun --nproc_per_node 2 lessons/failures/find_unused_parameters_without_need.py
Text:   Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any
        unused parameters in the forward pass. This flag results in an extra traversal of the
        autograd graph every iteration, which can adversely affect performance. If your model indeed
        never has any unused parameters in the forward pass, consider turning this flag off. Note
        that this warning may be a false positive if your model has flow control causing later
        iterations to have unused parameters.
Cause:  DDP was told to search for unused parameters in each step and found none in the first one.
        The results are right, and each step is slower than it needs to be.
Fix:    Remove `find_unused_parameters=True`; in Trainer pass `ddp_find_unused_parameters=False`.
        Keep it only if later steps leave parameters out, as a model with branches does.
Lesson: 4
Source: https://github.com/huggingface/transformers/issues/9802
Source: https://github.com/allenai/allennlp/issues/5228
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
ddp(torch.randn(2, 2)).sum().backward()
