"""A port that another program has

Run:    python lessons/failures/port_in_use.py
Text:   torch.distributed.DistNetworkError: The server socket has failed to listen on any local
        network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address
        already in use
Text:   [W socket.cpp] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 -
        Address already in use).
Text:   RuntimeError: The server socket has failed to listen on any local network address. The
        server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).
Text:   OSError: [Errno 98] Address already in use
Text:   ConnectionError: Tried to launch distributed communication on port `29500`, but another
        process is utilizing it. Please specify a different port (such as using the
        `--main_process_port` flag or specifying a different `main_process_port` in your config
        file) and rerun your script.
Cause:  Rank 0 opens a port for the store, and some process has that port already.
Which:  `ss -ltnp | grep 29500` names the process. A rank of an earlier run that was not stopped:
        end it by its number. Another job on the machine: both chose the default, 29500. A torchrun
        of the same job: srun started several torchrun commands per machine, because of
        `--ntasks-per-node` above 1; with `--standalone` they do not fail, they silently train
        separate models.
Fix:    On one machine, leave the port out, or use `torchrun --standalone`: torchrun finds a free
        one. On several, give each job its own: `--rdzv_endpoint host:29501`, `--main_process_port`
        of Accelerate. Under SLURM, start one torchrun per machine: `--ntasks-per-node=1`.
Lesson: 2
Source: https://github.com/pytorch/pytorch/issues/73320
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/6206
"""

import socket

import torch.distributed as dist

other = socket.create_server(("127.0.0.1", 0))  # another program
address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
dist.init_process_group("gloo", address, rank=0, world_size=1)
