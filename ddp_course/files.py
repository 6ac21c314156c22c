"""Files that are written whole or not at all; and files that may be damaged, or made to
do harm: what is in them is read as data, or they are refused with a reason in one line.
"""

import json
import os
import pickle
import shutil
import socket
import stat
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

from ddp_course import UsageError

# ---- written ----


def cannot_write(path, error):
    """The UsageError for a file or folder that cannot be written; error: an OSError."""
    fix = "make room, or choose another folder"
    return UsageError(f"cannot write to {path}: {error.strerror}; {fix}")


UNFINISHED = ".unfinished"  # how the names of files end that are being written
ABANDONED = 3600  # seconds without a change: what another machine wrote is a leftover


def temporary_name(name, machine=None, process=None):
    """Of a file that is being written: it names the machine and the process."""
    machine, process = machine or socket.gethostname(), process or os.getpid()
    return f".{name}.{machine}.{process}{UNFINISHED}"


def remove_unfinished(folder):
    """Delete what write_atomically has left behind in runs that were killed.

    What a living process writes stays: another run may be at work in the same folder,
    also on another machine, whose processes cannot be seen from here.
    """
    import psutil  # not above: the command ddp-course starts without it

    for path in folder.glob(f".*{UNFINISHED}"):
        rest, _, process = path.name.removesuffix(UNFINISHED).rpartition(".")
        with suppress(FileNotFoundError):  # it has just been renamed
            if process.isdigit() and rest.endswith(f".{socket.gethostname()}"):
                lives = psutil.pid_exists(int(process))
            else:
                lives = time.time() - path.stat().st_mtime < ABANDONED
            if path.is_file() and not lives:
                path.unlink()


def empty_folder(folder):
    """Make an empty folder, and delete its old content. Raises UsageError if that
    fails.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{folder} is in the way of a folder: move it away") from None
    except OSError as error:
        raise cannot_write(folder, error) from None


def write_atomically(path, content):
    """Write a file, text or bytes, atomically.

    It is written under another name, flushed to the disk, and renamed. Raises
    UsageError where that fails, on a full disk for example; an older file stays.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_names(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from None


def flush_names(folder):
    """Write a folder's list of names to the disk, too, see fsync(2).

    Without that, a renamed file may be gone after a power cut.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- read ----

LARGEST = 256 * 2**20  # bytes of a file that is read as a whole


class Unusable(Exception):
    """Why a file or a checkpoint cannot be used, in words that follow "because"."""

    @classmethod
    def because(cls, error):
        """The Unusable that says in one line what any other error says."""
        if isinstance(error, cls):
            return error
        return cls(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def open_file(path, flags=0):
    """A regular file, open for reading as bytes; links are followed, pipes are not waited
    for. flags: more of `os.open`. Raises OSError for anything else than a file.
    """
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)  # some systems lack some of them
    descriptor = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is no file", str(path))
    return open(descriptor, "rb")


def content_of(path):
    """The bytes of a regular file, at most LARGEST. Raises Unusable."""
    try:
        with open_file(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise Unusable(f"{Path(path).name} is larger than {LARGEST // 2**20} MiB")
        return content
    except OSError as error:
        raise Unusable(f"{Path(path).name} cannot be read: {error.strerror}") from None


def json_of(path):
    """What is in a JSON file. Raises Unusable."""
    try:
        return json.loads(content_of(path))
    except (ValueError, RecursionError):
        raise Unusable(f"{Path(path).name} is no JSON") from None


def tensors_of(path, classes=()):
    """Tensors and plain values from a file, on the CPU; none of its code is run.

    classes: of instances that may be there, too. Raises Unusable.
    """
    try:
        with open_file(path) as file:
            return tensors_in(file, classes)
    except OSError as error:
        raise Unusable(f"{Path(path).name} cannot be read: {error.strerror}") from None
    except Unusable as reason:
        raise Unusable(f"{Path(path).name} {reason}") from None


def tensors_in(file, classes=()):
    """The same, from a file that is open."""
    import torch  # not above: the command ddp-course, which reads JSON, starts without it

    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*classes]):
            warnings.simplefilter("ignore")  # torch asks to report what others wrote
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # it may hold anything
        raise Unusable("holds more than tensors and numbers, or is damaged") from None


class PlainUnpickler(pickle._Unpickler):
    """Reads a pickle that consists of plain values and of the classes that are allowed.

    pickle calls whatever function a file names: an unpickler that finds none runs none,
    see "Restricting Globals" in Python's documentation of pickle. And it may set the
    attributes of what it has found: of objects, but not of the classes themselves.
    """

    allowed = frozenset()  # pairs (module, name)

    def find_class(self, module, name):
        if (module, name) in self.allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def load_build(self):
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it changes a class or a function")
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


def check_alike(found, like, name="it"):
    """Raise Unusable if a value that was read is not of the kind of another.

    A dict must have the same names, an empty one accepts all. Of a list that must be
    like one of one item, each item must be like that. Numbers must be finite, tensors
    have the same shape, and what is true or false must be the same.
    """
    if hasattr(like, "shape"):  # a tensor
        fits = hasattr(found, "untyped_storage") and found.shape == like.shape
    elif isinstance(like, bool):
        fits = found is like
    elif isinstance(like, str | type(None)):
        fits = type(found) is type(like)
    elif isinstance(like, int | float):
        kinds = (int,) if isinstance(like, int) else (int, float)
        fits = type(found) in kinds and abs(found) <= sys.float_info.max
    elif isinstance(like, dict):
        fits = isinstance(found, dict) and (not like or found.keys() == like.keys())
    else:
        fits = isinstance(found, list | tuple)
        fits = fits and (len(like) == 1 or len(found) == len(like))
    if not fits:
        raise Unusable(f"{name} is of another kind")
    if isinstance(like, dict):
        for key, part in like.items():
            check_alike(found[key], part, f"{name}[{key!r}]")
    elif isinstance(like, list | tuple):
        parts = list(like) * len(found) if len(like) == 1 else like
        for number, (item, part) in enumerate(zip(found, parts)):
            check_alike(item, part, f"{name}[{number}]")
