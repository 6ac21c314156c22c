"""torchrun with a store that listens on the loopback interface only.

torchrun's own store listens on all interfaces. `python -m ddp_course.ranks.machines.agent` takes
torchrun's flags; several of them on this machine are as many pretended machines.
"""

import logging
import os
import signal
import sys
import threading
import time


def torchrun(flags):
    """Run torchrun with these flags, a list of texts, in this process. Raises what
    torchrun raises: ChildFailedError, SignalException.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import parse_args, run

    # the ranks have already printed what went wrong
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("loopback", loopback_rendezvous)
    run(parse_args(["--rdzv_backend", "loopback", *flags]))


def loopback_rendezvous(parameters):
    """The agents' rendezvous, like torchrun's, but with a store on 127.0.0.1 only.

    parameters: RendezvousParameters. The endpoint's port is 0 for a free one; among
    several agents, the setting "rank" is an agent's number.
    """
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
        StaticTCPRendezvous,
    )
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from ddp_course.ranks.store import host_store

    address, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    agent = int(parameters.get("rank", 0))

    class Loopback(StaticTCPRendezvous):
        def __init__(self):
            store = host_store(port) if agent == 0 else None
            served = store.port if store else port
            agents, run_id = parameters.max_nodes, parameters.run_id
            super().__init__(address, served, agent, agents, run_id, 600)
            self._store = store  # None makes the base class connect to that of agent 0

        def get_backend(self):
            return "loopback"

    return Loopback()


def end_with_the_caller():
    """Wait, in a thread, for the end of the process that started this one; then end the
    ranks as torchrun does when it is told to stop.
    """
    caller = os.getppid()
    while os.getppid() == caller:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(max(failure.exitcode for failure in error.failures.values()) or 1)
