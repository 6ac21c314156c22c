"""`ddp-course run`: torchrun for a lesson's program, with a store that stays on loopback."""

import importlib
import os
import re
import shlex
import sys


def run(script, nproc, flags):
    """Run a lesson's program on `nproc` ranks of this machine; return the exit code.

    script: its path. flags: its own, a list of texts. Prints the torchrun line that
    does the same. Raises UsageError for wrong flags, before any rank starts.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ddp_course.ranks.machines.agent import torchrun

    importlib.import_module(f"ddp_course.{script.stem}").arguments(flags)
    command = ["--nproc_per_node", str(nproc), os.path.relpath(script), *flags]
    print(f"torchrun {shlex.join(command)}", flush=True)
    if nproc > 1:
        # torchrun's own default, of which it would warn
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun(["--rdzv_endpoint", "127.0.0.1", *command])
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        if 130 in codes:  # the ranks have received Ctrl-C before torchrun
            return 130
        if 2 not in codes:
            print(error, file=sys.stderr)
        return 2 if 2 in codes else 1
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


def run_on(machines, script, nproc, flags):
    """Run a lesson's program on several machines, `nproc` ranks each; return the exit
    code.

    machines: Machines that are not open yet. The rest is as in run().
    """
    importlib.import_module(f"ddp_course.{script.stem}").arguments(flags)
    command = [os.path.relpath(script), *flags]
    with machines:
        try:
            ended = machines.torchrun(command, nproc, timeout=None)
        except KeyboardInterrupt:
            return 130
    if any(re.search(r"exitcode +: 2 ", text) for _, text in ended):
        return 2  # as the ranks ended; torchrun itself always ends with 1
    return max(code for code, _ in ended)
