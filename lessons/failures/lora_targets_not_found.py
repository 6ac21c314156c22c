"""Adapters for modules that the model does not have

Run:    python lessons/failures/lora_targets_not_found.py
Text:   Target modules {'q_proj'} not found in the base model. Please check the target modules and try
        again.
Text:   ValueError: Please specify `target_modules` in `peft_config`
Cause:  `target_modules` has names of another model: `q_proj` and `v_proj` are Llama's, `c_attn` is
        GPT-2's, `query_key_value` is Bloom's. An empty list usually comes from a function that
        looks for 4-bit layers and finds none.
Fix:    `print(model)` shows the names of the linear layers; name their last part, or
        `target_modules="all-linear"`. Create adapters before wrapping: after DDP or compile, the
        names have a prefix.
Lesson: 11
Source: https://github.com/huggingface/peft/issues/1206
Source: https://github.com/OptimalScale/LMFlow/issues/125
"""

from peft import LoraConfig, get_peft_model
from torch import nn

model = nn.Sequential(nn.Linear(4, 4))
get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
