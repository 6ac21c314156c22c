"""Another model on another rank

Run:    torchrun --nproc_per_node 2 lessons/failures/different_models_on_the_ranks.py
Text:   RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1
        has inconsistent 4 params.
Text:   RuntimeError: [2]: params[0] in this process with sizes [8, 4] appears not to match sizes of
        the same param in process 0.
Cause:  The ranks build different models, or they give DDP different sets of parameters that need a
        gradient: an option or a file is read by rank 0 only, adapters are added on one rank, a
        vocabulary has another size.
Which:  Two plausible numbers: the models differ. `inconsistent 0 params`, or a huge number: nothing
        arrived. The other rank failed or waits elsewhere, for example because rank 0 alone builds
        or evaluates a model; look for its error.
Fix:    Build the model from the same configuration on each rank, and print `sum(p.requires_grad for
        p in model.parameters())` per rank before wrapping. Call DDP on all ranks.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/102438
Source: https://github.com/huggingface/accelerate/issues/1481
Source: https://github.com/huggingface/transformers/issues/30702
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = [nn.Linear(4, 4) for _ in range(1 + dist.get_rank())]
DistributedDataParallel(nn.Sequential(*layers))
