"""To be imported by the fork server alone: how it ends, and what it keeps quiet.

A caller that is killed cannot remove the folder with the server's socket. The server
notices that it is alone, removes it, and leaves. Jupyter kills a kernel's whole process
group, so the server has a group of its own: see fork_server.py.
"""

import atexit
import logging
import multiprocessing.forkserver
import os
import shutil
import sys

from ddp_course.ranks.in_each_rank import close_to_others
from ddp_course.ranks.variables import SHUT_IN


def remove_socket_folder():
    if hasattr(sys, "last_value"):
        return  # it ended with an error: the caller is alive and starts another server
    folder = os.path.dirname(
        multiprocessing.forkserver._forkserver._forkserver_address or ""
    )
    if os.path.basename(folder).startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(remove_socket_folder)  # the ranks leave by os._exit, which skips this

if SHUT_IN in os.environ:  # in a sandbox, with answers
    close_to_others()

# on some CPUs it recommends a faster package, which is not needed here; the server's
# message would appear in an unrelated cell
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
