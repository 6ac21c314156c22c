"""How the package is laid out: what a newcomer sees in it, and who imports whom."""

import ast
import re
import subprocess

import pytest
from conftest import COURSE

PACKAGE = COURSE / "ddp_course"
ROOMS = ["checks", "notebook", "ranks", "scenery", "school"]
# Which rooms a room may import from, besides its own; `front` is the lessons and runs.py.
ALLOWED = {
    "ranks": set(),
    "scenery": set(),
    "front": {"ranks", "scenery"},
    "notebook": {"ranks", "scenery", "front"},
    "checks": {"ranks", "scenery", "front", "school"},
    "school": {"ranks", "scenery", "front", "notebook", "checks"},
}


def tracked():
    """The package's files, as git knows them, relative to it."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "ddp_course"]
    listed = subprocess.run(command, cwd=COURSE, capture_output=True, text=True).stdout
    names = [name.removeprefix("ddp_course/") for name in listed.split()]
    return [name for name in names if (PACKAGE / name).exists()]


MODULES = [name for name in tracked() if name.endswith(".py")]


def room_of(name):
    """The room of a file, `lesson04.py`, or of a module, `ranks.launch`."""
    first = re.split(r"[/.]", name)[0]
    return first if first in ROOMS else "front"


def imported_by(tree):
    """The modules of the course that a file imports, as `ranks.launch` or `lesson04`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("ddp_course."):
                yield name.removeprefix("ddp_course.")


SHARED = {"UsageError", "project_folder", "__version__"}  # what __init__.py defines


def wrong_ways(name, text):
    """The imports of a file that run against the direction of the house."""
    room = room_of(name)
    for other in imported_by(ast.parse(text)):
        if other.split(".")[0] in SHARED:
            continue
        if room_of(other) != room and room_of(other) not in ALLOWED[room]:
            yield other
        lesson = re.match(r"lesson\d\d", other)
        if name == "runs.py" and lesson:
            yield other
        if name.startswith("lesson") and lesson and lesson[0] >= name[:8]:
            yield other


def test_at_the_front_are_the_lessons_and_behind_them_five_rooms():
    front = {name.split("/")[0] for name in tracked()}
    lessons = {name for name in front if re.fullmatch(r"lesson\d\d\.py", name)}
    assert front - lessons == {"__init__.py", "runs.py", *ROOMS}
    numbers = sorted(int(name[6:8]) for name in lessons)
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way(name):
    assert not list(wrong_ways(name, (PACKAGE / name).read_text()))


@pytest.mark.parametrize(
    "name, planted, wrong",
    [
        ("lesson04.py", "from ddp_course import lesson05", "lesson05"),
        ("lesson04.py", "from ddp_course.lesson04 import load", "lesson04.load"),
        ("lesson04.py", "import ddp_course.school.judge", "school.judge"),
        ("runs.py", "from ddp_course.lesson01 import main", "lesson01.main"),
        ("ranks/launch.py", "from ddp_course import runs", "runs"),
        ("scenery/text.py", "import ddp_course.ranks.launch", "ranks.launch"),
        (
            "checks/ex02/ring.py",
            "from ddp_course.notebook import plots",
            "notebook.plots",
        ),
        ("notebook/magics.py", "from ddp_course.school import x", "school.x"),
    ],
)
def test_an_import_that_runs_the_other_way_is_found(name, planted, wrong):
    text = (PACKAGE / name).read_text()
    assert list(wrong_ways(name, f"{text}\n{planted}\n")) == [wrong]


def patched(text):
    """What a program sets in modules that it imports: `accelerate.utils.other.x = ...`."""
    tree, modules = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules.add((alias.asname or alias.name).split(".")[0])
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign) else []:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and getattr(root, "id", None) in modules:
                yield ast.unparse(target)
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "setattr" and getattr(node.args[0], "id", None) in modules:
            yield ast.unparse(node)


# DeepSpeed's table of what it may compile. Without this it compiles collectives of its
# own for CPUs, which takes a compiler and a minute, and gloo has them already.
NEEDED = ["deepspeed.ops.__compatible_ops__['deepspeed_shm_comm']"]
PROGRAMS = [name for name in MODULES if re.fullmatch(r"(lesson\d\d|runs)\.py", name)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_patches_a_library(name):
    text = (PACKAGE / name).read_text()
    found = [what for what in patched(text) if not what.startswith("os.environ")]
    assert [what for what in found if what not in NEEDED] == []
    planted = "\nimport accelerate.utils\naccelerate.utils.x = 1\n"
    assert "accelerate.utils.x" in list(patched(text + planted))
    planted = "\nimport sys\nsys.modules['bitsandbytes'] = None\n"
    assert "sys.modules['bitsandbytes']" in list(patched(text + planted))
