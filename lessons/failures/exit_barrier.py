"""torchrun waits at an exit barrier, after a good run on several machines

Run:    not here: it is a race, seen in some runs of lesson 14's machines
Text:   ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed:
        315.7792458534241 seconds
Text:   E1127 07:10:23.670000 4242 torch/distributed/elastic/agent/server/api.py:974] Error waiting
        on exit barrier. Elapsed: 0.0009 seconds
Cause:  When its ranks have ended, each machine's torchrun waits for the others, through a store that
        one of them holds. That one may be the first to leave, and takes the store with it. All ranks
        have done their work before.
Which:  Files and exit codes tell: result and last checkpoint are there, and torchrun ends with 0. If
        ranks failed, the first traceback above this line is the cause. A wait of minutes says that
        the ranks of another machine had not ended.
Fix:    Nothing, if the result is there. To avoid it, let the ranks meet at `dist.barrier()` before
        they leave, or let the store live outside of the job (`--rdzv_endpoint` of a machine that
        stays).
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/69520
Source: https://github.com/pytorch/pytorch/pull/74931
"""
