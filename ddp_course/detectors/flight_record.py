"""What each rank has called: torch's flight recorder, read, and written where a run fails."""

import faulthandler
import os
import pickle
import threading
from contextlib import contextmanager

import torch.distributed as dist
from torch._C import _distributed_c10d

from ddp_course.files import cannot_write


def flight_record(collectives=True, stacks=False):
    """This rank's latest collectives, as torch's flight recorder keeps them: a dict.

    collectives: with the collectives, or only how many there were. stacks: with the
    lines of code that called them. torch keeps 2000, or TORCH_FR_BUFFER_SIZE.
    """
    if dist.get_backend() == "nccl":  # it has a recorder of its own
        dump = _distributed_c10d._dump_nccl_trace
    else:
        dump = _distributed_c10d._dump_fr_trace
    return pickle.loads(dump(collectives, stacks, False))


def write_flight_record(folder):
    """Write this rank's flight record for torchfrtrace, which compares all ranks'.

    With gloo, torch 2.15 does not name the group in pg_config as it does in the
    entries, and torchfrtrace ends with KeyError: ('0', 0). So we name it here.
    """
    record = flight_record(stacks=True)
    ranks_of = {
        name: dist.get_process_group_ranks(group)
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    groups = {tuple(entry["process_group"]) for entry in record["entries"]}
    for name, description in groups | {("0", "default_pg")}:
        group = {
            "name": name,
            "desc": description,
            "ranks": str(ranks_of.get(name, ranks_of["0"])),
        }
        record["pg_config"].setdefault(name, group)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"fr_{dist.get_rank()}").write_bytes(pickle.dumps(record))


@contextmanager
def flight_recorded(folder, after=None):
    """Write this rank's flight record if the block fails, or takes too long.

    after: seconds. Then a thread writes the stacks of all threads to stack_RANK.txt,
    and the record. Like every Python thread it needs the GIL: for a rank that hangs
    without giving it up, faulthandler.dump_traceback_later writes the stacks. Files of
    an earlier run are removed.
    """
    # torchrun's variables: there may be no process group yet
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    for path in [*folder.glob("fr_*"), *folder.glob("stack_*.txt")]:
        number = path.stem.rpartition("_")[2]
        # a file of this rank, or of a rank that no longer exists
        if number.isdecimal() and int(number) % world_size == rank:
            try:
                path.unlink()
            except OSError as error:
                raise cannot_write(path, error) from None

    def write():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"stack_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        if dist.is_initialized():
            write_flight_record(folder)

    timer = threading.Timer(after or 0, write)
    timer.daemon = True
    if after:
        timer.start()
    try:
        yield
    except RuntimeError:  # of a collective: a peer has not come, or has gone
        if dist.is_initialized():
            write_flight_record(folder)
        raise
    finally:
        timer.cancel()
