"""Ranks that a program starts without torchrun, with torch.multiprocessing.spawn."""

import json
import logging
import os
import sys
import tempfile

import torch.multiprocessing as mp

from ddp_course.ranks.store import host_store


def start_ranks(begin, args):
    """Start --nproc ranks on this machine, each of which calls begin(args).

    Returns the result, on machine 0. begin: a function that can be pickled.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.nproc)))
    # on one machine this process serves the store, on loopback; otherwise rank 0 does
    store = host_store() if args.nnodes == 1 else None
    port = store.port if store else args.master_port
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (begin, args, port, folder), nprocs=args.nproc)
        except mp.ProcessExitedException as error:  # the rank has said why
            sys.exit(error.exit_code if error.exit_code in (2, 130) else 1)
    if args.node_rank == 0:
        return json.loads((args.out / "result.json").read_text())


def rank_main(local_rank, begin, args, port, folder):
    """What each process does first: set what torchrun would have set, and begin."""
    os.environ |= {
        "RANK": str(args.node_rank * args.nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(args.nnodes * args.nproc),
        "LOCAL_WORLD_SIZE": str(args.nproc),
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(args.nnodes == 1),
        "TORCHELASTIC_ERROR_FILE": f"{folder}/{local_rank}/error.json",
    }
    begin(args)
