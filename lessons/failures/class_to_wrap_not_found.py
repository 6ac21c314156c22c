"""A layer's class that the model does not have

Run:    python lessons/failures/class_to_wrap_not_found.py
Text:   ValueError: Could not find the transformer layer class LlamaDecoderLayer in the model.
Text:   Exception: Could not find the transformer layer class to wrap in the model.
Cause:  FSDP was told to wrap layers of a class that the model does not have:
        `fsdp_transformer_layer_cls_to_wrap` is of another model, or spelled differently in your
        version of transformers, or it was left empty and the model names none.
Fix:    `print(model)` shows the classes; name the one that is repeated, such as
        `LlamaDecoderLayer`, `Qwen2DecoderLayer` or `GPT2Block`. `NO_WRAP` or `SIZE_BASED_WRAP` need
        no class. If you did not want FSDP at all, look at
        `~/.cache/huggingface/accelerate/default_config.yaml`.
Lesson: 12
Source: https://github.com/tatsu-lab/stanford_alpaca/issues/58
Source: https://github.com/huggingface/accelerate/issues/2872
"""

from accelerate import FullyShardedDataParallelPlugin
from torch import nn

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(2, 2)))
