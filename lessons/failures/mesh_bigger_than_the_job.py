"""A mesh with more ranks than the job

Run:    python lessons/failures/mesh_bigger_than_the_job.py
Text:   RuntimeError: Mesh should not be bigger than default world size 1, but found 4 ranks!
Text:   RuntimeError: Mesh should not be bigger than default world size, but found 9 ranks!
Text:   AssertionError: Invalid parallel dims: dp_replicate(1) * dp_shard(1) * cp(1) * tp(4) * pp(1) !=
        WORLD_SIZE(2)
Cause:  The product of the mesh's dimensions is not the number of ranks that were started: the program
        was started with `python`, or with fewer processes, or a dimension was set for another
        cluster. A mesh with fewer ranks than the job raises no error: the other ranks are not in it.
Fix:    Start data x tensor x pipeline ranks, as `torchrun --nproc_per_node 4` for a mesh of 2 x 2. Let
        the program compute one of them: `(dist.get_world_size() // tensor, tensor)`, after a check that
        `tensor` divides it.
Lesson: 17
Source: https://github.com/pytorch/pytorch/issues/111452
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
