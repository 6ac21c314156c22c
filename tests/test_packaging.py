"""Set-up: one list of versions for all, the README's two commands, and nothing of any
machine in any file.
"""

import contextlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import COLAB, COURSE
from minutes import minutes as by_the_rule
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PROJECT = tomllib.loads((COURSE / "pyproject.toml").read_text())["project"]


def pins():
    lines = (COURSE / "constraints.txt").read_text().splitlines()
    return {
        line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2]
        for line in lines
        if "==" in line
    }


def requirements(without=()):
    """What we name, but for these extras."""
    extras = [
        text
        for name, extra in PROJECT["optional-dependencies"].items()
        for text in extra
        if name not in without
    ]
    named = [Requirement(text) for text in PROJECT["dependencies"] + extras]
    # an extra may include another one
    return [requirement for requirement in named if requirement.name != PROJECT["name"]]


def test_every_package_that_we_name_is_pinned_within_its_range():
    for requirement in requirements():
        assert requirement.name in pins(), requirement.name
        assert requirement.specifier.contains(pins()[requirement.name]), requirement
        assert requirement.specifier, f"{requirement.name} has no range"


def test_the_pinned_torch_and_torchvision_are_a_pair():
    needs = [Requirement(text) for text in importlib.metadata.requires("torchvision")]
    [torch] = [requirement for requirement in needs if requirement.name == "torch"]
    if importlib.metadata.version("torchvision") != pins()["torchvision"]:
        pytest.skip("another torchvision is installed here")
    assert torch.specifier.contains(pins()["torch"])


def test_pip_does_not_replace_the_kernel_that_runs_it_on_colab():
    named = {requirement.name: requirement.specifier for requirement in requirements()}
    shared = named.keys() & COLAB.keys()
    assert {"ipykernel", "psutil"} <= shared
    for name in shared:
        assert named[name].contains(COLAB[name]), name


