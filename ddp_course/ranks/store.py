"""How ranks find each other on one machine: a store on the loopback interface."""

import os
import socket

from ddp_course import UsageError


def host_store(port=0):
    """A TCPStore on loopback, served by this process for any number of ranks.

    port: 0 takes a free one; `.port` says which. A TCPStore that opens its own socket
    listens on every interface, whatever host name it is given; one that is given a
    listening socket uses only that. Raises UsageError if the port is taken.
    """
    from torch import distributed as dist  # what asks for the interface needs no torch

    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        problem = f"cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno)}"
        fix = "another run may have it: choose another master port"
        raise UsageError(f"{problem}; {fix}") from None
    address = listener.getsockname()
    return dist.TCPStore(
        *address,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def loopback_interface():
    """The name of the loopback interface: 'lo', on a Mac 'lo0', on Windows None."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
