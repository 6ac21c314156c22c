"""A host name that leads nowhere

Run:    python lessons/failures/host_name_not_found.py
Text:   [c10d] The IPv6 network addresses of (node1.invalid, 29500) cannot be retrieved (gai error:
        -2 - Name or service not known).
Text:   [c10d] The IPv4 network addresses of (node1.invalid, 29500) cannot be retrieved (gai error:
        -2 - Name or service not known).
Text:   [c10d] The IPv6 network addresses of (gpu-node[03-04], 29500) cannot be retrieved (gai error:
        -2 - Name or service not known).
Text:   gai error: 8 - nodename nor servname provided, or not known
Text:   socket.gaierror: [Errno -2] Name or service not known
Text:   [c10d] The hostname of the client socket cannot be retrieved. err=-3
Cause:  This machine cannot resolve the host name in MASTER_ADDR or `--rdzv_endpoint`: a short name
        without its domain, a name that only the scheduler knows, or a Mac's own `.local` name. Or it is
        no name: SLURM shortens a list of machines to `gpu-node[03-04]`.
Which:  A warning, after which the program goes on, is harmless: it looked for an IPv6 address first
        and then found the IPv4 one. If the line repeats until a timeout, the name is the cause.
Fix:    Under SLURM, `MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`. Or
        use an address: `hostname -I | awk '{print $1}'` on the first machine, and test from the
        others with `nc -z ADDRESS 29500`. On one machine use `--standalone` or
        `MASTER_ADDR=127.0.0.1`.
Lesson: 14
Source: https://github.com/OFA-Sys/OFA/issues/307
Source: https://github.com/karpathy/nanochat/issues/42
"""

from datetime import timedelta

import torch.distributed as dist

address, limit = "tcp://node1.invalid:29500", timedelta(seconds=3)
dist.init_process_group("gloo", address, rank=1, world_size=2, timeout=limit)
