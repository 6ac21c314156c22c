"""A precision that this device does not have

Run:    not here: with `cpu=True`, Accelerate takes float16 without a GPU
Text:   ValueError: fp16 mixed precision requires a GPU (not 'cpu').
Text:   ValueError: fp16 mixed precision requires a GPU
Text:   ValueError: fp16 mixed precision requires a device in ('xpu', 'cuda', 'npu', 'xla', 'mlu',
        'musa', 'hpu', 'sdaa', 'mps') (not 'cpu').
Text:   ValueError: FP16 Mixed precision training with AMP or APEX (`--fp16`) and FP16 half precision
        evaluation (`--fp16_full_eval`) can only be used on CUDA devices.
Text:   ValueError: bf16 mixed precision requires PyTorch >= 1.10 and a supported device.
Text:   ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with
        cuda>=11.0
Cause:  float16 was asked for, and torch sees no GPU; or bfloat16, and the GPU is older than Ampere.
        Often the GPU is there, and torch was installed for CPUs, or CUDA_VISIBLE_DEVICES is empty.
Which:  `python -c "import torch; print(torch.__version__, torch.cuda.is_available(),
        torch.cuda.is_bf16_supported())"`. A version with `+cpu` is the wrong wheel.
Fix:    With a GPU: install the torch for its CUDA. Without one: `mixed_precision="no"`, and delete the
        value in `~/.cache/huggingface/accelerate/default_config.yaml`. On older GPUs: float16 instead
        of bfloat16.
Lesson: 7
Source: https://github.com/bmaltais/kohya_ss/issues/719
Source: https://github.com/kohya-ss/sd-scripts/issues/252
Source: https://github.com/LHRLAB/ChatKBQA/issues/13
"""
