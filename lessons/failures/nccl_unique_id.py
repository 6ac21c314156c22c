"""Rank 0 did not start its nccl communicator

Run:    not here: it needs nccl
Text:   RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via
        c10d key-value store by key '0', but store->get('0') got error: Socket Timeout
Text:   RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via
        c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer
Text:   but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0
Cause:  At the first collective of a group, rank 0 puts a number into the store, and the others read
        it. It did not come: rank 0 is not in this collective (it downloads, preprocesses or
        evaluates alone), or it has failed.
Which:  "Connection reset" or "Broken pipe": rank 0 ended; look for its error. "Timeout": rank 0 is
        alive and elsewhere, often in `if rank == 0` before the first barrier, or in `with
        main_process_first()`.
Fix:    Prepare data in a step of its own, before torchrun. Or raise the limit with `timeout=` of
        `init_process_group`. Call the first collective on all ranks.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/82091
Source: https://github.com/NVIDIA/nccl/issues/708
"""
