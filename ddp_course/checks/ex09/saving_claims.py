"""What question 4 claims of the ranks that save, of a kill, and of a disk that fails."""

import math
from pathlib import Path

from ddp_course.checks.claims import Between, Claim
from ddp_course.checks.ex09.saving_watch import UNKNOWN

CHANGES = ("write", "rename", "remove")
NOWHERE = "nowhere"  # a folder that is not there
PATIENCE = 2.5  # seconds that the other ranks have to notice that rank 0 has failed

# ---- a save that nothing disturbs ----


def only_rank_0_writes(checked, rank, of_ranks):
    if rank > 0:
        changes = [one for one in of_ranks[rank]["events"] if one["kind"] in CHANGES]
        names = [f"{one['kind']} of {Path(one.get('to', one['name'])).name}" for one in changes]
        yield Claim(checked, names[:1], [], "all ranks write to the same place: only rank 0 may write",
                    told="no write and no rename", shown=", ".join(names[:1]))  # fmt: skip


def new_file_is_there(seed, rank, of_ranks):
    """The claim that a rank finds the new file as soon as its call has returned."""
    seen = of_ranks[rank]
    otherwise = (
        "this rank continues before the file exists: all ranks must wait for rank 0, with dist.barrier() at the end"
    )
    if rank == 0:
        otherwise = (
            "rank 0 must write the state with torch.save, and rename the file to `path`, before save_whole returns"
        )
    elif any(one["kind"] == "sleep" for one in seen["events"]):
        otherwise = (
            "no sleep is long enough: on a slow disk, rank 0 needs longer than that. Wait for rank 0 itself, with "
            "dist.barrier() at the end"
        )
    yield Claim(f"the file, when save_whole has returned, on {len(of_ranks)} ranks", seen["found"], seed, otherwise,
                [("a file with other weights", "the file must hold the whole state, with the numbers as they are")],
                told="the new state", shown=in_words(seen["found"], seed))  # fmt: skip


ORDER = "write another name, flush, fsync, rename"


def safe_at_all_times(checked, path, seen):
    """Claims that rank 0 writes to another name in the same folder, flushes everything, and
    then renames it, with a file at `path` at all times.
    """
    events = [one for one in seen["events"] if one["kind"] != "sleep"]
    gaps = [
        f"{before['kind']} of {Path(before['name']).name}, then {now['kind']}"
        for before, now in zip(events, events[1:])
        if before["there"] and not now["there"]
    ]
    yield Claim(checked, gaps[:1], [], "for a moment there is no file at `path`: a process that is killed then has lost "
                "the old file and does not have the new one. os.replace puts the new file in the old one's place in a "
                "single step", told=ORDER, shown=", ".join(gaps[:1]))  # fmt: skip
    renames = [number for number, one in enumerate(events) if one["kind"] == "rename" and Path(one["to"]) == path]
    yield Claim(checked, bool(renames), True, "the file is written in place: a process that is killed meanwhile has lost "
                "the old file and has not finished the new one", told=ORDER, shown="no rename")  # fmt: skip
    source = Path(events[renames[-1]]["name"])
    yield Claim(checked, source.parent == path.parent, True, "that folder may be on another disk, where a rename is a "
                "copy, byte by byte: use the same folder", told=f"a temporary name in {path.parent.name}",
                shown=f"one in {source.parent}")  # fmt: skip
    yield from flushed_in_time(checked, events, renames[-1], seen["size"])
    more = [name for name in seen["left"] if name != path.name]
    yield Claim(checked, more, [], "a file is left behind, one more at each checkpoint: rename it with os.replace instead "
                "of copying", told=f"only {path.name} in its folder")  # fmt: skip


