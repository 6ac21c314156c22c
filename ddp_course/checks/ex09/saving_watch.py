"""What a process does to files while it saves a state, and what is in a file afterwards."""

import os
import sys
import time
from contextlib import contextmanager

import torch

SYNCHRONOUS = getattr(os, "O_SYNC", 0) | getattr(os, "O_DSYNC", 0)
UNKNOWN = ""  # the file of a flush, where the system does not tell


def a_state(seed, numbers=20_000):
    return {"weights": torch.randn(numbers, generator=torch.Generator().manual_seed(seed)), "step": seed}


def same(state, seed):
    """Whether a state is a_state(seed)."""
    expected = a_state(seed)
    return (
        isinstance(state, dict)
        and state.keys() == expected.keys()
        and state["step"] == seed
        and torch.equal(state["weights"], expected["weights"])
    )


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


@contextmanager
def watching(path, function):
    """A list of what this process does to files, in order, while `function` is called.

    Entries: {"kind": "write" or "rename" or "remove" or "flush" or "sleep", "name",
    "to" of a rename, "size" of the file then, "there": whether `path` exists then}.
    A sleep takes a millisecond: another rank may always need longer than a sleep.
    """
    events, on = [], [True]
    sleep, writer = time.sleep, torch._C.PyTorchFileWriter

    def note(kind, name, **more):
        events.append({"kind": kind, "name": name, "there": path.exists(), **more})

    def hook(event, args):
        if not on:
            return
        if event == "open" and isinstance(args[0], str | bytes) and writes(*args[1:]):
            note("write", os.fsdecode(args[0]))
            if SYNCHRONOUS and (args[2] or 0) & SYNCHRONOUS:
                note("flush", os.fsdecode(args[0]), size=sys.maxsize)
        elif event in ("os.rename", "os.link"):
            name, to = os.fsdecode(args[0]), os.fsdecode(args[1])
            note("rename", name, to=to, size=os.path.getsize(name) if os.path.isfile(name) else 0)
            sleep(0.2)  # so that a rank that does not wait for this one is detected
        elif event in ("os.remove", "os.truncate"):
            note("remove", os.fsdecode(args[0]))

    def write(file, *options):  # torch.save opens a file by its name in C++: no hook is told
        if isinstance(file, str):
            note("write", file)
        return writer(file, *options)

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

    os_functions = {name: getattr(os, name) for name in ("fsync", "fdatasync", "sync") if hasattr(os, name)}
    replaced = {original: sync if name == "sync" else flush for name, original in os_functions.items()}
    replaced |= {sleep: hurry, writer: write}
    sys.addaudithook(hook)
    places = [vars(os), vars(time), vars(sys.modules["posix"]), vars(torch._C)]
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
