"""A checkpoint with the empty weights of ZeRO-3

Run:    python lessons/failures/empty_weights_of_zero_3.py
Text:   ValueError: Trying to set a tensor of shape torch.Size([0]) in "weight" (which has shape
        torch.Size([8, 8])), this looks incorrect.
Text:   ValueError: Trying to set a tensor of shape torch.Size([0]) in "weight" (which has shape
        torch.Size([64000, 7168])), this look incorrect.
Cause:  The checkpoint was saved while ZeRO-3 held the weights in parts: outside of forward and backward
        each parameter is empty, and `model.state_dict()` or `model.save_pretrained(...)` on one rank
        wrote these. The weights are not in that file.
Which:  `torch.Size([0])` is what is set: this page. If the shape in the model is `torch.Size([0])`, a
        checkpoint is loaded into a model that ZeRO-3 has already divided. If both are whole, the file
        belongs to another configuration, or to another vocabulary.
Fix:    If the folder has `zero_to_fp32.py` and a `global_step...`, run that script: it puts the weights
        together. Otherwise train again, and save with `accelerator.get_state_dict(model)`,
        `trainer.save_model()` or `engine.save_16bit_model(...)` on all ranks, and
        `"stage3_gather_16bit_weights_on_model_save": true`.
Lesson: 13
Source: https://github.com/01-ai/Yi/issues/129
Source: https://github.com/Ucas-HaoranWei/GOT-OCR2.0/issues/135
Source: https://github.com/hiyouga/LlamaFactory/issues/6196
"""

import tempfile

import torch
from accelerate import init_empty_weights, load_checkpoint_in_model
from torch import nn

file = f"{tempfile.mkdtemp()}/pytorch_model.bin"
torch.save({"weight": torch.empty(0), "bias": torch.empty(0)}, file)
with init_empty_weights():
    model = nn.Linear(8, 8)
load_checkpoint_in_model(model, file, device_map={"": "cpu"})
