"""`ddp-course start`: copies to work on, and the course outside of its checkout, from a
wheel.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import typer
from conftest import COLAB, COURSE, no_network, python, remember_that_there_is_no_mnist
from filelock import FileLock
from nbformat.sign import NotebookNotary

from ddp_course import COURSE_FILE, folders, project_folder
from ddp_course.cli import exercises, start
from ddp_course.cli.command import app

LESSON, EXERCISE = "lessons/04_ddp.ipynb", "exercises/04_exercise_ddp.ipynb"
PROGRAM = "lessons/standalone/train_ddp.py"


@pytest.fixture(autouse=True, scope="module")
def jupyter_of_its_own(tmp_path_factory):
    """Notebooks that tests sign are remembered elsewhere than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))
        yield


def contents(folder):
    """What a folder holds, {name: bytes}, without what is behind links."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit(path, text="\nmine = 1", outputs=()):
    """Change a notebook as a person does who works on it in JupyterLab."""
    notebook = exercises.read(path)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.source += text
    cell.outputs = [nbformat.v4.new_output("stream", text=line) for line in outputs]
    cell.execution_count = 7
    notebook.cells.append(nbformat.v4.new_code_cell(""))
    nbformat.write(notebook, path)


# ---- copies ----


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """A checkout of a course to come: what tests change in it is newer."""
    folder = tmp_path / "newer"
    for part in ("lessons", "exercises", "solutions", "clusters"):
        shutil.copytree(COURSE / part, folder / part)
    (folder / "ddp_course").mkdir()
    monkeypatch.setattr(folders, "PACKAGE", folder / "ddp_course")
    return folder


@pytest.fixture
def mine(newer, tmp_path, monkeypatch):
    """A learner's course folder, with copies of that course before it was changed."""
    folder = tmp_path / "mine"
    start.start(folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_course_folder_has_copies_of_all_lessons_and_exercises(tmp_path):
    outcome = start.start(tmp_path)
    ours = {
        f"{kind}/{name}": content
        for kind in ("lessons", "exercises", "clusters")
        for name, content in contents(COURSE / kind).items()
        if not re.search(r"(^|/)[._]", name)
    }
    assert {LESSON, EXERCISE} < set(ours)
    ours["AGENTS.md"] = (COURSE / "ddp_course" / "cli" / "tutor.md").read_bytes()
    found = contents(tmp_path)
    assert set(found) == {*ours, COURSE_FILE} and found.items() > ours.items()
    assert sorted(ours) == sorted(outcome.new)
    assert not outcome.updated and not outcome.kept
    assert (tmp_path / "ddp_course" / "lesson04.py").samefile(
        COURSE / "ddp_course" / "lesson04.py"
    )


def test_assistants_are_asked_to_explain_and_to_leave_the_answers_to_the_learner(mine):
    """With commands that exist."""
    page = (mine / "AGENTS.md").read_text()
    assert "Do not write an answer" in page and "Do not open the solutions" in page
    commands = set(re.findall(r"`ddp-course (\w+)", page))
    assert {"hint", "check"} <= commands <= set(typer.main.get_command(app).commands)
    (mine / "AGENTS.md").write_text("my own rules")
    assert "AGENTS.md" not in start.start(mine).updated
    assert (mine / "AGENTS.md").read_text() == "my own rules"


def test_started_again_it_has_nothing_to_do(tmp_path):
    start.start(tmp_path)
    before = contents(tmp_path)
    assert start.start(tmp_path) == start.Outcome([], [], [])
    assert contents(tmp_path) == before


def test_what_the_learner_has_not_changed_is_brought_up_to_date(mine, newer):
    """Having been run, and having an empty cell below the last, is no change."""
    edit(mine / LESSON, text="", outputs=["loss 0.1\n"])
    for name in (LESSON, EXERCISE):
        edit(newer / name, text="\n# newer")
    (newer / PROGRAM).write_text("newer = True")
    (newer / "lessons" / "14_new.ipynb").write_bytes((newer / LESSON).read_bytes())
    outcome = start.start(mine)
    assert set(outcome.updated) == {LESSON, EXERCISE, PROGRAM} and not outcome.kept
    assert outcome.new == ["lessons/14_new.ipynb"]
    for name in (LESSON, EXERCISE, PROGRAM, "lessons/14_new.ipynb"):
        assert (mine / name).read_bytes() == (newer / name).read_bytes()
    assert start.start(mine) == start.Outcome([], [], [])


def test_outputs_of_a_run_stay_while_the_course_has_nothing_newer(mine):
    edit(mine / LESSON, text="", outputs=["loss 0.1\n"])
    before = contents(mine)
    assert start.start(mine) == start.Outcome([], [], [])
    assert contents(mine) == before


def test_what_the_learner_has_changed_is_kept_and_the_fix_is_named_in_one_line(
    mine, newer
):
    changed = [LESSON, EXERCISE, PROGRAM]
    for name in changed[:2]:
        edit(mine / name)
        edit(newer / name, text="\n# newer")
    (mine / PROGRAM).write_text("mine")
    (newer / PROGRAM).write_text("newer")
    before = contents(mine)
    outcome = start.start(mine)
    assert sorted(outcome.kept) == sorted(changed)
    assert not outcome.new and not outcome.updated and contents(mine) == before
    lines = start.tell(mine, outcome)
    assert len(lines) == 3
    for line, name in zip(lines, outcome.kept):
        assert line.startswith(f"{name} is kept as you changed it. ")
        assert f"`ddp-course reset {name}`" in line

    for name in outcome.kept:
        assert command_line("reset", name).returncode == 0
    kept = contents(mine / "runs" / "backups").values()
    assert sorted(kept) == sorted(before[name] for name in changed)
    assert (mine / LESSON).read_bytes() == (newer / LESSON).read_bytes()
    assert start.start(mine) == start.Outcome([], [], [])
    edit(newer / LESSON, text="\n# newer still")
    assert start.start(mine).updated == [LESSON]


def test_a_copy_that_was_deleted_comes_back(mine):
    (mine / LESSON).unlink()
    assert start.start(mine).new == [LESSON] and (mine / LESSON).is_file()


@pytest.mark.parametrize("record", ["", "{", "[]", '{"copies": {"lessons": 1}}'])
def test_where_nobody_knows_what_was_copied_the_learners_files_stay(
    record, mine, newer
):
    edit(mine / LESSON)
    edit(newer / EXERCISE, text="\n# newer")
    before = contents(mine)
    (mine / COURSE_FILE).write_text(record)
    assert set(start.start(mine).kept) == {LESSON, EXERCISE}
    del before[COURSE_FILE]
    assert contents(mine).items() > before.items()


def test_an_interrupted_start_can_be_repeated(tmp_path, monkeypatch):
    """Planted: Ctrl-C after ten files."""
    copied = []

    def interrupted(content, target):
        if len(copied) == 10:
            raise KeyboardInterrupt
        copied.append(target)
        copy(content, target)

    copy = start.copy
    monkeypatch.setattr(start, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start.start(tmp_path)
    assert not project_folder_is(tmp_path)
    monkeypatch.setattr(start, "copy", copy)
    outcome = start.start(tmp_path)
    assert outcome.new and not outcome.kept and project_folder_is(tmp_path)
    assert start.start(tmp_path) == start.Outcome([], [], [])


def project_folder_is(folder):
    return (
        python(
            "-c",
            "import ddp_course; print(ddp_course.project_folder())",
            cwd=folder / "lessons",
        ).stdout
        == f"{folder}\n"
    )


# ---- what cannot be done ----


def command_line(*arguments):
    """What the command says and ends with, in this process."""
    from test_exercises import ddp_course

    return ddp_course(*map(str, arguments))


def refused(folder):
    """The one line with which `ddp-course start FOLDER` refuses."""
    done = command_line("start", folder)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    return done.stderr.removeprefix("ddp-course: ").rstrip()


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    """What begins with a dot, such as a venv or a repository of git, is no other thing."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    assert refused(tmp_path) == (
        f"{tmp_path} holds other things, notes.txt for one: choose a new folder, or an "
        "empty one"
    )
    assert contents(tmp_path) == before
    (tmp_path / "notes.txt").unlink()
    assert start.start(tmp_path).new
    (tmp_path / "notes.txt").write_text("mine")  # later, they may come
    assert start.start(tmp_path) == start.Outcome([], [], [])


def test_a_file_of_another_kind_in_our_place_is_in_the_way(tmp_path):
    (tmp_path / "lessons").mkdir()
    theirs = tmp_path / LESSON
    theirs.write_text("mine")
    before = contents(tmp_path)
    assert refused(tmp_path) == f"{theirs} is in the way: choose another folder"
    assert contents(tmp_path) == before


def test_a_file_in_place_of_a_folder_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file").endswith("/file/lessons: Not a directory")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "lessons").touch()
    assert "folder holds other things, lessons for one" in refused(tmp_path / "folder")


def test_a_checkout_is_no_course_folder():
    before = subprocess.run(["git", "status"], cwd=COURSE, capture_output=True).stdout
    assert refused(COURSE) == (
        f"{COURSE} is a checkout of the course: `ddp-course lab` makes work/ in it"
    )
    after = subprocess.run(["git", "status"], cwd=COURSE, capture_output=True).stdout
    assert before == after


def test_a_course_without_its_lessons_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "PACKAGE", tmp_path / "ddp_course")
    assert refused(tmp_path / "mine").startswith("the course is installed without its")


@pytest.mark.parametrize(
    "which, line",
    [
        ("lessons/99_none.ipynb", "lessons/99_none.ipynb is not a copy of a file"),
        ("../newer", "../newer is not a copy of a file of the course"),
        ("99", "there is no exercise 99: choose one of 01"),
    ],
)
def test_what_is_no_copy_cannot_be_reset(which, line, mine):
    before = contents(mine)
    done = command_line("reset", which)
    assert done.returncode == 2 and done.stderr.startswith(f"ddp-course: {line}")
    assert contents(mine) == before


def test_reset_works_on_course_folders_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command_line("reset", "03")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr == (
        "ddp-course: this is not a course folder: "
        "`ddp-course start FOLDER` makes a course folder to work in\n"
    )


def test_in_a_checkout_the_courses_own_lesson_is_left_to_git(newer, monkeypatch):
    monkeypatch.chdir(newer)
    edit(newer / LESSON)
    before = contents(newer)
    done = command_line("reset", LESSON)
    assert done.returncode == 2 and f"`git restore {LESSON}` brings" in done.stderr
    assert contents(newer) == before


# ---- where one is ----


def test_runs_and_data_go_to_the_nearest_course_folder_or_checkout(
    newer, mine, monkeypatch
):
    for place, folder in [
        (mine, mine),
        (mine / "lessons", mine),
        (newer, newer),
        (newer / "lessons", newer),
        (newer.parent, newer.parent),
    ]:
        monkeypatch.chdir(place)
        assert project_folder() == folder
    start.start(newer / "work")
    monkeypatch.chdir(newer / "work" / "exercises")
    assert project_folder() == newer / "work"


def test_in_a_checkout_exercises_are_solved_in_work_once_it_is_there(
    newer, monkeypatch
):
    monkeypatch.chdir(newer)
    assert exercises.learners("4") == {"04": newer / EXERCISE}
    start.start(newer / "work")
    assert exercises.learners("4") == {"04": newer / "work" / EXERCISE}
    (newer / "work" / EXERCISE).write_text("{")
    done = command_line("check", "04")
    assert "ddp-course reset 04 brings a fresh one" in done.stderr
    assert command_line("reset", "04").returncode == 0
    assert (newer / "work" / EXERCISE).read_bytes() == (newer / EXERCISE).read_bytes()
    assert f"Next: normalize in {Path('work', 'exercises')}" in command_line().stdout


# ---- what Jupyter makes of the copies ----


def test_copies_are_signed_so_that_jupyter_shows_their_pictures(tmp_path):
    start.start(tmp_path)
    notary = NotebookNotary()
    assert notary.check_signature(exercises.read(tmp_path / LESSON))
    edit(tmp_path / LESSON, outputs=["planted"])  # and no other output is trusted
    assert not notary.check_signature(exercises.read(tmp_path / LESSON))


def test_where_nothing_can_be_signed_the_copies_are_made_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    environment = os.environ | {"JUPYTER_DATA_DIR": str(tmp_path / "file" / "x")}
    done = python(
        *["-m", "ddp_course.cli.command", "start", "mine"],
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "mine" / LESSON).is_file()


# ---- from a wheel ----


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The course's wheel, built once, by whichever worker comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            options = ["--no-deps", "--no-build-isolation", "--no-index", "-q"]
            done = python("-m", "pip", "wheel", COURSE, *options, "-w", folder)
            assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel alone: what it needs comes from ours, by a .pth
    line, through which our own editable course is not seen.
    """
    folder = tmp_path_factory.mktemp("installed")
    bare = bare_environment(folder)
    install(bare, wheel)
    return bare


def bare_environment(folder):
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    ours = Path(pytest.__file__).parents[1]
    (site / "ours.pth").write_text(f"{ours}\n")
    for part in ("share", "etc"):  # JupyterLab's pages, and its terminals
        if (Path(sys.prefix) / part).exists():
            (folder / "venv" / part).symlink_to(Path(sys.prefix) / part)
    scripts = folder / "venv" / "bin"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONSTARTUP")
    }
    environment |= no_network() | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_IGNORE_INSTALLED": "1",  # our editable course is seen by its name
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return SimpleNamespace(python=scripts / "python", environment=environment)


def install(bare, wheel):
    subprocess.run(
        [bare.python, "-m", "pip", "install", "-q", wheel],
        env=bare.environment,
        check=True,
    )


@pytest.fixture
def away(installed, tmp_path):
    """An empty folder, in which `ddp-course` is the wheel's."""

    def ddp_course(*arguments, cwd=tmp_path, timeout=600):
        return subprocess.run(
            ["ddp-course", *map(str, arguments)],
            cwd=cwd,
            env=installed.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return SimpleNamespace(folder=tmp_path, ddp_course=ddp_course)


def test_from_a_wheel_an_error_is_explained(away):
    error = "[rank1]: RuntimeError: Tensors must be CUDA and dense\n"
    (away.folder / "log").write_text(error)
    done = away.ddp_course("diagnose", "log")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("A CPU tensor in a group for GPUs: RuntimeError: ")
    assert "lessons/02_ranks_and_collectives.ipynb" in done.stdout


def test_from_a_wheel_a_learner_solves_exercises(away):
    done = away.ddp_course("start", "my-course")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    folder = away.folder / "my-course"
    assert (
        contents(COURSE / "exercises").items()
        <= {
            name.removeprefix("exercises/"): content
            for name, content in contents(folder).items()
        }.items()
    )
    done = away.ddp_course("check", cwd=folder)
    assert done.returncode == 1 and done.stderr == ""
    assert all(line.endswith(": not attempted") for line in done.stdout.splitlines())
    assert "hint 1 of 3" in away.ddp_course("hint", "01", cwd=folder).stdout

    solve(folder, "01")
    all_of_them = len(exercises.questions_of("01"))
    done = away.ddp_course("check", "01", cwd=folder / "exercises")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": passed") == all_of_them, done.stdout
    assert (
        f"{all_of_them} of {all_of_them}"
        in away.ddp_course("progress", cwd=folder).stdout
    )
    assert "def normalize" in away.ddp_course("solution", "01", cwd=folder).stdout
    done = away.ddp_course("grade", "exercises", cwd=folder)
    assert done.returncode == 1, done.stdout
    assert f"exercises: {all_of_them} of " in done.stdout, done.stdout

    done = away.ddp_course("reset", "01", cwd=folder)
    assert (
        done.returncode == 0
        and "Your version is kept as runs/backups/01_" in done.stdout
    )
    name = "01_exercise_one_device.ipynb"
    ours = (COURSE / "exercises" / name).read_bytes()
    assert (folder / "exercises" / name).read_bytes() == ours


def solve(folder, number):
    """Put our answers into an exercise of a course folder."""
    path = folder / "exercises" / exercises.notebooks()[number].name
    notebook = exercises.read(path)
    ours = {task.name: task.cell.source for task in exercises.questions_of(number)}
    for task in exercises.tasks(notebook):
        task.cell.source = exercises.answer_of(ours[task.name])
    nbformat.write(notebook, path)


def test_from_a_wheel_lessons_and_their_programs_run(away):
    folder = away.folder / "my-course"
    assert away.ddp_course("start", folder).returncode == 0
    remember_that_there_is_no_mnist(folder)
    without_slow_cells(folder / "lessons" / "01_one_device.ipynb")
    done = away.ddp_course("execute", "01", cwd=folder)
    assert done.returncode == 0 and "ran to its end" in done.stdout, done.stdout
    assert (folder / "runs" / "notebooks" / "01_one_device.ipynb").is_file()
    flags = ["--nproc", "2", "--data", "digits", "--train-samples", "128"]
    done = away.ddp_course("run", "04", *flags, "--epochs", "1", cwd=folder)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    line = done.stdout.splitlines()[0]
    assert line.startswith("torchrun --nproc_per_node 2 ddp_course/lesson04.py --data")
    assert (folder / "runs" / "lesson04" / "result.json").is_file()
    assert "lessons/04_ddp.ipynb" in away.ddp_course("lessons", cwd=folder).stdout


def without_slow_cells(path):
    notebook = exercises.read(path)
    notebook.cells = [
        cell for cell in notebook.cells if "slow" not in cell.metadata.get("tags", [])
    ]
    nbformat.write(notebook, path)


def what_cells_print(cells, bare, folder):
    """Run a notebook of these cells in a bare environment, in a folder: the text that
    each of them prints.
    """
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    nbformat.write(notebook, folder.parent / "a.ipynb")
    subprocess.run(
        [bare.python, "-m", "papermill", "a.ipynb", "b.ipynb", "-k", "python3"]
        + ["--cwd", folder.name, "--no-progress-bar"],
        cwd=folder.parent,
        env=bare.environment,
        check=True,
        timeout=600,
    )
    cells = exercises.read(folder.parent / "b.ipynb").cells
    return ["".join(output.text for output in cell.outputs) for cell in cells]


@pytest.fixture
def content(tmp_path):
    """The folder in which Colab's notebooks run."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def test_the_readmes_cell_for_colab_and_kaggle_works_in_a_bare_folder(
    wheel, content, tmp_path
):
    section = (COURSE / "README.md").read_text().split("## On Colab and Kaggle")[1]
    cell = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert cell.count("COURSE") == 1
    bare = bare_environment(tmp_path)
    cells = [
        cell.replace("COURSE", str(wheel)),
        "from ddp_course import lesson04\nprint(lesson04.__file__)",
        "import os\nprint(os.getcwd(), len(os.listdir()))",
    ]
    printed = what_cells_print(cells, bare, content)
    folder = content / "my-course"
    assert printed[1].startswith(f"{bare.python.parent.parent}/lib/python")
    there = len(list((folder / "lessons").iterdir()))
    assert printed[2] == f"{folder}/lessons {there}\n"


def test_the_notebook_tools_work_with_colabs_old_ipython(wheel, content, tmp_path):
    """Colab's IPython has no names for cells, and its autoreload imports `imp`, which
    Python 3.12 removed. In older Pythons, the kernel is told that there is none.
    """
    bare = bare_environment(tmp_path)
    install(bare, wheel)
    old = [f"{name}=={version}" for name, version in COLAB.items()]
    # what these versions need and today's do not
    old += ["backcall", "pickleshare", "entrypoints", "decorator", "jedi"]
    done = subprocess.run(
        [bare.python, "-m", "pip", "install", "-q", "--no-deps", *old],
        env=os.environ | {"PIP_IGNORE_INSTALLED": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr
    cells = [
        "import sys\nsys.modules['imp'] = None\nbefore = {*sys.modules}",
        "%load_ext ddp_course.notebook",
        "import IPython\nprint(IPython.__version__)\n%autoreload\n"
        "print('imp' in sys.modules, before - {*sys.modules} - {'imp'})\n"
        "print(any(name.endswith('autoreload') for name in sys.modules))",
        "%%ranks 2\nprint(rank)",
        "from ddp_course.notebook import fails\n"
        "from ddp_course.ranks.launch import launch\n"
        "def broken():\n"
        "    return 1 / 0\n"
        "with fails('ZeroDivisionError'):\n"
        "    launch(broken)",
    ]
    _, _, loaded, ranks, error = what_cells_print(cells, bare, content)
    assert loaded == f"{COLAB['ipython']}\nFalse set()\nTrue\n"
    assert ranks == "[rank0]: 0\n[rank1]: 1\n"
    assert "cell, line 4, in broken: return 1 / 0" in error
