"""nccl does not reach another rank

Run:    not here: it needs nccl
Text:   NCCL WARN socketStartConnect: Connect to 172.17.0.1<17943> failed : Software caused
        connection abort
Text:   Last error: socketStartConnect: Connect to 172.17.0.1<17943> failed : Software caused
        connection abort
Text:   NCCL WARN socketStartConnect: Connect to 10.0.0.4<56849> failed : Connection refused
Text:   NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno
        115(Operation now in progress)
Text:   NCCL WARN socketPollConnect poll() failed, ret 1, error Connection timed out, revents 8
Text:   NCCL WARN Net : Connect to 192.168.122.1<38845> failed : Connection timed out
Text:   NCCL WARN Net : Connect to 192.168.1.9<54263> failed : No route to host
Text:   NCCL WARN Call to connect failed : Connection timed out
Cause:  All ranks met at the master's address, and now nccl connects them at addresses and ports of
        its own choice. One of these is out of reach: the address belongs to an interface that only
        its own machine or container has (docker0 172.17.0.1, virbr0 192.168.122.1, 127.0.1.1, a
        link-local fe80::), or a firewall lets only the master's port through.
Which:  `NCCL_DEBUG=INFO` prints `Bootstrap : Using docker0:172.17.0.1`: is that the network between
        the machines (`ip -br addr`)? If it is, then `No route to host` and `timed out` are a
        firewall, and `refused` is a rank that has ended: look for its error.
Fix:    `NCCL_SOCKET_IFNAME=eth0` on all machines, with the name of the interface between them, or
        `^docker,lo,virbr` to leave those out. Containers need the host's network (`docker run
        --network host`). Open all ports between the machines, or at least the range in
        /proc/sys/net/ipv4/ip_local_port_range.
Lesson: 14
Source: https://github.com/NVIDIA/nccl/issues/975
Source: https://github.com/NVIDIA/nccl/issues/929
Source: https://github.com/NVIDIA/nccl/issues/1105
"""
