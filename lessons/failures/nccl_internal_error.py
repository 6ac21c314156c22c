"""An internal error of nccl

Run:    not here: it needs nccl
Text:   torch.distributed.DistBackendError: NCCL error in:
        /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:317, internal error - please report this
        issue to the NCCL developers, NCCL version 2.20.5
Text:   ncclInternalError: Internal check failed. This is either a bug in NCCL or due to memory
        corruption
Text:   ncclInternalError: Internal check failed.
Text:   NCCL error in: ProcessGroupNCCL.cpp:891, internal error, NCCL version 21.0.3
Text:   Proxy Call to rank 0 failed (Connect)
Text:   NCCL error in: NCCLUtils.hpp:82, invalid argument, NCCL version 2.4.8
Cause:  nccl met a state that it does not know. The line behind `Last error:` counts, and without it
        this text says nothing. Often it is a consequence of another rank's end, a network interface
        that is not there, too little /dev/shm in a container, or different versions of nccl on the
        machines.
Which:  `NCCL_DEBUG=WARN` prints the cause. `no socket interface`: the interface. `Proxy Call` or
        `Connection closed`: another rank ended first. `shared memory`: /dev/shm. `invalid
        argument`: ranks that disagree about the number of ranks, sizes or devices.
Fix:    Look for another rank's error first. Then the same torch on all machines, `docker run
        --ipc=host`, and `NCCL_SOCKET_IFNAME` of an interface that all machines have.
Lesson: 15
Source: https://github.com/fundamentalvision/BEVFormer/issues/235
Source: https://github.com/NVIDIA/nccl/issues/934
"""
