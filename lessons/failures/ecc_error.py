"""A GPU with broken memory

Run:    not here: it needs a GPU with a fault
Text:   RuntimeError: CUDA error: uncorrectable ECC error encountered
Text:   torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
Text:   RuntimeError: CUDA error: the launch timed out and was terminated
Text:   NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
Text:   Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost. Reboot the system
        to recover this GPU
Cause:  The hardware failed: memory with more wrong bits than can be corrected, or a GPU that no
        longer answers. The program is not the cause.
Which:  `nvidia-smi -q -d ECC` counts the errors, and `dmesg | grep -i xid` has the driver's code:
        48, 63, 64, 94 and 95 are memory, 79 is a GPU that is gone.
Fix:    Leave the machine out (`--exclude=node7` of SLURM) and report it. Start again from the last
        checkpoint: torchrun's `--max-restarts` does not help on the same GPU.
Lesson: 15
Source: https://github.com/huggingface/accelerate/issues/1192
"""
