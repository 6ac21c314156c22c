"""An NVSwitch that does not add up for nccl

Run:    not here: it needs GPUs behind an NVSwitch
Text:   transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'
Text:   transport/nvls.cc:165 NCCL WARN Cuda failure 'invalid argument'
Text:   Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the
        operation cannot be performed in the present state'.
Text:   Disable NVLS (NCCL_NVLS_ENABLE=0) if you wish to avoid this error in the future.
Cause:  On an H100 and later, nccl lets the NVSwitch add the ranks' values (NVLS, NVLink SHARP), and the
        switch refuses. nccl's maintainers: most often the fabric manager was restarted while programs
        held GPUs, or not in the order that it wants.
Which:  `NCCL_NVLS_ENABLE=0`: if the program then runs, it is this. `nvidia-smi -q | grep -A 2 Fabric`
        has to say `Completed`. In a virtual machine or a container with some of the GPUs, NVLS may not
        be there at all.
Fix:    `NCCL_NVLS_ENABLE=0` for all ranks: it works, with slower all-reduces inside a machine. For good:
        reset the GPUs or reboot, with a fabric manager of the driver's version; a newer nccl.
Lesson: 15
Source: https://github.com/NVIDIA/nccl/issues/1672
Source: https://github.com/NVIDIA/nccl/issues/976
Source: https://github.com/pytorch/pytorch/pull/177472
"""
