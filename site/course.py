"""The course's files, and where its repository is."""

import os
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = "[0-9][0-9]_*.ipynb"


class Course:
    """The files that pages are made from.

    root: the checkout. repository: its address, such as https://github.com/NAME/COURSE,
    or "" if it has none yet. branch: the one that links lead to.
    """

    def __init__(self, root=ROOT, repository="", branch="main"):
        self.root = Path(root)
        self.repository = repository.rstrip("/").removesuffix(".git")
        self.branch = branch

    @classmethod
    def of_the_environment(cls):
        """The course with the repository that DDP_COURSE_REPOSITORY names."""
        repository = os.environ.get("DDP_COURSE_REPOSITORY", "")
        return cls(ROOT, repository, os.environ.get("DDP_COURSE_BRANCH") or "main")

    def notebooks(self, kind):
        """The `lessons` or `exercises`, {"01": path}."""
        return {
            path.name[:2]: path for path in sorted(self.root.glob(f"{kind}/{NUMBERED}"))
        }

    def programs(self):
        """The lessons' programs, {"01": path}."""
        found = sorted(self.root.glob("ddp_course/lesson[0-9][0-9].py"))
        return {path.stem.removeprefix("lesson"): path for path in found}

    def page_of(self, path):
        """The page that shows a file, a path in the site's sources; None if none does."""
        name = path.relative_to(self.root).as_posix()
        shown = re.fullmatch(r"(lessons|exercises)/\d\d_\w+\.ipynb", name)
        if shown and path.exists():
            return Path(name)
        if path in self.programs().values():
            return Path("programs", f"{path.stem}.md")
        return None

    def in_the_repository(self, path):
        """The address of a file in the repository; None if that has no address."""
        name = path.relative_to(self.root).as_posix()
        kind = "tree" if path.is_dir() else "blob"
        return self.repository and f"{self.repository}/{kind}/{self.branch}/{name}"

    def services(self, path):
        """Where a notebook can be opened without installing anything, {name: address}.

        They take notebooks from github.com only: {} for other repositories.
        """
        home = "https://github.com/"
        if not self.repository.startswith(home):
            return {}
        name = self.repository.removeprefix(home)
        place = f"{name}/blob/{self.branch}/{path.relative_to(self.root).as_posix()}"
        return {
            "Colab": f"https://colab.research.google.com/github/{place}",
            "Kaggle": f"https://kaggle.com/kernels/welcome?src={home}{place}",
            "Codespaces": f"https://codespaces.new/{name}/tree/{self.branch}",
        }


def read(path):
    """A notebook."""
    return nbformat.read(path, as_version=4)


def title_of(notebook):
    """The first line of a notebook, without its #."""
    return notebook.cells[0].source.splitlines()[0].removeprefix("# ").strip()
