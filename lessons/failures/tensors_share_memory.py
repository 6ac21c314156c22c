"""Tied weights in safetensors

Run:    python lessons/failures/tensors_share_memory.py
Text:   RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and
        potential differences when loading them again: [{'embedding.weight', 'head.weight'}].
Text:   Some tensors share memory, this will lead to duplicate memory on disk and potential
        differences when loading them again
Text:   A potential way to correctly save your model is to use `save_model`.
Cause:  Two names of the state dict are the same tensor, as with tied input and output embeddings,
        and safetensors does not store a tensor twice. It also happens under DeepSpeed, where
        parameters are views of one flat buffer.
Which:  Two or three names, such as an embedding and a head: tied weights. Nearly all names: a flat
        buffer of DeepSpeed or FSDP.
Fix:    For tied weights, `safetensors.torch.save_model(model, path)`, or `model.save_pretrained`,
        which knows them; or delete one name and tie again after loading. For flat buffers, get a
        full state dict first: `accelerator.get_state_dict(model)`, or `.clone()` each tensor.
Lesson: 10
Source: https://github.com/safetensors/safetensors/issues/202
Source: https://github.com/safetensors/safetensors/issues/304
"""

from safetensors.torch import save_file
from torch import nn

embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
head.weight = embedding.weight
save_file({"embedding.weight": embedding.weight, "head.weight": head.weight}, "x")
