"""float16 on a CPU

Run:    not here: newer versions of torch compute these on a CPU
Text:   RuntimeError: "LayerNormKernelImpl" not implemented for 'Half'
Text:   RuntimeError: "addmm_impl_cpu_" not implemented for 'Half'
Text:   RuntimeError: "slow_conv2d_cpu" not implemented for 'Half'
Cause:  The model is in float16, and it ran on the CPU, for which older versions of torch have no such
        operation. Mostly it should have run on a GPU: torch sees none, the model was not moved, or
        `device_map` left a part of it on the CPU.
Which:  `python -c "import torch; print(torch.__version__, torch.cuda.is_available())"`, and
        `next(model.parameters()).device`.
Fix:    Move model and batch to the GPU before the forward pass, or install a torch for it. If it is to
        run on a CPU: `model.float()` or `torch_dtype=torch.bfloat16`, and a newer torch.
Lesson: 6
Source: https://github.com/huggingface/transformers/issues/21989
Source: https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/1349
"""
