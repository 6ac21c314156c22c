"""Which folders the command works on: the course's own notebooks, and the learner's."""

from pathlib import Path

from ddp_course import COURSE_FILE, UsageError, project_folder

PACKAGE = Path(__file__).resolve().parent  # ddp_course/


def originals(kind):
    """The course's own `lessons`, `exercises`, `solutions` or `clusters`: the checkout's
    folder, or the copy that a wheel has installed with the package.
    """
    installed = PACKAGE / "cli" / "course"
    return (installed if installed.is_dir() else PACKAGE.parent) / kind


def learner_folder():
    """The folder with the learner's exercises and progress: the current course folder.
    In a checkout, it is work/ if that is a course folder, or else the checkout itself.
    """
    here = project_folder()
    work = here / "work"
    return work if (work / COURSE_FILE).is_file() else here


def programs():
    """The lessons' programs, {"01": path}. In a course folder, the paths go through its
    link `ddp_course`, which keeps them short.
    """
    link = project_folder() / "ddp_course"
    package = link if link.is_dir() and link.samefile(PACKAGE) else PACKAGE
    return {
        path.stem.removeprefix("lesson"): path
        for path in sorted(package.glob("lesson[0-9][0-9].py"))
    }


def notebooks(folder):
    """The numbered notebooks in a folder, {"01": path}."""
    return {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}


def find(paths, number, kind="lesson"):
    """The path of a lesson or an exercise by its number, with or without the leading
    zero.
    """
    number = number.zfill(2)
    if number not in paths:
        choice = f"choose one of {', '.join(paths)}" if paths else MAKE_ONE
        raise UsageError(f"there is no {kind} {number}: {choice}")
    return paths[number]


MAKE_ONE = "`ddp-course start FOLDER` makes a course folder to work in"
