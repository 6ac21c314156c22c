"""Rank 0 serves the rendezvous itself, on a port that another process has.

torchrun --nproc_per_node 2 lessons/clinic/port_in_use.py
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

PORT = 29517


@record
def train(watch=None):
    rank = int(os.environ["RANK"])
    if rank == 0:  # "the job that I forgot yesterday"
        yesterday = socket.socket()
        yesterday.bind(("", PORT))
    patience = timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", PORT, 2, rank == 0, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
