"""A network interface that is not there, under nccl

Run:    not here: it needs nccl
Text:   Bootstrap : no socket interface found
Text:   ncclSocketInit: connecting to address with family 0 is neither AF_INET(2) nor AF_INET6(10)
Cause:  nccl found no interface with the name in `NCCL_SOCKET_IFNAME`, which somebody set for
        another machine, or it found no interface at all besides loopback.
Which:  `echo $NCCL_SOCKET_IFNAME` and `ip -br addr` on each machine. With gloo, the same mistake
        says `Unable to find address for`.
Fix:    Unset the variable, or give it a name that all machines have, such as `eth0` or
        `^docker0,lo`. On a machine without a network, `NCCL_SOCKET_IFNAME=lo`.
Lesson: 14
Source: https://github.com/NVIDIA/nccl/issues/1837
Source: https://github.com/EasonXiao-888/MambaTree/issues/14
"""
