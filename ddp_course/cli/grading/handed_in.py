"""Learners' notebooks, found and read as data: whatever a file is, it costs one line.

A submission may hold anything: links to other files, pipes, devices, folders in place
of files, gigabytes. Only regular files below a size are opened, and nothing follows a
link.
"""

import errno
import json
import os
import stat
import sys
from pathlib import Path

from ddp_course import UsageError, folders
from ddp_course.cli import exercises

LARGEST = 32 * 2**20  # bytes of a notebook
DEEPEST = 12  # folders within folders
MOST_CELLS = 2_000


def submissions(path):
    """The notebooks to grade under a path: {submission: {"01": notebook path}}.

    path: a notebook, a folder of notebooks, or a folder with one folder per person. A
    person's folder without notebooks has handed in nothing: {}. Hidden folders and
    links do not count. Raises UsageError if nothing is found.
    """
    path = Path(path)
    if path.is_symlink():
        raise UsageError(f"{path} is a link: give the folder that it leads to")
    if not path.exists():
        raise UsageError(f"there is nothing at {path}")
    if not path.is_dir():
        number = path.name[:2]
        if number not in exercises.notebooks("solutions"):
            raise UsageError(f"{path}: there is no exercise {number}")
        return {path.parent.name or "submission": {number: path}}
    found = {folder: notebooks_in(folder) for folder in folders_in(path)}
    full = [folder for folder, notebooks in found.items() if notebooks]
    if not full:
        raise UsageError(f"no exercise notebooks (NN_*.ipynb) in {path}")
    people = [] if found[path] else [each for each in found if each.parent == path]
    empty = [
        folder
        for folder in people
        if not any(other.is_relative_to(folder) for other in full)
    ]
    named = {}
    for folder, notebooks in found.items():
        if notebooks or folder in empty:
            own = folder.resolve().name if folder == path else folder.relative_to(path)
            named[unused(printable(own), named)] = notebooks
    return named


def folders_in(path):
    """A folder and those within it, sorted, without links and without the folders that
    belong to programs: Jupyter's .ipynb_checkpoints, a Mac's __MACOSX.
    """
    found, waiting = [], [path]
    while waiting:
        folder = waiting.pop()
        found.append(folder)
        for entry in entries(folder):
            inner = folder / entry.name
            if entry.name.startswith((".", "__")) or is_named_as_notebook(entry.name):
                continue
            if entry.is_symlink():
                say_left_out(inner, "it is a link")
            elif entry.is_dir(follow_symlinks=False):
                if len(inner.relative_to(path).parts) > DEEPEST:
                    say_left_out(inner, "too many folders within folders")
                else:
                    waiting.append(inner)
    return sorted(found)


def entries(folder):
    """What is in a folder, sorted by name; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        say_left_out(folder, error.strerror)
        return []


def is_named_as_notebook(name):
    return name[:2].isdecimal() and name[2:3] == "_" and name.endswith(".ipynb")


def notebooks_in(folder):
    """The exercise notebooks directly in a folder, {"01": path}. One line on stderr
    names each that is left out.

    If several have the same number, the one with the course's own name counts, or else
    the first by name.
    """
    course, found = exercises.notebooks("solutions"), {}
    ours = {exercises.exercise_name(path) for path in course.values()}
    names = [
        entry.name for entry in entries(folder) if is_named_as_notebook(entry.name)
    ]
    for name in sorted(names, key=lambda name: (name not in ours, name)):
        number, file = name[:2], folder / name
        if number not in course:
            say_left_out(file, f"there is no exercise {number}")
        elif number in found:
            say_left_out(file, f"{printable(found[number].name)} counts")
        else:
            found[number] = file
    return dict(sorted(found.items()))


def say_left_out(path, why):
    print(f"left out: {printable(path)}, {why}", file=sys.stderr)


def printable(path):
    """A path as text that any terminal and file can take: names need not be UTF-8.
    Two colons would begin a command in a log of GitHub's.
    """
    text = os.fsencode(path).decode("utf-8", errors="replace").replace("::", ":_")
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def unused(name, taken):
    """A name that is not taken yet."""
    numbered = (f"{name} ({number})" for number in range(2, len(taken) + 3))
    return next(each for each in (name, *numbered) if each not in taken)


def read(path):
    """The cells of a notebook that somebody handed in. Raises UsageError, in one line,
    if it is none.
    """
    content = content_of(path)
    try:
        return cells_of(content)
    except UsageError as error:
        raise UsageError(f"{printable(path)} is not read: {error}") from None
    except ValueError:
        pass
    raise UsageError(exercises.damage(path))


def content_of(path):
    """The bytes of a regular file. Raises UsageError for anything else."""
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)  # some systems lack some of them
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise UsageError(f"there is no notebook {printable(path)}") from None
        why = "is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{printable(path)} is not a notebook: {why}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{printable(path)} is not a notebook: no regular file")
    with open(descriptor, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        limit = f"it is larger than {LARGEST // 2**20} MB. Clear its outputs"
        raise UsageError(f"{printable(path)} is not read: {limit}")
    return content


def cells_of(content):
    """The cells of a notebook's file, as nbformat's nodes, without their outputs.

    It takes what Jupyter takes, and what other tools write: a byte order mark, cells
    without metadata or ids, format 3. Raises ValueError if it is no notebook.
    """
    from nbformat import NotebookNode

    try:
        document = json.loads(content.decode("utf-8-sig"))
        sheets = document.get("worksheets", [document])
        if sum(len(sheet["cells"]) for sheet in sheets) > MOST_CELLS:
            raise UsageError(f"it has more than {MOST_CELLS} cells")
        return [
            NotebookNode(
                cell_type=str(cell["cell_type"]),
                source=text_of(cell["source"] if "source" in cell else cell["input"]),
                id=cell.get("id"),
                metadata=NotebookNode(metadata_of(cell)),
            )
            for sheet in sheets
            for cell in sheet["cells"]
        ]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a notebook: {error}") from None


def text_of(source):
    """A source, which may be stored as a list of its lines."""
    lines = [source] if isinstance(source, str) else source
    return "".join(lines)


def metadata_of(cell):
    """What counts of a cell's metadata: its tags, and its id."""
    metadata = cell.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    tags = metadata.get("tags")
    tags = [str(tag) for tag in tags] if isinstance(tags, list) else []
    return {"tags": tags, "id": metadata.get("id")}


def is_own(path):
    """Whether a path is the learner's own working folder, or within it."""
    own = folders.learner_folder() / "exercises"
    return Path(path).resolve().is_relative_to(own.resolve())
