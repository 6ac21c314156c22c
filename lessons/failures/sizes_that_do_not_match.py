"""Tensors of different sizes in one operation

Run:    python lessons/failures/sizes_that_do_not_match.py
Text:   RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at non-singleton
        dimension 1
Text:   RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 5 but got
        size 7 for tensor number 1 in the list.
Text:   RuntimeError: The expanded size of the tensor (8) must match the existing size (4) at
        non-singleton dimension 0.
Cause:  Two tensors should have one shape and do not. On one GPU it is an ordinary mistake of
        shapes. If it appears only with several ranks: predictions of different lengths are
        gathered, the last batch is smaller on one rank, or DeepSpeed loads the optimizer's parts of
        another number of ranks.
Which:  `Sizes of tensors must match except in dimension 0` in a `gather` or `cat`: lengths that
        differ between ranks; in Accelerate's `concatenate`: see Streamed batches of different
        sizes. `non-singleton dimension 0` in an optimizer's or checkpoint's code:
        another number of ranks.
Fix:    Pad before gathering (`accelerator.pad_across_processes`), use `x.shape[0]` instead of a
        batch size from the configuration, `drop_last=True`; resume with the same number of ranks,
        or from DeepSpeed's universal checkpoint.
Lesson: 7
Source: https://github.com/deepspeedai/DeepSpeed/issues/1211
Source: https://github.com/huggingface/transformers/issues/26548
"""

import torch

torch.ones(2, 8) + torch.ones(2, 4)
