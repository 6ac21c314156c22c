"""Reentrant checkpointing of a frozen model

Run:    python lessons/failures/checkpoint_inputs_without_gradient.py
Text:   UserWarning: None of the inputs have requires_grad=True. Gradients will be None
Text:   UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed
        explicitly.
Cause:  Reentrant activation checkpointing, the old default, tracks gradients only through the
        layer's inputs. If the embedding is frozen, as with LoRA, no input requires a gradient, and
        the layer's own parameters get none: they are not trained, without an error.
Fix:    `use_reentrant=False`; in Trainer, `gradient_checkpointing_kwargs={"use_reentrant": False}`.
        Or `model.enable_input_require_grads()`.
Lesson: 11
Source: https://github.com/TinyLLaVA/TinyLLaVA_Factory/issues/144
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layer = nn.Linear(2, 2)
checkpoint(layer, torch.ones(1, 2), use_reentrant=True)
