"""Where a rank was: the lines of a traceback that a learner wants to see, named as a
person would name them.

A frame is (file, line, function).
"""

import linecache
import os
import re
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # ddp_course/
# the frames that launch itself adds to a rank's traceback
LAUNCH = tuple(
    str(PACKAGE / "ranks" / name)
    for name in ("launch.py", "in_each_rank.py", "endings.py")
)
OURS = (
    *LAUNCH,
    *(str(PACKAGE / room) for room in ("notebook", "judge", "checks", "cli")),
)
LIBRARIES = ("<frozen", "<string>", sysconfig.get_path("stdlib"))


def is_learners(frame):
    """Whether a frame is in the learner's code or a lesson's, not in a library or our
    package.
    """
    file = frame[0]
    return not (file.startswith(OURS + LIBRARIES) or "-packages" in file)


def main_thread(dump):
    """The main thread's frames, innermost first, from faulthandler's dump of all
    threads.
    """
    for thread in dump.split("\n\n"):
        if "in rank_main" in thread:
            frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
            return [(file, int(line), name) for file, line, name in frames]
    return []


def format_frame(frame):
    file, line, name = frame
    text = linecache.getline(file, line).strip()
    return f"{_short_name(file)}, line {line}, in {name}" + (
        f": {text}" if text else ""
    )


def format_frames(frames):
    """A traceback, outermost frame first: the learner's own frames, and the innermost
    one in any case.
    """
    frames = [frame for frame in frames if frame[0] not in LAUNCH]
    kept = [
        frame
        for index, frame in enumerate(frames)
        if is_learners(frame) or index == len(frames) - 1
    ]
    return "\n".join(f"  {format_frame(frame)}" for frame in kept)


def _short_name(file):
    """A short name of a file: the cell, or its path relative to Python's search path."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    # IPython 7 (Colab's) has no numbers for cells
    name_of = getattr(shell and shell.compile, "format_code_name", lambda file: None)
    if name := name_of(file):
        return f"cell {name[1]}"
    if file.startswith("<frozen"):
        return file  # a module of Python's own
    if not os.path.exists(file):
        return "cell"
    above = [*map(os.path.abspath, sys.path), str(PACKAGE.parent)]
    parents = [parent for parent in above if file.startswith(parent + os.sep)]
    return (
        os.path.relpath(file, max(parents, key=len))
        if parents
        else os.path.basename(file)
    )
