"""A device_map together with ZeRO-3

Run:    python lessons/failures/device_map_with_zero_3.py
Text:   ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a
        `device_map`.
Text:   ValueError: DeepSpeed Zero-3 is not compatible with passing a `device_map`.
Cause:  ZeRO-3 divides each weight over the ranks while the model is loaded, and a `device_map` says
        which GPU gets which layer. Only one of them can decide. `low_cpu_mem_usage=True` is the same
        contradiction in older versions of transformers.
Which:  You have not written one? Look for what sets it: `load_in_4bit` or `load_in_8bit`, unsloth, a
        training script's default.
Fix:    Remove `device_map` and `low_cpu_mem_usage` from `from_pretrained`. For a quantised model use
        ZeRO-2 or no DeepSpeed, with `device_map={"": local_rank}`.
Lesson: 13
Source: https://github.com/huggingface/accelerate/issues/2543
Source: https://github.com/huggingface/peft/issues/306
Source: https://github.com/hiyouga/LlamaFactory/issues/3949
"""

from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations import HfDeepSpeedConfig

config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # as Trainer makes it
GPT2LMHeadModel.from_pretrained(
    None, config=GPT2Config(), state_dict={}, device_map="auto"
)
