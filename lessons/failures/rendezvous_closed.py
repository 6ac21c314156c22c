"""A rendezvous that is over

Run:    not here: it needs a torchrun that is stopped by hand
Text:   torch.distributed.elastic.rendezvous.api.RendezvousClosedError
Cause:  The torchrun commands of a job meet under an id. When one of them ends for good, or is stopped
        with Ctrl-C, it closes the meeting for all: no torchrun may join under that id any more, also
        not one that wants to restart its ranks. It is most often a consequence of another machine's
        end.
Which:  After the job has run: look for the first error of the machine that ended first. Right at
        the start: the `--rdzv_id` of an earlier run, in a store that still lives (etcd, or another
        torchrun on the endpoint).
Fix:    Stop torchrun on all machines, and start all of them again with a new `--rdzv_id`, such as
        `$SLURM_JOB_ID`. Do not stop single ones with Ctrl-C when the others are to go on.
Lesson: 14
Source: https://github.com/pytorch/pytorch/issues/147064
Source: https://github.com/pytorch/pytorch/issues/116974
Source: https://github.com/pytorch/elastic/issues/151
"""
