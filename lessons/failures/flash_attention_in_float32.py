"""FlashAttention in float32

Run:    not here: it needs a GPU and the package flash-attn
Text:   RuntimeError: FlashAttention only support fp16 and bf16 data type
Text:   RuntimeError: FlashAttention only supports fp16, bf16, and fp8_e4m3 data type
Cause:  FlashAttention computes in 16 bits, and queries, keys or values came in float32: the model was
        loaded in float32 and no autocast is active, or a norm or an adapter before it made float32
        of them.
Which:  In training: neither `bf16=True` nor `fp16=True` is set. Only in evaluation or in `generate`:
        they run outside of autocast.
Fix:    Load the model with `dtype=torch.bfloat16`, or run it inside
        `torch.autocast("cuda", torch.bfloat16)`, evaluation and generation, too. Otherwise
        `attn_implementation="sdpa"` takes each type.
Lesson: 6
Source: https://github.com/unslothai/unsloth/issues/827
Source: https://github.com/SWivid/F5-TTS/issues/1201
Source: https://github.com/ali-vilab/UniAnimate-DiT/issues/40
"""
