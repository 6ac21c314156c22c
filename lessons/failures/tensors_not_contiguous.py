"""A tensor that is not contiguous, in a collective

Run:    not here: it needs nccl
Text:   RuntimeError: Tensors must be contiguous
Text:   ValueError: Tensors must be contiguous
Cause:  nccl sends one piece of memory. A transposed tensor, a slice of columns, or what `expand` gives
        is not one piece. (gloo copies such a tensor: with torch 2.15, `all_gather` of a transposed
        tensor works on a CPU.) In an evaluation it is often the logits of a model that transposes
        them.
Fix:    `tensor.contiguous()` before the collective; in Trainer, in `preprocess_logits_for_metrics`
        or in the model's output.
Lesson: 2
Source: https://github.com/huggingface/trl/issues/663
"""
