"""A loss that turns into NaN on one kind of GPU, in bf16, beside a padding mask

Run:    not here: it needs an H100 or H200
Text:   grad_norm becomes NaN at step 11, loss NaN from step 12 onward
Text:   RuntimeError: Function 'ScaledDotProductCudnnAttentionBackward0' returned nan values in its
        0th output.
Cause:  In bf16 or fp16 and with a mask, `scaled_dot_product_attention` may run cuDNN's kernel. In
        torch 2.11 and later, its backward pass gives NaN as the gradient of the queries where the
        length is 64 more than a multiple of 128 and all scores of a query are very negative. The
        loss of that step is right; the next one is NaN.
Which:  The same run in fp32 stays finite, and so does it on an A100 or a CPU.
        `torch.autograd.set_detect_anomaly(True)` names the kernel. If fp32 turns into NaN, too, look
        at the batch and the learning rate.
Fix:    `torch.backends.cuda.enable_cudnn_sdp(False)` at the start of the program: another kernel
        does the work. Lesson 11 does that.
Lesson: 11
Source: https://github.com/pytorch/pytorch/issues/196678
Source: https://github.com/kyutai-labs/pocket-tts/pull/264
Source: https://github.com/NVIDIA-NeMo/Automodel/issues/1883
"""
