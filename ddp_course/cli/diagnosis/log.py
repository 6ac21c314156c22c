"""What a log says about the failure that it ends with.

The log is read once, line by line, in bounded memory. A line that has been seen, but for
its numbers, is not looked at again. Of the lines that fit a failure, those count most
that are not a consequence of another rank's error, and those of the rank that torchrun
names as the root cause. torchrun's and srun's own lines follow almost every error, so
the general pages about them come after the page that fits another line best. So does what
a rank says when another one has left, however short that one's own error is.
"""

import re
from itertools import takewhile
from typing import NamedTuple

from ddp_course import UsageError
from ddp_course.cli.diagnosis.matching import general_last

LONGEST = 4_000  # characters of a line that are looked at
PIECE = 1 << 16  # bytes that are read at once of a line without an end
REMEMBERED = 50_000  # lines that are told apart
STRONG = 30.0  # a score above it says no more: long texts are not better ones
NEAR = 0.85  # of a line's best score: failures below it fit that line less

DIGITS = str.maketrans("", "", "0123456789")
PREFIX = re.compile(
    r"\s*(?:\[?\b(?:rank|default|worker)_?(?P<rank>\d+)\]?:|\[\w+\]:|\d+:)\s?"
)
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FRAME = re.compile(
    r'File "[^"]*", line \d+|\S+, line \d+, in |cell In\[|frame #\d+: |#\d+ |\^+$|~+\^'
)
ROOT = re.compile(r"Root Cause \(first observed failure\)")
RANK = re.compile(r"\brank +: (\d+)")
# What the other ranks and the launcher say when one rank has failed.
FOLLOWER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Watchdog caught"
    r"|ChildFailedError|failed \(exitcode(?!: -(?:4|7|8|9|11)\b)|closing signal|NCCL operations have failed"
    r"|To avoid data inconsistency|watchdog thread terminated|ncclRemoteError"
    r"|remote process exited|dump flag"
    r"|SIGABRT|SIGTERM|exitcode +: -(6|15)\b|Signal (6|15)\b"
    r"|NCCL communicator was aborted|Connection was likely closed|connection lost"
    r"|Last error:|returned non-zero exit status|srun: (error|Terminating)"
    r"|terminate called after"
)
# The last line of a traceback, or of an error from C++.
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b")
# What comes with any run, or with the end of any run.
NOTE = re.compile(
    r"OMP_NUM_THREADS|destroy_process_group|NOT been destroyed|perform barrier"
    r"|asynchronously reported|TORCH_USE_CUDA_DSA|Redirects are"
    r"|errno: 97|system error: 10049|can only (test|join) a child process|sync_dist=True"
    r"|GLOBAL_RANK: \d+, MEMBER: \d+"
)
# What a library says in front of the line that has the cause.
HEADING = re.compile(
    r"NCCL error in:|nccl(Internal|Invalid|System|UnhandledCuda)\w+:"
    r"|Caught \w+ in DataLoader worker|BackendCompilerFailed: backend="
    r"|CheckpointException ranks|terminated with the following error"
)


class Finding(NamedTuple):
    """The best line of a log for a failure."""

    failure: int  # its place in the index
    line: str
    number: int  # of the line in the log
    weight: float


def lines_of(stream):
    """The lines of a binary stream, as text, each cut at LONGEST. Raises UsageError if
    it is empty or no text.
    """
    empty, total, zeros = True, 0, 0
    while piece := stream.readline(PIECE):
        total, zeros = total + len(piece), zeros + piece.count(b"\0")
        if zeros > total / 20:  # torch itself prints one where a worker has no memory
            raise UsageError("this is not a text: give a log, or paste an error")
        text = piece.replace(b"\0", b"").decode(errors="replace")
        for line in re.split(r"[\r\n]+", text):
            if line.strip():
                empty = False
                yield line[:LONGEST]
    if empty:
        raise UsageError("there is nothing to read: give a log, or paste an error")


def without_frames(lines):
    """The numbered lines of a log without prefixes and without the frames of tracebacks:
    (number, rank or "", line).
    """
    inside = None  # the indentation of the last frame
    for number, line in enumerate(lines, 1):
        line, rank = without_prefix(COLOUR.sub("", line))
        indentation = len(line) - len(line.lstrip())
        if FRAME.match(line.lstrip()):
            inside = indentation
        elif inside is None or indentation <= inside:
            inside = None
            yield number, rank, line.strip()


def without_prefix(line):
    """A line without what launchers put before it, and the rank that this names."""
    rank = ""
    while prefix := PREFIX.match(line):
        rank = prefix["rank"] or rank
        line = line[prefix.end() :]
    return line, rank


def findings(lines, index):
    """The failures that the lines of a log fit, best first, a Finding each."""
    best, seen, root, asked = {}, set(), None, False
    particular = set()  # the failures that a line fits better than a general page
    errors = set()  # those that an error fits best which follows from no other
    for number, rank, line in without_frames(lines):
        if ROOT.search(line):
            asked = True
        elif asked and (named := RANK.search(line)):
            root, asked = named[1], False
        if (key := hash(line.translate(DIGITS) + rank)) in seen:
            continue
        if len(seen) < REMEMBERED:
            seen.add(key)
        matches = index.matches(line)
        factor = factor_of(line)
        if not NOTE.search(line):
            particular.update(better_than_general(matches, index.general))
        if factor == 1 and ERROR.match(line):
            errors.update(better_than_general(matches[:1], index.general))
        highest = max((match.score for match in matches), default=0)
        for match in matches[:15]:
            near = match.score / highest
            weight = min(match.score, STRONG) * (1 if near >= NEAR else near) * factor
            finding = Finding(match.failure, line, number, weight)
            entry = best.setdefault((match.failure, rank), finding)
            if finding.weight > entry.weight:
                best[match.failure, rank] = finding
    found = general_last(ranked(best, root), index.general, particular)
    if found and FOLLOWER.search(found[0].line):
        first = [each for each in found if each.failure in errors][:1]
        found = first + [each for each in found if each not in first]
    return found


def better_than_general(matches, general):
    """The failures that a line fits better than any general page."""
    failures = (match.failure for match in matches)
    return takewhile(lambda failure: failure not in general, failures)


def factor_of(line):
    """What a line counts: half if it follows from another error, or says only that there
    is one; less if it is a note.
    """
    if NOTE.search(line):
        return 0.2
    return 0.5 if FOLLOWER.search(line) or HEADING.search(line) else 1


def ranked(best, root):
    """Findings by their weight, which is more for the root cause.

    best: {(failure, rank): finding}. root: the rank that torchrun names, or None.
    """
    weighed = {}
    for (failure, rank), finding in best.items():
        if root is not None and rank == root:
            finding = finding._replace(weight=1.2 * finding.weight)
        if failure not in weighed or weighed[failure].weight < finding.weight:
            weighed[failure] = finding
    order = lambda finding: (-finding.weight, finding.failure, finding.number)
    return sorted(weighed.values(), key=order)
