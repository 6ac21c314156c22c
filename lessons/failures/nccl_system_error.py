"""A system call that failed under nccl

Run:    not here: it needs nccl
Text:   ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device
        error.
Text:   torch.distributed.DistBackendError: NCCL error in:
        /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with
        NCCL_DEBUG=INFO for details), NCCL version 2.21.5
Text:   NCCL WARN Call to posix_fallocate failed : No space left on device
Text:   NCCL WARN Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size 9637888)
Cause:  nccl asked the system for something and did not get it. Inside a container it is nearly
        always shared memory: Docker gives 64 MB of /dev/shm.
Which:  `NCCL_DEBUG=WARN` prints the call that failed. `shared memory` or `posix_fallocate`:
        /dev/shm. `socket` or `connect`: the network between the machines, or an interface such as
        docker0.
Fix:    `docker run --ipc=host`, or `--shm-size=16g`; in Kubernetes an `emptyDir` with `medium:
        Memory` at /dev/shm. For sockets, `NCCL_SOCKET_IFNAME=eth0`.
Lesson: 14
Source: https://github.com/NVIDIA/nccl/issues/290
Source: https://github.com/NVIDIA/nccl/issues/342
Source: https://github.com/NVIDIA/nccl/issues/473
"""
