"""A terminal that closes

Run:    python lessons/failures/a_terminal_that_closes.py
Text:   torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 1
Text:   Received Signals.SIGHUP death signal, shutting down workers
Text:   WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers
Text:   Sending process 4243 closing signal SIGHUP
Cause:  torchrun got SIGHUP, the signal that a terminal sends to its programs when it closes: the
        laptop went to sleep, the ssh connection broke, or the window was closed. nohup does not
        help, because torchrun installs a handler of its own for SIGHUP.
Which:  `got signal: 1` is SIGHUP. `got signal: 2` is Ctrl-C, and `got signal: 15` is SIGTERM: a
        scheduler, a `kill`, or a machine that shuts down.
Fix:    Start long runs inside tmux or screen, or with the cluster's scheduler, such as sbatch. Or
        tell torchrun to leave SIGHUP alone: `nohup torchrun --signals-to-handle
        SIGTERM,SIGINT,SIGQUIT ...`.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/67538
Source: https://github.com/modelscope/ms-swift/issues/5884
"""

import os
import signal
import subprocess
import sys
import time

torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
if "LOCAL_RANK" in os.environ:
    print("a rank trains", flush=True)
    time.sleep(60)
else:
    job = subprocess.Popen([*torchrun, __file__], stdout=subprocess.PIPE)
    job.stdout.readline()  # wait until it trains
    job.send_signal(signal.SIGHUP)  # what a terminal sends when it closes
    job.wait()