def flushed_in_time(checked, events, rename, size):
    """Claims that all bytes were on the disk before the rename. rename: the place of that
    event.
    """
    early, late = events[:rename], events[rename:]
    renamed = late[0]["size"]
    yield Claim(checked, renamed, Between(size), "the rename comes too early: a part of the file was still in Python's own "
                "buffer. Close the file first, or call file.flush()",
                told=f"{size:,} bytes in the file before the rename", shown=f"{renamed:,}")  # fmt: skip
    source, path = Path(late[0]["name"]).name, Path(late[0]["to"]).name
    flushed = flushes(early, source)  # a flush of the old file helps nobody
    too_late = "fsync comes after the rename: for a moment, the new name belongs to data that is only in memory"
    power_cut = (
        "the name is on the disk immediately, but the content may be only in memory: after a power cut, the file exists and "
        "is empty. Call os.fsync(file.fileno()) before the rename"
    )  # fmt: skip
    is_late = bool(flushes(late, source, path))
    yield Claim(checked, bool(flushed), True, too_late if is_late else power_cut, told=ORDER,
                shown="rename, fsync" if is_late else "no fsync of this file")  # fmt: skip
    yield Claim(checked, max(flushed), Between(size), "fsync flushes only the system's buffer; the rest was still in "
                "Python's own buffer: call file.flush() first", told=f"{size:,} bytes flushed",
                shown=f"{max(flushed):,} bytes")  # fmt: skip


def flushes(events, *names):
    """For each flush of a file with one of these names, how many bytes it had."""
    found = (one for one in events if one["kind"] == "flush")
    return [one["size"] for one in found if Path(one["name"]).name in (*names, UNKNOWN)]


def state_is_kept(rank, of_ranks):
    yield Claim(f"the state, after save_whole, on {len(of_ranks)} ranks", of_ranks[rank]["kept"], True,
                "the state belongs to the training, which goes on with it: do not change it",
                told="as it was", shown="it has changed")  # fmt: skip


# ---- a save that is killed, and the next ones ----


def survives(killed, ended, found, seed):
    """Claims about a file after a kill. killed: in words; ended: how the save ended before
    it, if it did.
    """
    yield no_leftover_stops_it(ended, None, ended)
    yield Claim(f"a file that is saved for the second time, by {killed}", found, seed, "the good file was "
                "overwritten in place: write under another name, then rename", told="the first one, whole",
                shown=in_words(found, seed))  # fmt: skip


def saves_again(found, first, seed):
    """Claims about the file of a killed save, and one at a new path, after two more saves."""
    yield no_leftover_stops_it(found, seed + 4, in_words(found, seed))
    yield Claim("a file that is saved for the first time", first, seed + 5, "a call for a path at which there is no file "
                "yet must do the same", told="the state of that call", shown=in_words(first, seed))  # fmt: skip


def no_leftover_stops_it(got, expected, shown):
    return Claim("a save after one that was killed", got, expected, "a save that was killed has left its temporary file: "
                 "the next one must be able to overwrite it", told="the new state", shown=shown)  # fmt: skip


def in_words(found, seed):
    names = {seed: "the state of the call before", seed + 1: "still the old state"}
    return names.get(found, found)


# ---- a save that fails on rank 0 ----


def raises_in_time(checked, more, rank, of_ranks):
    """Claims that a rank raises an error, and waits for nobody. more: names that are new in
    the folder.
    """
    seen, first, told = of_ranks[rank], of_ranks[0], "an error on all ranks"
    yield Claim(checked, seen["at"] - first["at"], Between(-math.inf, PATIENCE - 0.5), "rank 0 has failed, and this rank "
                "waits for it: rank 0 must first tell the others how it went, in the collective for which they wait",
                told=told, shown=f"it waited for rank 0, whose call had ended: {first['ended']}")  # fmt: skip
    otherwise = "nothing was saved, and the program goes on as if it was: raise the error"
    if first["ended"] != "it returned":
        otherwise = (
            "rank 0 has failed, and this rank goes on as if the file was there: rank 0 must tell the others how it went"
        )
    elif NOWHERE in more:
        otherwise = "a folder that has been deleted does not come back: raise the error instead of making the folder"
    yield Claim(checked, seen["ended"] == "it returned", False, otherwise, told=told, shown=seen["ended"])


def nothing_is_lost_or_left(checked, what, found, expected, more):
    """what: the file that could be left, in words."""
    yield Claim(checked, found, expected, "a file that could not be written whole must not take the place of the old one",
                told="the old file, whole", shown=found)  # fmt: skip
    yield Claim(checked, more, [], f"{what} is left behind: where writing or renaming fails, remove the temporary file "
                "before you raise the error", told="no other file in its folder")  # fmt: skip
