"""`ddp-course start`: a course folder, in which a learner works on copies.

It holds copies of lessons/, exercises/ and clusters/, a page for assistants, and the
learner's own runs/ and data/. A hidden file records which version of the course each
copy came from. With it, the course can update the copies that the learner has not
changed, and keep the others.
"""

import hashlib
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ddp_course import COURSE_FILE, UsageError, folders, is_checkout
from ddp_course.cli import exercises
from ddp_course.files import Unusable, content_of, json_of, write_atomically

TUTOR = Path(__file__).with_name("tutor.md")  # what assistants read in such a folder


class Outcome(NamedTuple):
    """What start() did: the names of files, such as "lessons/04_ddp.ipynb"."""

    new: list  # did not exist
    updated: list  # the learner had not changed it, the course has a newer one
    kept: list  # the course has a newer one, but the learner has changed it


def start(folder):
    """Make a course folder, or bring it up to date; return the Outcome.

    Raises UsageError if a file is in the way, or if the folder cannot be written to.
    """
    if is_checkout(folder):
        raise UsageError(
            f"{folder} is a checkout of the course: `ddp-course lab` makes work/ in it"
        )
    ours, copies, outcome = course_files(), read_copies(folder), Outcome([], [], [])
    if not ours:
        raise UsageError(
            "the course is installed without its lessons: install it again"
        )
    for name, path in ours.items():
        version, copied = version_of(path), copies.get(name)
        if not os.path.lexists(folder / name):
            outcome.new.append(name)
        elif (mine := version_of(folder / name)) == version:
            copies[name] = version
        elif mine == copied:
            outcome.updated.append(name)
        elif version != copied:
            outcome.kept.append(name)
    if not any(os.path.lexists(folder / name) for name in [COURSE_FILE, *ours]):
        if others := [path.name for path in folder.glob("[!.]*")]:
            problem = f"{folder} holds other things, {min(others)} for one"
            raise UsageError(f"{problem}: choose a new folder, or an empty one")
    if outcome.kept and not (folder / COURSE_FILE).exists():
        in_the_way = folder / outcome.kept[0]
        raise UsageError(f"{in_the_way} is in the way: choose another folder")
    for name in outcome.new + outcome.updated:
        copy(ours[name].read_bytes(), folder / name)
        copies[name] = version_of(ours[name])
    if copies != read_copies(folder):
        write_copies(folder, copies)
    link_package(folder)
    return outcome


def course_files():
    """The files for a course folder, {"lessons/04_ddp.ipynb": path}."""
    found = {}
    for kind in ("lessons", "exercises", "clusters"):
        there = folders.originals(kind)
        for path in sorted(there.rglob("*")):
            name = path.relative_to(there)
            if path.is_file() and not any(part[0] in "._" for part in name.parts):
                found[f"{kind}/{name.as_posix()}"] = path
    return found | {"AGENTS.md": TUTOR} if found else {}


def version_of(path):
    """The version of a file, a hash: of a notebook's sources, or else of its bytes.

    Outputs do not count, nor do empty cells: JupyterLab adds one below the last cell
    that is run. None for a file that cannot be read.
    """
    try:
        content = content_of(path)
    except Unusable:
        return None
    with suppress(
        ValueError, KeyError, TypeError, RecursionError
    ):  # if it is not a notebook
        cells = json.loads(content)["cells"]
        sources = [[cell["cell_type"], "".join(cell["source"])] for cell in cells]
        content = json.dumps([cell for cell in sources if cell[1].strip()]).encode()
    return hashlib.sha256(content).hexdigest()


def read_copies(folder):
    """Which version of the course each copy came from, {name: version}. {} if the
    record cannot be read; start() then keeps all changed files.
    """
    try:
        copies = json_of(folder / COURSE_FILE)["copies"]
        return {str(name): str(version) for name, version in copies.items()}
    except (Unusable, KeyError, TypeError, AttributeError):
        return {}


