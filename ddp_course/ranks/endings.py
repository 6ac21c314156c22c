"""How each rank ended, and how that is reported."""

import io
import json
import re
import signal
import textwrap

import cloudpickle
import psutil

from ddp_course import UsageError
from ddp_course.ranks.frames import (
    format_frame,
    format_frames,
    is_learners,
    main_thread,
)

# Errors of a rank after another one has failed: a timeout, and then a lost connection.
TIMEOUTS = ["Timed out waiting", "Application timeout"]
HANG_UPS = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"]
SYMPTOMS = TIMEOUTS + HANG_UPS


class _Brief:
    """An error of which a notebook shows only the text, without launch's internals."""

    def _render_traceback_(self):
        """IPython's hook. Shows the notes on the error, too."""
        text = "\n".join([f"{type(self).__name__}: {self}", *self._notes()])
        return text.splitlines()

    def _notes(self):
        return getattr(self, "__notes__", [])


class RankError(_Brief, RuntimeError):
    """A rank raised, died or left early. `rank` is its number; the text holds that
    rank's own traceback first.

    message: that rank's error alone, "ValueError: ...", or how it died.
    """

    def __init__(self, text, rank=None, message=""):
        super().__init__(text)
        self.rank, self.message = rank, message


class RankTimeout(RankError, TimeoutError):
    """The ranks did not finish in time. The text says where each of them was."""


class RanksInterrupted(_Brief, KeyboardInterrupt):
    """Ctrl-C, or the notebook's stop button. The text says where each rank was."""


class CannotLaunch(_Brief, UsageError, TypeError, ValueError):
    """launch was called in a way that cannot work; no rank was started."""


def results(endings, timeout, plain=False):
    """What the ranks returned, in rank order; or raise the error that says why they did
    not.

    plain: see launch_untrusted. Raises RankError or RankTimeout.
    """
    failed = [ending for ending in endings if ending.failed]
    if failed:
        raise _error_of(_first(failed), endings)
    if any(ending.running for ending in endings):
        ranks = "rank" if len(endings) == 1 else f"{len(endings)} ranks"
        limit = f"the {ranks} did not finish within {timeout:g} s"
        raise RankTimeout(f"{limit}\n{places(endings)}")
    if plain:
        return [ending.plain_value() for ending in endings]
    return [cloudpickle.loads(ending.result) for ending in endings]


def _first(failed):
    """The most informative ending: an error before a lost connection, an early one
    before a late one, and the lowest rank of several with the same error.
    """
    first = min(
        failed, key=lambda ending: (ending.is_hang_up, ending.is_timeout, ending.time)
    )
    return next(
        ending for ending in failed if ending is first or ending.fails_like(first)
    )


def _error_of(first, endings):
    lines = [f"rank {first.rank} of {len(endings)} {first.story}\n"]
    for other in endings:
        if other is not first:
            place = "failed in the same way" if other.fails_like(first) else other.place
            lines.append(f"meanwhile rank {other.rank} {place}")
    text = "\n".join(lines).strip()
    return RankError(text, first.rank, first.message or first.summary)


def places(endings):
    """Where each rank was when it ended, one line per rank."""
    return "\n".join(f"  rank {ending.rank} {ending.place}" for ending in endings)


class Ending:
    """How one rank ended, from its exit code and its files in the folder.

    running: whether it was still running and was ended. stopped: whether a signal had
    stopped it before.
    """

    def __init__(self, folder, rank, exitcode, running, stopped=False):
        self.rank, self.exitcode, self.running = rank, exitcode, running
        self.stopped = stopped
        self.result = read(folder / f"{rank}.result")
        # a rank that we stop may still report a lost connection, which is caused by our
        # stopping the ranks
        self.failure = None if running else _read_failure(folder / f"{rank}.failure")
        returned = exitcode == 0 and bool(self.result)
        self.died = not running and not self.failure and not returned
        self.failed = self.died or bool(self.failure)
        # a rank that could not report when it failed counts as the first
        self.time = self.failure["time"] if self.failure else 0.0
        self.message = self.failure["message"] if self.failure else ""
        self.is_timeout = any(words in self.message for words in TIMEOUTS)
        self.is_hang_up = any(words in self.message for words in HANG_UPS)
        stderr = read(folder / f"{rank}.stderr").decode(errors="replace")
        self.last_words = stderr.strip().splitlines()[-8:]
        stack = read(folder / f"{rank}.stack").decode(errors="replace")
        self.stack = main_thread(stack)

    def plain_value(self):
        """What the rank returned, without running any code in it."""
        import torch

        try:
            return torch.load(io.BytesIO(self.result), weights_only=True)
        except Exception:
            message = "what the rank returned is no plain value"
            raise RankError(
                f"rank {self.rank}: {message}", self.rank, message
            ) from None

    @property
    def summary(self):
        if self.failure:
            return textwrap.shorten(self.message, width=160, placeholder=" ...")
        if self.exitcode < 0:
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        return f"left with exit code {self.exitcode} before it had returned"

    def fails_like(self, other):
        """Whether both raised the same error, apart from the ranks and numbers in it."""
        mine, theirs = (re.sub(r"\d+", "", end.message) for end in (self, other))
        return bool(self.message) and mine == theirs

    @property
    def story(self):
        if self.failure:
            frames = format_frames(self.failure["frames"])
            return f"raised\n\n{frames}\n{self.message}"
        if not self.last_words:
            return self.summary
        words = "\n".join(f"    {line}" for line in self.last_words)
        return f"{self.summary}; its last words:\n\n{words}"

    @property
    def place(self):
        if self.failed:
            return f"failed: {self.summary}"
        if not self.running:
            return "had returned"
        if not self.stack and self.result:
            return "had returned, but its process did not end: is a thread, not a daemon, left?"
        if not self.stack:
            return "was stopped (SIGSTOP)" if self.stopped else "was still starting"
        own = next(filter(is_learners, self.stack), self.stack[0])
        state = "was stopped (SIGSTOP)" if self.stopped else "was"
        return f"{state} in {format_frame(own)}"


def is_stopped(process):
    """Whether a signal has stopped a process, SIGSTOP or a terminal's Ctrl-Z; process:
    its number.
    """
    try:
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def read(path):
    """The bytes of a file that a rank may have written."""
    return path.read_bytes() if path.exists() else b""


def _read_failure(path):
    """A rank's report of the error that it raised, a dict; None if there is none, or if
    it is not in our form.
    """
    try:
        failure = json.loads(read(path))
        frames = [
            (str(file), int(line), str(name)) for file, line, name in failure["frames"]
        ]
        return {
            "time": float(failure["time"]),
            "message": str(failure["message"]),
            "frames": frames,
        }
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
