"""`ddp-course run`: torchrun for a lesson's program, with a store that stays on loopback."""

import importlib
import logging
import os
import shlex
import sys


def run(script, nproc, flags):
    """Run a lesson's program on `nproc` ranks of this machine; return the exit code.

    script: its path. flags: its own, a list of texts. Prints the torchrun line that
    does the same. Raises UsageError for wrong flags, before any rank starts.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    importlib.import_module(f"ddp_course.{script.stem}").arguments(flags)
    command = ["--nproc_per_node", str(nproc), os.path.relpath(script), *flags]
    print(f"torchrun {shlex.join(command)}", flush=True)
    if nproc > 1:
        # torchrun's own default, of which it would warn
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # the ranks have already printed what went wrong
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("loopback", loopback_rendezvous)
    backend = ["--rdzv_backend", "loopback", "--rdzv_endpoint", "127.0.0.1"]
    try:
        torchrun(parse_args([*backend, *command]))
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


def loopback_rendezvous(parameters):
    """The ranks' rendezvous, like torchrun's, but with a store on 127.0.0.1 only.

    torchrun's store listens on all interfaces. parameters: RendezvousParameters.
    """
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
        StaticTCPRendezvous,
    )

    from ddp_course.ranks.environment import host_store

    class Loopback(StaticTCPRendezvous):
        def __init__(self):
            store = host_store()
            super().__init__("127.0.0.1", store.port, 0, 1, parameters.run_id, 600)
            self._store = (
                store  # if this is set, the base class does not make its own store
            )

        def get_backend(self):
            return "loopback"

    return Loopback()
