"""A network interface that is not there, under gloo

Run:    python lessons/failures/gloo_interface.py
Text:   RuntimeError: [enforce fail at device.cc:84]
        ifa != nullptr. Unable to find address for: ib0
Text:   RuntimeError: Unable to find interface for: [0.0.0.0]
Text:   [W ProcessGroupGloo.cpp] Warning: Unable to resolve hostname to a (local) address. Using the
        loopback address as fallback. Manually set the network interface to bind to with
        GLOO_SOCKET_IFNAME. (function operator())
Text:   RuntimeError: makeDeviceForHostname(): unsupported gloo device
Cause:  gloo binds to the interface that `GLOO_SOCKET_IFNAME` names, or to the one that the
        machine's host name leads to. The name is of another machine, is nccl's syntax (`^lo` means
        nothing to gloo), or the host name leads nowhere. On Windows, some builds of torch 2.7 and
        2.8 say "unsupported gloo device".
Fix:    `ip -br addr` lists the interfaces; set `GLOO_SOCKET_IFNAME` to one that all machines have,
        `lo` (macOS: `lo0`) on a single machine, or unset it. Put the host name into /etc/hosts with
        the machine's address. On Windows, another version of torch, or WSL 2.
Lesson: 14
Source: https://github.com/aws-samples/aws-do-eks/pull/51
Source: https://github.com/Megvii-BaseDetection/YOLOX/issues/139
"""

import os

import torch.distributed as dist

os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
dist.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
