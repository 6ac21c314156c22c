"""A GPU that does not take this process

Run:    not here: it needs a GPU
Text:   torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable
Text:   RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable
Text:   RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment,
        e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available
        devices to be zero.
Cause:  The GPU is in exclusive mode and another process has it, as some clusters set it; two ranks
        want the same GPU; or the driver is in a bad state.
Which:  `nvidia-smi -q -d COMPUTE` shows `Exclusive_Process`, and `nvidia-smi` the process. No
        process: the driver.
Fix:    One rank per GPU, `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything
        uses CUDA. End leftover processes by their number. Otherwise ask the administrator to reload
        the driver.
Lesson: 15
Source: https://github.com/unslothai/unsloth/issues/2435
"""
