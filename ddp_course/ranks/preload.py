"""Imported by the fork server alone: it imports what the ranks will need.

On a machine with a GPU it leaves out the modules that ask for one when they are
imported (bitsandbytes, DeepSpeed, and what imports them): each rank imports those
itself. See gpus.py.
"""

import os
from contextlib import suppress

from ddp_course.ranks.gpus import asks, driver_is_here
from ddp_course.ranks.variables import PRELOAD


def preload(names):
    for name in names:
        if not (driver_is_here() and asks(name)):
            with suppress(ImportError):
                __import__(name)


preload(os.environ.get(PRELOAD, "").split())
