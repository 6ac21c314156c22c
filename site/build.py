"""Build the site: python site/build.py

The pages are gathered in site/_build/source from what is stored in the course, and then
made by Sphinx in site/_build/html. Nothing is executed, and any warning is an error.
DDP_COURSE_REPOSITORY is the repository's address, such as https://github.com/NAME/COURSE.
Without it, the pages have no links to the repository and none to Colab or Kaggle.
"""

import os
import shutil
import sys
from pathlib import Path

import failures
import front
import lessons
import reference
from course import ROOT, Course

HERE = Path(__file__).parent
BUILT = HERE / "_build"


def gather(course, folder):
    """Write the sources of all pages into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for kind in ("lessons", "exercises"):
        for path in course.notebooks(kind).values():
            lessons.write(path, course, folder)
    failures.write(course, folder)
    reference.write(course, folder)
    front.write(course, folder)


def make(folder, html):
    """Make the site from its sources with Sphinx. Returns 0 if there was no warning."""
    from sphinx.cmd.build import main

    trees = folder.parent / "doctrees"
    options = ["-q", "-W", "--keep-going", "-E", "-c", str(HERE), "-d", str(trees)]
    return main([*options, str(folder), str(html)])


def build(course, built):
    """Build the site into `html` of a folder. Returns 0 if there was no warning."""
    html = built / "html"
    shutil.rmtree(html, ignore_errors=True)
    gather(course, built / "source")
    return make(built / "source", html)


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))  # the reference is of this checkout's package
    os.environ["COLUMNS"] = "88"  # of what programs print for --help
    course = Course.of_the_environment()
    if not course.repository:
        print("DDP_COURSE_REPOSITORY is not set: no links to a repository, Colab, Kaggle.")
    code = build(course, BUILT)
    pages = len(list((BUILT / "html").rglob("*.html")))
    print(f"{pages} pages: {os.path.relpath(BUILT / 'html' / 'index.html')}")
    sys.exit(code)
