"""A quantised model that is moved or cast

Run:    python lessons/failures/quantized_and_moved.py
Text:   ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models. Please use the
        model as it is, since the model has already been set to the correct devices and casted to
        the correct `dtype`.
Text:   ValueError: Calling `to()` is not supported for `4-bit` or `8-bit` quantized models.
Text:   ValueError: Calling `to()` is not supported for `4-bit` quantized models with the installed
        version of bitsandbytes.
Text:   ValueError: Calling `cuda()` is not supported for `8-bit` quantized models. Please use the
        model as it is, since the model has already been set to the correct devices.
Text:   ValueError: You cannot cast a bitsandbytes model in a new `dtype`. Make sure to load the model
        using `from_pretrained` using the desired `dtype` by passing the correct `dtype` argument.
Text:   ValueError: `.half()` is not supported for quantized model.
Cause:  Loading has already put a model in 4 or 8 bits on its device, and its packed weights cannot be
        cast. Your program calls `.to(...)`, `.cuda()` or `.half()` afterwards, or a library does:
        `deepspeed.initialize`, or `dispatch_model` of an Accelerate that does not fit Transformers.
Which:  The last frames of the traceback name who calls.
Fix:    Leave the call out. Choose the device when loading, `device_map={"": local_rank}`, and the
        dtype with `bnb_4bit_compute_dtype`. If a library calls it: `pip install -U transformers
        accelerate bitsandbytes` (4 bits can be moved since bitsandbytes 0.43.2, and 8 bits since 0.48).
Lesson: 11
Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/547
Source: https://github.com/huggingface/transformers/issues/38717
Source: https://github.com/huggingface/transformers/issues/29303
"""

from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=1, n_head=2, n_embd=64)
model = GPT2LMHeadModel.from_pretrained(
    None,
    config=config,
    state_dict=GPT2LMHeadModel(config).state_dict(),
    quantization_config=BitsAndBytesConfig(load_in_8bit=True),
)
model.cuda()
