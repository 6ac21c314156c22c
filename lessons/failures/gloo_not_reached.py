"""gloo does not reach another rank

Run:    not here: lesson 14 shows it on two machines
Text:   RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.h:301]
        Connect timeout [none]
Text:   RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799]
        connect [172.31.71.170]:13195: Connection refused
Text:   RuntimeError: Gloo connectFullMesh failed with
        [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error
Text:   RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:211] address family mismatch
Cause:  All ranks met in the store, and now each connects to each other one, at the address that the
        other has published, on a port that the system chose. That address is wrong, or the port is
        closed: the host name of a machine resolves to loopback or to docker0, a firewall lets only
        the master's port through, or the other rank has ended in the meantime.
Which:  `getent hosts $(hostname)` on each machine: 127.0.1.1 is the usual mistake. All on one
        machine: the other rank has ended, so look for its error; or several groups were created at
        once, in another order on each rank.
Fix:    `GLOO_SOCKET_IFNAME=eth0` on all machines, with the name of the interface between them
        (`ip -br addr`). Open all ports between the machines, or at least the range in
        /proc/sys/net/ipv4/ip_local_port_range. Call `new_group` in the same order on all ranks.
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/108732
Source: https://github.com/sgl-project/sglang/issues/3226
Source: https://github.com/sehoffmann/dmlcloud/issues/47
"""