def test_the_lessons_run_weekly_with_the_oldest_torch_that_we_name():
    named = {requirement.name: requirement.specifier for requirement in requirements()}
    workflow = yaml.safe_load((COURSE / ".github/workflows/weekly.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["oldest"]["steps"]]
    oldest = [str(named[name]).removeprefix(">=") for name in ("torch", "torchvision")]
    pair = "torch=={}.0 torchvision=={}.0".format(*oldest)
    assert f".venv/bin/pip install {pair}" in commands
    assert commands[-1] == ".venv/bin/ddp-course execute"


def test_every_pinned_package_installs_on_the_oldest_python_that_we_name():
    """Debian 12 has 3.11.2, and there are packages that need a later 3.11."""
    oldest = re.match(r">=([\d.]+)", PROJECT["requires-python"])[1]
    seen = 0
    for name, version in pins().items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.metadata(name)
            needs = SpecifierSet(found["Requires-Python"] or "")
            seen += found["Version"] == version
            assert found["Version"] != version or f"{oldest}.0" in needs, (name, needs)
    assert seen > 100


def test_what_is_installed_by_make_is_what_is_pinned():
    if not (COURSE / ".venv" / "installed").exists():
        pytest.skip("not installed by make setup")
    for name in {
        requirement.name for requirement in requirements(["engines", "browser"])
    }:
        assert importlib.metadata.version(name) == pins()[name], name


def test_make_conda_and_ci_install_with_the_same_constraints():
    install = '--constraint constraints.txt --editable ".[deepspeed,test]"'
    assert install in (COURSE / "Makefile").read_text()
    environment = yaml.safe_load((COURSE / "environment.yml").read_text())
    assert environment["dependencies"][-1] == {
        "pip": ["-c constraints.txt", "-e .[deepspeed,test]"]
    }
    workflow = yaml.safe_load((COURSE / ".github/workflows/test.yml").read_text())
    commands = [
        step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step
    ]
    assert commands[1:] == ["make engines", "make test", "make rest"]
    assert (COURSE / ".ci/run").read_text().splitlines()[-2:] == [
        "make test",
        "make rest",
    ]


def test_all_name_the_same_versions_of_python():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert (
        "(3, 11) <= sys.version_info[:2] <= (3, 13)"
        in (COURSE / "Makefile").read_text()
    )
    assert (
        "(3, 11) <= sys.version_info[:2] <= (3, 13)"
        in (COURSE / "ddp_course/cli/doctor.py").read_text()
    )
    environment = yaml.safe_load((COURSE / "environment.yml").read_text())
    assert environment["dependencies"][0] == "python=3.12"
    workflow = yaml.safe_load((COURSE / ".github/workflows/test.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]


@pytest.mark.parametrize(
    "planted, line",
    [
        (
            "import sys; sys.version_info = (3, 9, 1)",
            "The course needs Python 3.11, 3.12 or 3.13, this is 3.9: make PYTHON=python3.12 ...",
        ),
        (
            "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9e9, 8.2e9, 0.8e9)",
            "The course needs 7 GB of disk, and 3 more while it installs: here 0.8 GB are free.",
        ),
    ],
)
def test_a_wrong_python_and_a_full_disk_get_one_line_before_anything_is_installed(
    planted, line, tmp_path
):
    """Planted: a python that says it is 3.9, or that the disk is full, in a copy where
    nothing is installed.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((COURSE / name).read_text())
    fake = tmp_path / "fake-python"
    fake.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {planted}; exec(sys.argv[1])" "$2"\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={fake}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.splitlines()[0] == line
    assert not (tmp_path / ".venv").exists()


def test_setting_up_again_does_nothing():
    if not (COURSE / ".venv" / "installed").exists():
        pytest.skip("not installed by make setup")
    done = subprocess.run(["make", "setup"], cwd=COURSE, capture_output=True, text=True)
    assert done.returncode == 0 and "pip" not in done.stdout


def test_the_readme_opens_with_commands_that_make_knows():
    readme = (COURSE / "README.md").read_text()
    commands = re.search(r"```\n(.*?)```", readme, re.DOTALL).group(1).splitlines()
    assert [line.split("#")[0].strip() for line in commands] == [
        "make lab",
        "make test",
    ]
    targets = re.findall(r"(?m)^([a-z]+):", (COURSE / "Makefile").read_text())
    assert {"lab", "test", "setup", "lessons", "bench", "doctor"} <= set(targets)
    for target in re.findall(r"`make ([a-z]+)`", readme):
        assert target in targets


def test_the_readme_lists_every_lesson():
    readme = (COURSE / "README.md").read_text()
    linked = re.findall(r"\]\((lessons/[^)]+ipynb)\)", readme)
    assert linked == sorted(
        f"lessons/{path.name}" for path in (COURSE / "lessons").glob("*.ipynb")
    )


def test_the_readme_says_how_long_each_lesson_takes_as_the_lesson_does():
    readme = (COURSE / "README.md").read_text()
    rows = re.findall(r"\]\((lessons/[^)]+)\) \| (\d+) min \|", readme)
    assert len(rows) == len(list((COURSE / "lessons").glob("*.ipynb")))
    for name, minutes in rows:
        assert f"**Time** {minutes} minutes" in (COURSE / name).read_text(), name
        assert int(minutes) == by_the_rule(COURSE / name), f"{name}: tests/minutes.py"


def test_no_file_names_a_machine_or_a_registry():
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=COURSE,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert names
    for name in names:
        path = COURSE / name
        if (
            path.suffix in (".npz", ".ipynb")
            or "tests" in Path(name).parts
            or not path.exists()
        ):
            continue
        assert not re.search(
            r"/(root|home|work|Users)/|pypi\.org|index-url", path.read_text()
        ), name


def test_versions_agree():
    from ddp_course import __version__

    assert PROJECT["version"] == __version__
    assert Version(__version__)
