"""Writing a file atomically, by one rank for all."""

import os
import resource
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError

SYNCHRONOUS = getattr(os, "O_SYNC", 0) | getattr(os, "O_DSYNC", 0)
PATIENCE = 2.5  # seconds that the other ranks have to notice that rank 0 has failed
UNKNOWN = ""  # the file of a flush, where the system does not tell


def a_state(seed, numbers=20_000):
    return {"weights": torch.randn(numbers, generator=torch.Generator().manual_seed(seed)), "step": seed}


# ---- what a rank does ----


@contextmanager
def watching(path, function):
    """A list of what this process does to files, in order, while `function` is called.

    Entries: {"kind": "write" or "rename" or "remove" or "flush" or "sleep", "name",
    "to" of a rename, "size" of the file then, "there": whether `path` exists then}.
    A sleep takes a millisecond: another rank may always need longer than a sleep.
    """
    events, on = [], [True]
    sleep = time.sleep

    def note(kind, name, **more):
        there = path.exists()
        events.append({"kind": kind, "name": name, "there": there, **more})

    def hook(event, args):
        if not on:
            return
        if event == "open" and isinstance(args[0], str | bytes) and writes(*args[1:]):
            note("write", os.fsdecode(args[0]))
            if SYNCHRONOUS and (args[2] or 0) & SYNCHRONOUS:
                note("flush", os.fsdecode(args[0]), size=sys.maxsize)
        elif event in ("os.rename", "os.link"):
            name, to = os.fsdecode(args[0]), os.fsdecode(args[1])
            size = os.path.getsize(name) if os.path.isfile(name) else 0
            note("rename", name, to=to, size=size)
            sleep(0.2)  # so that a rank that does not wait for this one is detected
        elif event in ("os.remove", "os.truncate"):
            note("remove", os.fsdecode(args[0]))

    def flush(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        folder = "/proc/self/fd"
        place = os.readlink(f"{folder}/{number}") if os.path.isdir(folder) else UNKNOWN
        note("flush", place, size=os.fstat(number).st_size)
        sleep(0.2)
        os_functions["fsync"](number)

    def sync():
        for file in path.parent.iterdir():
            note("flush", str(file), size=file.stat().st_size)
        sleep(0.2)

    def hurry(seconds):
        note("sleep", str(seconds))
        sleep(0.001)

    os_functions = {name: getattr(os, name) for name in ("fsync", "fdatasync", "sync")
                    if hasattr(os, name)}  # fmt: skip
    replaced = {original: sync if name == "sync" else flush for name, original in os_functions.items()}
    replaced[sleep] = hurry
    sys.addaudithook(hook)
    places = [vars(os), vars(time), vars(sys.modules["posix"])]
    with replacing(replaced, [*places, getattr(function, "__globals__", {})]):
        yield events
    on.clear()  # an audit hook cannot be removed


@contextmanager
def replacing(replaced, namespaces):
    """Replace functions, {original: other}, under all their names in some namespaces: an
    answer may have imported them before.
    """
    found = [
        (space, name, value)
        for space in namespaces
        for name, value in space.items()
        if callable(value) and any(value is original for original in replaced)
    ]
    for space, name, value in found:
        space[name] = replaced[value]
    try:
        yield
    finally:
        for space, name, value in found:
            space[name] = value


def writes(mode, flags):
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def save_on_ranks(save_whole, path, seed):
    """Let all ranks save over an older file, rank 0 later than the others; return what
    each did, and what it found afterwards.
    """
    path = Path(path)
    with process_group(timeout=4) as (rank, _):
        if rank == 0:
            torch.save(a_state(seed + 1), path)
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
        state = a_state(seed)
        with watching(path, save_whole) as events:
            save_whole(path, state)
        found = reading(path)
        size = path.stat().st_size if path.exists() else 0
        dist.barrier()
        return {
            "events": events,
            "found": found,
            "size": size,
            "left": sorted(os.listdir(path.parent)),
            "kept": same(state, seed),
        }


def reading(path):
    """The `step` of a saved state, or what is wrong with the file."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            found = torch.load(file, weights_only=True)
        if not same(found, found["step"]):
            return "a file with other weights"
        return found["step"]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def without_waiting(path, flags):
    """Open a file that an answer has made: no link is followed, no pipe waited for."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, name, 0)  # Windows lacks them
    return os.open(path, flags)


def same(state, seed):
    """Whether a state is a_state(seed)."""
    expected = a_state(seed)
    return (
        isinstance(state, dict)
        and state.keys() == expected.keys()
        and state["step"] == seed
        and torch.equal(state["weights"], expected["weights"])
    )


def save_and_die(save_whole, path, seed, offset):
    """Save; the system kills the process as soon as `offset` bytes are in a file."""
    with process_group(timeout=4):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (offset, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        save_whole(Path(path), a_state(seed))


def save_and_fail(save_whole, path, seed, most, ended_folder):
    """Save where rank 0 fails; return how the call ended on this rank, and when. most:
    bytes that rank 0 may write to a file. ended_folder: where each rank notes its end.

    Rank 0 stays until the others have ended, or for PATIENCE: the end of its process
    must not be what tells them.
    """
    with process_group(timeout=8) as (rank, n):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        dist.barrier()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            save_whole(Path(path), a_state(seed))
            ended = "it returned"
        except Exception as error:
            ended = f"it raised {type(error).__name__}"
        now = time.monotonic()
        Path(ended_folder, str(rank)).touch()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            while len(os.listdir(ended_folder)) < n and time.monotonic() < now + PATIENCE:
                time.sleep(0.02)
        return {"ended": ended, "at": now}


def save_again(save_whole, path, seed):
    """Save, after others have been killed, and then under a name that is new; return
    what is then in both files.
    """
    path = Path(path)
    first = path.with_name(f"another-{path.name}")
    with process_group(timeout=4):
        save_whole(path, a_state(seed))
        save_whole(first, a_state(seed + 1))
    return reading(path), reading(first)


# ---- the question ----


@question(
    "Write to another name in the same folder, and rename: that is atomic, and the old file stays until then. Data that "
    "a program has written may still be in memory: flush Python's buffer, and then the system's. And think of a full "
    "disk: for what do the other ranks wait then?",
    "On rank 0: file.flush(), os.fsync(file.fileno()), and after closing it os.replace(temporary, path), all in a try. "
    "If it fails, remove the temporary file and keep the error's text. Then a collective in which rank 0 tells the "
    "others how it went. It is also what they wait for.",
    "problem = [None]; on rank 0, in a try: with open(temporary, 'wb') as file: torch.save(state, file); file.flush(); "
    "os.fsync(file.fileno()), and then os.replace(temporary, path). except Exception as error: "
    "temporary.unlink(missing_ok=True); problem = [str(error)]. On all ranks: dist.broadcast_object_list(problem), and "
    "raise OSError(problem[0]) if it is not None.",
)
def check_save_whole(answer, draw):
    """If it is killed at any byte, the old file must be unchanged; only rank 0 may
    write, flush and rename; all ranks must wait, and all must raise an error if rank 0
    cannot write.
    """
    seed = 3 * draw.randrange(10**6)
    with answer.folder() as folder:
        path = folder / draw.choice(["state.pt", "last.ckpt", "step-7.pt"])
        n = draw.choice([2, 3])
        of_ranks = answer.on_ranks(save_on_ranks, str(path), seed, nproc=n)
        judge_saving(of_ranks, path, seed)
        size = of_ranks[0]["size"]
        for part in (0.0, draw.uniform(0.1, 0.9), 0.999):
            judge_kill(answer, path, seed, int(part * size), size)
        [(found, first)] = answer.on_ranks(save_again, str(path), seed + 4)
        if found != seed + 4:
            raise stopped_by_a_leftover(found_in_words(found, seed))
        if first != seed + 5:
            cause = "a call for a path at which there is no file yet must do the same"
            raise Wrong(
                "a file that is saved for the first time",
                expected="the state of that call",
                got=found_in_words(first, seed),
                cause=cause,
            )
        judge_failing(answer, path, seed + 9, n, size)


def judge_failing(answer, path, seed, n, size):
    """Raise Wrong unless all ranks raise an error in time where rank 0 cannot write. size:
    that of the file at `path`, in bytes.
    """
    expected = answer.apart(reading, str(path))
    nowhere, taken = path.parent / "nowhere" / path.name, path.parent / "taken"
    answer.apart(os.makedirs, str(taken / "full"))
    before = answer.files(path.parent)
    for trouble, place, most in [
        ("a disk that is full in the middle of the file", path, size * 3 // 5),
        ("a folder that does not exist", nowhere, 2 * size),
        ("a folder at `path`, so that the rename fails", taken, 2 * size),
    ]:
        with answer.folder() as ended:
            args = (str(place), seed, most, str(ended))
            of_ranks = answer.on_ranks(save_and_fail, *args, nproc=n, timeout=12)
        checked = f"{trouble}, on {n} ranks"
        judge_errors(checked, of_ranks)
        if (found := answer.apart(reading, str(path))) != expected:
            cause = "a file that could not be written whole must not take the place of the old one"
            raise Wrong(checked, expected="the old file, whole", got=found, cause=cause)
        left = answer.files(path.parent)
        if more := [name for name in left if name not in before]:
            cause = (
                "half a file is left behind, on a disk that is full: where writing fails, remove the temporary file "
                "before you raise the error"
            )
            raise Wrong(checked, expected="no other file in its folder", got=more, cause=cause)


def judge_errors(checked, of_ranks):
    """Raise Wrong unless the call of each rank ended with an error, in time."""
    n, first = len(of_ranks), of_ranks[0]
    for rank, seen in enumerate(of_ranks):
        rows = {"rank": f"{rank} of {n}", "expected": "an error on all ranks"}
        if rank and seen["at"] - first["at"] > PATIENCE - 0.5:
            cause = (
                "rank 0 has failed, and this rank waits for it: rank 0 must first tell the others how it went, in the "
                "collective for which they wait"
            )
            got = f"it waited for rank 0, whose call had ended: {first['ended']}"
            raise Wrong(checked, cause=cause, **rows, got=got)
        if seen["ended"] == "it returned":
            cause = "nothing was saved, and the program goes on as if it was: raise the error"
            if rank and first["ended"] != "it returned":
                cause = (
                    "rank 0 has failed, and this rank goes on as if the file was there: rank 0 must tell the others "
                    "how it went"
                )
            raise Wrong(checked, cause=cause, **rows, got=seen["ended"])


def stopped_by_a_leftover(got):
    cause = "a save that was killed has left its temporary file: the next one must be able to overwrite it"
    checked = "a save after one that was killed"
    return Wrong(checked, expected="the new state", got=got, cause=cause)


def judge_kill(answer, path, seed, offset, size):
    """Raise Wrong unless the file at `path`, of `size` bytes, survives a kill after
    `offset` bytes.
    """
    try:
        answer.on_ranks(save_and_die, str(path), seed + 7, offset)
    except RankError as error:
        if "FileExistsError" in error.message:
            raise stopped_by_a_leftover("FileExistsError") from None
        if "SIGXFSZ" not in str(error):
            raise
    if (found := answer.apart(reading, str(path))) != seed:
        checked = f"a file that is saved for the second time, by a process that is killed after {offset:,} "
        checked += f"of {size:,} bytes"
        cause = "the good file was overwritten in place: write under another name, then rename"
        raise Wrong(checked, expected="the first one, whole", got=found_in_words(found, seed), cause=cause)


def found_in_words(found, seed):
    names = {seed: "the state of the call before", seed + 1: "still the old state"}
    return names.get(found, found)


def judge_saving(of_ranks, path, seed):
    """Raise Wrong unless rank 0 alone wrote, in the right order, and all ranks waited."""
    n = len(of_ranks)
    checked = f"what happens in save_whole('{path.name}', state), on {n} ranks"
    for rank, seen in enumerate(of_ranks[1:], 1):
        if changes := [one for one in seen["events"] if one["kind"] in CHANGES]:
            cause = "all ranks write to the same place: only rank 0 may write"
            name = Path(changes[0].get("to", changes[0]["name"])).name
            raise Wrong(
                checked,
                rank=f"{rank} of {n}",
                expected="no write and no rename",
                got=f"{changes[0]['kind']} of {name}",
                cause=cause,
            )
    judge_waiting(of_ranks, path, seed)
    judge_order(checked, of_ranks[0], path, n)
    judge_what_is_left(checked, of_ranks, path)


CHANGES = ("write", "rename", "remove")


def judge_waiting(of_ranks, path, seed):
    """Raise Wrong unless each rank found the new file when its call had returned."""
    n = len(of_ranks)
    for rank, seen in enumerate(of_ranks):
        if seen["found"] == seed:
            continue
        cause = (
            "this rank continues before the file exists: all ranks must wait for rank 0, with dist.barrier() at the end"
        )
        if any(one["kind"] == "sleep" for one in seen["events"]):
            cause = (
                "no sleep is long enough: on a slow disk, rank 0 needs longer than that. Wait for rank 0 itself, "
                "with dist.barrier() at the end"
            )
        if rank == 0:
            cause = (
                "rank 0 must write the state with torch.save, and rename the file to `path`, before save_whole returns"
            )
        if seen["found"] == "a file with other weights":
            cause = "the file must hold the whole state, with the numbers as they are"
        raise Wrong(
            f"the file, when save_whole has returned, on {n} ranks",
            rank=f"{rank} of {n}",
            expected="the new state",
            got=found_in_words(seen["found"], seed),
            cause=cause,
        )


def judge_what_is_left(checked, of_ranks, path):
    """Raise Wrong if other files are left, or if the state was changed."""
    n, seen = len(of_ranks), of_ranks[0]
    if seen["left"] != [path.name]:
        more = [name for name in seen["left"] if name != path.name]
        cause = "a file is left behind, one more at each checkpoint: rename it with os.replace instead of copying"
        raise Wrong(checked, rank=f"0 of {n}", expected=f"only {path.name} in its folder", got=more, cause=cause)
    for rank, seen in enumerate(of_ranks):
        if not seen["kept"]:
            cause = "the state belongs to the training, which goes on with it: do not change it"
            raise Wrong(
                f"the state, after save_whole, on {n} ranks",
                rank=f"{rank} of {n}",
                expected="as it was",
                got="it has changed",
                cause=cause,
            )


def judge_order(checked, seen, path, n):
    """Raise Wrong unless rank 0 wrote to another name in the same folder, flushed
    everything, and then renamed it, with a file at `path` at all times.
    """
    events = [one for one in seen["events"] if one["kind"] != "sleep"]
    rows = {"rank": f"0 of {n}", "expected": "write another name, flush, fsync, rename"}
    for before, now in zip(events, events[1:]):
        if before["there"] and not now["there"]:
            cause = (
                "for a moment there is no file at `path`: a process that is killed then has "
                "lost the old file and does not have the new one. os.replace puts the new file in the old one's "
                "place in a single step"
            )
            got = f"{before['kind']} of {Path(before['name']).name}, then {now['kind']}"
            raise Wrong(checked, cause=cause, **rows, got=got)
    renames = [number for number, one in enumerate(events) if one["kind"] == "rename" and Path(one["to"]) == path]
    if not renames:
        cause = (
            "the file is written in place: a process that is killed meanwhile has lost the old file and has not "
            "finished the new one"
        )
        raise Wrong(checked, cause=cause, **rows, got="no rename")
    source = Path(events[renames[-1]]["name"])
    if source.parent != path.parent:
        cause = "that folder may be on another disk, where a rename is a copy, byte by byte: use the same folder"
        rows["expected"] = f"a temporary name in {path.parent.name}"
        raise Wrong(checked, cause=cause, **rows, got=f"one in {source.parent}")
    judge_flushes(checked, seen["size"], events, renames[-1], rows)


def judge_flushes(checked, size, events, rename, rows):
    """Raise Wrong unless the whole file was on the disk before its rename. rename: the
    place of that event.
    """
    source, path = Path(events[rename]["name"]), Path(events[rename]["to"])
    names = (source.name, path.name, UNKNOWN)
    flushes = [
        number for number, one in enumerate(events) if one["kind"] == "flush" and Path(one["name"]).name in names
    ]
    if events[rename]["size"] < size:
        cause = (
            "the rename comes too early: a part of the file was still in Python's own buffer. Close the file first, "
        )
        cause += "or call file.flush()"
        rows["expected"] = f"{size:,} bytes in the file before the rename"
        raise Wrong(checked, cause=cause, **rows, got=f"{events[rename]['size']:,}")
    if not flushes:
        cause = (
            "the name is on the disk immediately, but the content may be only in memory: after a power cut, the file "
        )
        cause += "exists and is empty. Call os.fsync(file.fileno()) before the rename"
        raise Wrong(checked, cause=cause, **rows, got="no fsync")
    if flushes[0] > rename:
        cause = "fsync comes after the rename: for a moment, the new name belongs to data that is only in memory"
        raise Wrong(checked, cause=cause, **rows, got="rename, fsync")
    flushed = max(events[number]["size"] for number in flushes if number < rename)
    if flushed < size:
        cause = (
            "fsync flushes only the system's buffer; the rest was still in Python's own buffer: call file.flush() first"
        )
        rows["expected"] = f"{size:,} bytes flushed"
        raise Wrong(checked, cause=cause, **rows, got=f"{flushed:,} bytes")
