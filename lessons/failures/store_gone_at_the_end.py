"""The rank that hosts the store has left

Run:    not here: it needs nccl
Text:   [rank1]:[W ProcessGroupNCCL.cpp] [PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check the
        "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error:
        Broken pipe
Text:   [W socket.cpp] [c10d] sendBytes failed on SocketImpl: Broken pipe
Text:   [c10d] recvValue failed on SocketImpl(fd=79, addr=[localhost]:1234,
        remote=[localhost]:5678): Connection was likely closed. Did the remote server shutdown or
        crash?
Cause:  Rank 0 holds the store over which the ranks find each other, and rank 0 has ended. The other
        ranks still run, and complain. Who complains is healthy.
Which:  Does it come after the last step, when everything is saved? Then rank 0 simply left first,
        and the warning is harmless. Does it come in the middle of training? Then rank 0 failed:
        look for its error, which is earlier in the log.
Fix:    At the end, let all ranks leave together: `dist.barrier()` and then
        `dist.destroy_process_group()`. In the middle, fix rank 0's error: memory and exit codes
        first.
Lesson: 15
Source: https://github.com/xorbitsai/inference/issues/4421
Source: https://github.com/tdrussell/diffusion-pipe/issues/333
"""
