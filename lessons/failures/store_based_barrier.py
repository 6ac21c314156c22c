"""Ranks of another run in the same store

Run:    not here: only torch before 2.2 waits in this way
Text:   RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for
        key: store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:02:00)
Text:   Waiting in store based barrier to initialize process group for rank: 0, key:
        store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)
Cause:  `init_process_group` of older versions waits until all ranks have counted themselves in the
        store. The number of those that came does not become the world size.
Which:  worker_count below world_size: a rank did not start, failed before this line, or is in
        another group. worker_count above it: the store holds counts of another run, such as a file
        for `file://` that was not deleted, or two jobs use one address and port.
Fix:    A new file or port for each run, and `torchrun --standalone` on one machine. Look at the
        missing rank's output first. Create groups with `new_group` on all ranks, in the same order.
Lesson: 2
Source: https://github.com/epfml/powersgd/issues/21
"""
