"""Split sizes that do not add up

Run:    python lessons/failures/split_sizes_that_do_not_add_up.py
Text:   RuntimeError: Split sizes doesn't match total dim 0 size
Text:   RuntimeError: Number of tensor splits not equal to group size
Text:   RuntimeError: Tensor's dim 0 does not divide equally across group size
Cause:  `all_to_all_single` sends a part of the rows of its input to each rank, and torch checks the
        lists before it sends anything. The input's split sizes must add up to the rows of the input,
        the output's to the rows of the output, and each list needs one number per rank of the
        *group*. Without lists, the number of rows must be a multiple of the number of ranks.
Which:  torch checks each rank alone. A rank that expects another number of rows than it is sent
        passes this check, and then hangs or is killed: see Wrong split sizes (lesson 20). In a model
        with experts, the counts usually belong to another routing of the tokens, such as one that was
        stored or recomputed, or they were counted before tokens were dropped.
Fix:    Count the tokens of each rank from the tensor that you send, send the counts first, and build
        the output with `sum(output_split_sizes)` rows. Assert `sum(input_split_sizes) == len(input)`
        and `len(input_split_sizes) == dist.get_world_size(group)`.
Lesson: 20
Source: https://github.com/radixark/miles/issues/1002
Source: https://github.com/pytorch/pytorch/issues/101380
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
tokens, received = torch.ones(6, 4), torch.empty(6, 4)
dist.all_to_all_single(received, tokens, [6], [5])  # one token has no receiver
