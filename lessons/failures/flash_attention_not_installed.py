"""Flash attention asked for, and not installed

Run:    python lessons/failures/flash_attention_not_installed.py
Text:   ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following
        error: the package flash_attn seems to be not installed. Please refer to the documentation of …
        to install Flash Attention 2.
Text:   ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following
        error: the package for FlashAttention2 doesn't seem to be installed.
Text:   ModuleNotFoundError: No module named 'flash_attn'
Cause:  `attn_implementation="flash_attention_2"` stands in the call, in the model's configuration or
        in the framework's own, and the package `flash-attn` is not there, or it was built for another
        torch. It needs a GPU, and is compiled when pip finds no wheel for your torch and CUDA.
Fix:    `attn_implementation="sdpa"`: torch's own attention calls the same flash kernels where they can
        be used, and needs no package. If you want the package: `pip install flash-attn
        --no-build-isolation` after torch, in the environment of every machine.
Lesson: 16
Source: https://github.com/hiyouga/EasyR1/issues/384
Source: https://github.com/kijai/ComfyUI-Florence2/issues/17
"""

from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
config = LlamaConfig(**sizes, attn_implementation="flash_attention_2")
LlamaForCausalLM(config)
