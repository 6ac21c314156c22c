"""Make the site: python site/make.py [FOLDER]

The pages are gathered in `source` of the folder, site/_build unless given, from what is
stored in the course. Sphinx makes them into `html`. Nothing is executed, and a warning
is an error, as are links that lead nowhere, images without alternative text, and
requests to other hosts.

DDP_COURSE_REPOSITORY is the repository's address, such as https://github.com/NAME/COURSE.
Without it, the pages have no links to the repository and none to Colab or Kaggle.
"""

import os
import shutil
import sys
from pathlib import Path

import failure_pages
import front
import inspection
import notebook_pages
import reference
from course import ROOT, Course

HERE = Path(__file__).parent


def gather(course, folder):
    """Write the sources of all pages into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for kind in ("lessons", "exercises"):
        for path in course.notebooks(kind).values():
            notebook_pages.write(path, course, folder)
    failure_pages.write(course, folder)
    reference.write(course, folder)
    front.write(course, folder)


def render(source, html):
    """Make HTML of the sources with Sphinx. Returns 0 if there was no warning."""
    from sphinx.cmd.build import main

    shutil.rmtree(html, ignore_errors=True)
    trees = source.parent / "doctrees"
    options = ["-q", "-W", "--keep-going", "-E", "-c", str(HERE), "-d", str(trees)]
    return main([*options, str(source), str(html)])


def make(course, folder):
    """Make the site in a folder. Returns an exit code, and prints what is wrong."""
    gather(course, folder / "source")
    code = render(folder / "source", folder / "html")
    problems = inspection.problems(folder / "html")
    for problem in problems:
        print(problem, file=sys.stderr)
    pages = len(inspection.pages_in(folder / "html"))
    print(f"{pages} pages: {os.path.relpath(folder / 'html' / 'index.html')}")
    return code or bool(problems)


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))  # the reference is of this checkout's package
    os.environ["COLUMNS"] = "88"  # of what programs print for --help
    course = Course.of_the_environment()
    if not course.repository:
        print(
            "DDP_COURSE_REPOSITORY is not set: no links to a repository, Colab, Kaggle."
        )
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "_build"
    sys.exit(make(course, folder.absolute()))
