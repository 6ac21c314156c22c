"""A remote rank or the network failed under nccl

Run:    not here: it needs nccl
Text:   ncclRemoteError: A call failed possibly due to a network error or a remote process exiting
        prematurely.
Text:   torch.distributed.DistBackendError: NCCL error in:
        /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a
        network error, NCCL version 2.21.5
Text:   socketProgressOpt: Call to recv from 172.16.0.1<33759> failed : Connection reset by peer
Text:   NCCL WARN socketProgress: Connection closed by remote peer node2<42830>
Text:   NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe
Cause:  Another rank ended, so its connections closed. It is a consequence in most cases: the cause
        is in the other machine's log.
Which:  Search the logs of all machines for the earliest error. None, and all processes were alive:
        the network (a link, an interface, a firewall).
Fix:    Fix the rank that ended first: memory, an exception, a kill by the scheduler. For the
        network, set `NCCL_SOCKET_IFNAME` to the interface that all machines share, and test with
        `NCCL_DEBUG=INFO` and nccl-tests.
Lesson: 15
Source: https://github.com/NVIDIA/nccl/issues/795
Source: https://github.com/NVIDIA/nccl/issues/2076
"""
