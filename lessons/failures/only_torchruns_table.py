"""A rank that failed without a text of its own

Run:    torchrun --nproc_per_node 2 lessons/failures/only_torchruns_table.py
Text:   torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Text:   error_file: <N/A>
Text:   traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
Text:   E0301 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank:
        1 (pid: 4242) of binary: /usr/bin/python3
Text:   subprocess.CalledProcessError: Command '['/usr/bin/python3', '-u', 'train.py',
        '--local_rank=1']' returned non-zero exit status 1.
Text:   Sending process 4242 closing signal SIGTERM
Text:   ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0
Text:   traceback : Signal 6 (SIGABRT) received by PID 4242
Text:   traceback : Signal 15 (SIGTERM) received by PID 4242
Text:   exitcode  : -6 (pid: 4242)
Text:   exitcode  : -15 (pid: 4242)
Text:   failed (exitcode: -6) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   failed (exitcode: -15) local_rank: 0 (pid: 4242) of binary: /usr/bin/python3
Text:   ProcessRaisedException: -- Process 1 terminated with the following error:
Cause:  This is torchrun's summary, not the error. A rank ended with an exit code other than 0, and
        torchrun stopped the others. The error is further up, in the output of the rank that the
        table names under "Root Cause".
Which:  Below mp.spawn's `terminated with the following error` the rank's own traceback follows.
        `exitcode : 1` is an ordinary Python error, further up. `2` is a wrong argument. A negative
        number is a signal: -9 SIGKILL (memory), -11 SIGSEGV, -7 SIGBUS (/dev/shm), -4 SIGILL, -6 SIGABRT
        (nccl's watchdog, usually a consequence), -15 SIGTERM (the scheduler, or torchrun itself), -1
        SIGHUP (the terminal closed).
Fix:    Search upwards for the first `[rankN]:` traceback of that rank, or give the whole log to
        `ddp-course diagnose`. If there is none, put `@record` of
        `torch.distributed.elastic.multiprocessing.errors` above `main()`, or start with `torchrun
        --log-dir logs --redirects 3`.
Lesson: 15
Source: https://github.com/yangjianxin1/Firefly/issues/171
Source: https://github.com/lzhxmu/CPPO/issues/6
"""

import os
import sys

if os.environ["RANK"] == "1":
    sys.exit(1)