def write_copies(folder, copies):
    text = json.dumps({"copies": copies}, indent=2) + "\n"
    write_atomically(folder / COURSE_FILE, text)


def copy(content, target):
    """Write a file of the course into a course folder, trusted by Jupyter."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {target.parent}: {error.strerror}") from None
    write_atomically(target, content)
    if target.suffix == ".ipynb":
        trust(target)


def trust(path):
    """Sign a notebook, so that Jupyter shows the pictures that are stored in it. If
    signing fails, Jupyter shows each picture after its cell has run.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    with suppress(Exception):
        NotebookNotary().sign(nbformat.read(path, as_version=4))


def link_package(folder):
    """Make ddp_course/ a link to the package, if the system allows links: for the file
    browser, and for `torchrun ddp_course/lesson04.py`.
    """
    link = folder / "ddp_course"
    with suppress(OSError):
        if link.is_symlink() and link.resolve() != folders.PACKAGE:
            link.unlink()  # to another installation
        if not os.path.lexists(link):
            link.symlink_to(folders.PACKAGE, target_is_directory=True)


def tell(folder, outcome):
    """What start() did, as lines for the learner; [] if there was nothing to do."""
    done = [f"{len(outcome.new)} new files"] if outcome.new else []
    done += [f"{len(outcome.updated)} brought up to date"] if outcome.updated else []
    copies = f"Your copies of the course are in {os.path.relpath(folder)}"
    lines = [f"{copies}: {', '.join(done)}."] if done else []
    for name in outcome.kept:
        path = os.path.relpath(folder / name)
        lines.append(
            f"{path} is kept as you changed it. The course has a newer version: "
            f"`ddp-course reset {path}` gets it, and keeps yours in runs/backups/."
        )
    return lines


def bring_back(which):
    """Restore the original of a copy; return its path, and the path where the learner's
    version is kept, or None if there was none.

    which: the number of an exercise, or the path of any copy. Raises UsageError if the
    course has no such file, or if the learner's version cannot be kept.
    """
    folder = folders.learner_folder()
    if not ((folder / COURSE_FILE).is_file() or is_checkout(folder)):
        raise UsageError(f"this is not a course folder: {folders.MAKE_ONE}")
    name = name_of_copy(folder, which)
    target, kept = folder / name, None
    content = as_at_first(name, target)
    if os.path.lexists(target):
        kept = keep(target, folder / "runs" / "backups")
    copy(content, target)
    if (folder / COURSE_FILE).is_file():
        write_copies(folder, read_copies(folder) | {name: version_of(target)})
    return target, kept


def name_of_copy(folder, which):
    """The name of the copy that the learner means, such as "lessons/04_ddp.ipynb"."""
    if len(which) <= 2:
        solutions = exercises.notebooks("solutions")
        solution = folders.find(solutions, which, "exercise")
        return f"exercises/{exercises.exercise_name(solution)}"
    name = Path(os.path.relpath(which, folder)).as_posix()
    if name not in course_files():
        raise UsageError(f"{which} is not a copy of a file of the course")
    return name


def as_at_first(name, target):
    """The original content of a file of the course, bytes. In a checkout without work/
    the learner's exercise is the course's own: it is generated again from its solution.
    """
    original = course_files().get(name)
    if original and not (target.exists() and target.samefile(original)):
        return original.read_bytes()
    for solution in exercises.notebooks("solutions").values():
        if name == f"exercises/{exercises.exercise_name(solution)}":
            exercise = exercises.released(exercises.read(solution))
            return exercises.as_text(exercise).encode()
    raise UsageError(
        f"{name} is the course's own file: `git restore {name}` brings it back"
    )


def keep(path, backups):
    """Copy a file into a folder of backups; return the copy's path."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    backup = backups / f"{path.stem}-{now}{path.suffix}"
    try:
        backups.mkdir(parents=True, exist_ok=True)
        backup.write_bytes(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot keep yours in {backup}: {error.strerror}") from None
    return backup
