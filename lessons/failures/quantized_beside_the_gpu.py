"""A quantised model that does not fit on the GPU

Run:    python lessons/failures/quantized_beside_the_gpu.py
Text:   ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU
        RAM to fit the quantized model. If you want to dispatch the model on the CPU or the disk while
        keeping these modules in 32-bit, you need to set `llm_int8_enable_fp32_cpu_offload=True` and
        pass a custom `device_map` to `from_pretrained`.
Text:   you need to set `load_in_8bit_fp32_cpu_offload=True` and pass a custom `device_map` to
        `from_pretrained`.
Cause:  `device_map="auto"` fills the free memory of the GPUs and puts what is left on the CPU or the
        disk, and layers in 4 or 8 bits cannot be divided like that.
Which:  `nvidia-smi` before you start: is the memory free? A notebook that was not restarted, or
        another rank that loads its model there, too, takes what is missing. A 7B model needs about
        4 GB in 4 bits and 8 GB in 8 bits, and more to train.
Fix:    Free the GPU, take `load_in_4bit=True` instead of 8 bits, or a smaller model. In a distributed
        run: `device_map={"": local_rank}`. The offload that the message offers is for inference.
Lesson: 11
Source: https://github.com/meta-llama/llama-cookbook/issues/333
Source: https://github.com/hustvl/Senna/issues/17
Source: https://github.com/Nojahhh/ComfyUI_GLM4_Wrapper/issues/3
"""

from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

parts = {"transformer": "cpu", "lm_head": "disk"}  # as "auto" divides it, without a GPU
GPT2LMHeadModel.from_pretrained(
    None,
    config=GPT2Config(),
    state_dict={},
    device_map=parts,
    quantization_config=BitsAndBytesConfig(load_in_8bit=True),
)
