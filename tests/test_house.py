"""How the package is laid out: what a newcomer sees in it, and who imports whom."""

import ast
import re
import subprocess

import pytest
from conftest import COURSE

PACKAGE = COURSE / "ddp_course"
# Which rooms a room may import from, besides its own; `front` is the lessons, and what
# is beside them in the package: runs.py, files.py, flags.py, folders.py.
LOWER = {"ranks", "data", "models", "checkpoints", "estimates", "detectors"}
ALLOWED = {
    "ranks": set(),
    "data": {"ranks", "front"},
    "models": {"data"},
    "checkpoints": {"ranks", "front"},
    "estimates": {"ranks", "models"},
    "detectors": {"front"},
    "front": LOWER,
    "notebook": {"ranks", "estimates", "detectors", "front"},
    "judge": {"ranks", "notebook", "front"},
    "checks": LOWER | {"front", "judge"},
    "cli": {"ranks", "data", "estimates", "front", "judge"},
}
ROOMS = sorted(set(ALLOWED) - {"front"})
# at the front, besides the lessons; the first three import no lesson and no room
SMALL = ["files.py", "flags.py", "folders.py", "runs.py"]


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
        lesson = re.match(r"lesson\d\d", other)
        wrong = [
            room_of(other) not in ALLOWED[room] | {room},
            lesson and (name in SMALL or room in LOWER),
            lesson and name.startswith("lesson") and lesson[0] >= name[:8],
            other.startswith("runs") and (name in SMALL or room in LOWER),
            room_of(other) != "front" and name in SMALL[:3],
        ]
        if any(wrong):
            yield other


def test_at_the_front_are_the_lessons_and_behind_them_the_rooms():
    front = {name.split("/")[0] for name in tracked()}
    lessons = {name for name in front if re.fullmatch(r"lesson\d\d\.py", name)}
    assert front - lessons == {"__init__.py", *SMALL, *ROOMS}
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
        ("lesson04.py", "import ddp_course.judge.answer", "judge.answer"),
        ("runs.py", "from ddp_course.lesson01 import main", "lesson01.main"),
        ("files.py", "from ddp_course.ranks import gpus", "ranks.gpus"),
        ("ranks/launch.py", "from ddp_course import runs", "runs"),
        ("data/text.py", "import ddp_course.models.gpt", "models.gpt"),
        ("data/text.py", "from ddp_course import lesson10", "lesson10"),
        ("checkpoints/whole.py", "from ddp_course.runs import start", "runs.start"),
        ("judge/answer.py", "from ddp_course.checks import ex02", "checks.ex02"),
        ("judge/answer.py", "from ddp_course.cli import lab", "cli.lab"),
        (
            "checks/ex02/ring.py",
            "from ddp_course.notebook import plots",
            "notebook.plots",
        ),
        ("notebook/magics.py", "from ddp_course.cli import x", "cli.x"),
    ],
)
def test_an_import_that_runs_the_other_way_is_found(name, planted, wrong):
    text = (PACKAGE / name).read_text()
    assert list(wrong_ways(name, f"{text}\n{planted}\n")) == [wrong]


def circles(imports):
    """The modules that import each other, directly or by way of others.

    imports: {module: those that it imports}.
    """
    reached = {module: set(others) for module, others in imports.items()}
    for way in imports:  # S. Warshall, "A theorem on Boolean matrices", 1962
        for module in imports:
            if way in reached[module]:
                reached[module] |= reached[way]
    return sorted(module for module in imports if module in reached[module])


def modules_of(names):
    """{module: those of the course that it imports}, lazily or not."""
    known = {name.removesuffix(".py").replace("/", "."): name for name in names}
    imports = {}
    for module, name in known.items():
        found = set()
        for other in imported_by(ast.parse((PACKAGE / name).read_text())):
            while other and other not in known:
                other = other.rpartition(".")[0]
            found.add(other)
        imports[module] = found - {""}
    return imports


def test_no_two_files_and_no_two_rooms_import_each_other():
    imports = modules_of(MODULES)
    assert circles(imports) == []
    rooms = {room: set() for room in ROOMS}
    for module, others in imports.items():
        if room_of(module) in rooms:
            rooms[room_of(module)] |= {room_of(other) for other in others}
    rooms = {room: others - {room, "front"} for room, others in rooms.items()}
    assert circles({room: others & set(ROOMS) for room, others in rooms.items()}) == []


def test_a_circle_is_found():
    imports = modules_of(MODULES)
    imports["ranks.store"].add("ranks.launch")
    assert circles(imports) == ["ranks.launch", "ranks.store"]


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


def test_the_dear_tests_are_there():
    """A name that no test has any more would leave a dear one in `make test`."""
    lines = (COURSE / "tests" / "dear.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert names == sorted(set(names))
    for name in names:
        file, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (COURSE / file).read_text(), name
