"""A call to CUDA that failed under nccl

Run:    not here: it needs nccl
Text:   ncclUnhandledCudaError: Call to CUDA function failed.
Text:   torch.distributed.DistBackendError: NCCL error in:
        ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with
        NCCL_DEBUG=INFO for details), NCCL version 2.18.1
Text:   NCCL WARN Cuda failure 'invalid argument'
Text:   Cuda failure 1 'invalid argument'
Text:   Cuda failure 999 'unknown error'
Text:   Cuda failure 'out of memory'
Text:   Cuda failure 'initialization error'
Cause:  nccl called CUDA, and CUDA refused. The words after `Cuda failure` are CUDA's own. `out of
        memory`: nccl's buffers did not fit beside the model. `invalid argument` and `unknown error`:
        most often direct access between GPUs that this machine does not allow (consumer cards,
        virtual machines, containers), or an nccl that does not fit the driver. `no kernel image`:
        an nccl built for older GPUs.
Which:  `NCCL_DEBUG=WARN` prints the file and the line of nccl. Try `NCCL_P2P_DISABLE=1`, then
        `NCCL_CUMEM_ENABLE=0`: if one of them helps, it was direct access. `dmesg | grep -i xid`
        shows a broken GPU. An earlier error of the model's own kernels also arrives here: run with
        `CUDA_LAUNCH_BLOCKING=1`.
Fix:    Out of memory: a smaller batch, and `torch.cuda.set_device(local_rank)` before anything else,
        so that not all ranks use GPU 0. Direct access: keep the variable that helped. Otherwise a
        newer driver, or the nccl of a newer torch (`torch.cuda.nccl.version()`).
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/111187
Source: https://github.com/NVIDIA/nccl/issues/1410
Source: https://github.com/NVIDIA/nccl/issues/1024
"""
