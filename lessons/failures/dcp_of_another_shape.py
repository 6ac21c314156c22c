"""A distributed checkpoint with other shapes

Run:    python lessons/failures/dcp_of_another_shape.py
Text:   ValueError: Size mismatch between saved torch.Size([8, 4]) and current: torch.Size([16]) for
        embedding.weight
Cause:  `torch.distributed.checkpoint.load` fills the tensors of the state dict that you give it, and one
        of them has another shape than the tensor that was saved. Usually the state dict was built
        in another way: it holds this rank's shard as an ordinary tensor, or flattened, as FSDP1
        keeps it, instead of a DTensor that knows the whole shape. Or the model itself differs: a
        resized vocabulary, another hidden size.
Which:  Compare the two shapes. One number instead of two, or fewer rows by a factor of the number of
        ranks: a shard. A vocabulary that differs by a few rows: it was resized, or padded for another
        number of tensor ranks.
Fix:    Build the dict for `save` and for `load` with `get_state_dict(model, optimizer)` of
        `torch.distributed.checkpoint.state_dict`, which gives the same names and the whole shapes for DDP,
        FSDP1 and `fully_shard`, and give the result to `set_state_dict`. Then the number of ranks may
        differ as well. If the vocabulary has changed, load into a model of the old size and resize it
        afterwards.
Lesson: 12
Source: https://github.com/RLinf/RLinf/issues/655
Source: https://github.com/NVIDIA/TransformerEngine/issues/1860
Source: https://github.com/NVIDIA/Megatron-LM/issues/4129
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp

folder = tempfile.mkdtemp()
dcp.save({"embedding.weight": torch.ones(8, 4)}, checkpoint_id=folder)
shard = torch.zeros(16)  # the half of one of two ranks, flattened
dcp.load({"embedding.weight": shard}, checkpoint_id=folder)
