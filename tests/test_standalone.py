"""The scripts that stand alone: without the course, and with its programs' numbers."""

import ast
import os
import re
import runpy

import pytest
import torch
from conftest import COURSE, THOROUGH, python

from ddp_course import lesson04, lesson07, lesson08
from ddp_course.data.images import save_digits
from ddp_course.ranks.launch import launch, rank_environment

FOLDER = COURSE / "lessons" / "standalone"
PAIRS = {
    "train_ddp": lesson04,
    "train_accelerate": lesson07,
    "train_trainer": lesson08,
}
LIBRARIES = {"os", "torch", "accelerate", "transformers"}
SAMPLES = 300


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A working folder with digits.pt, of fewer training images than its command's."""
    monkeypatch.chdir(tmp_path)
    save_digits("digits.pt")
    images, labels, *test = torch.load("digits.pt")
    torch.save([images[:SAMPLES].clone(), labels[:SAMPLES], *test], "digits.pt")
    return tmp_path


def run_script(name, alone=False):
    """In a rank; alone: as plain `python` starts it, which sets no variables."""
    torch.set_num_threads(1)
    if alone:
        for variable in set(rank_environment(0, 1, 0)) & set(os.environ):
            del os.environ[variable]
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def fingerprint_of_script(digits):
    """What `runs.params_sha256` says of the parameters that a script has saved."""
    from hashlib import sha256

    state = torch.load(digits / "model.pt", weights_only=True)
    return sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()


CASES = [
    (name, n) for name in PAIRS for n in (1, 2, 3) if name == "train_ddp" or n == 2
]
if THOROUGH:
    CASES = [(name, n) for name in PAIRS for n in (1, 2, 3)]


@pytest.mark.parametrize("name, nproc", CASES)
def test_a_script_trains_to_the_bits_of_its_lesson(name, nproc, digits):
    launch(run_script, name, nproc=nproc, timeout=600)
    options = [
        "--data",
        "digits",
        "--train-samples",
        str(SAMPLES),
        "--out",
        str(digits),
    ]
    result = launch(PAIRS[name].main, options, nproc=nproc, timeout=600)[0]
    assert fingerprint_of_script(digits) == result["params_sha256"]


@pytest.mark.parametrize("name", PAIRS)
def test_a_script_runs_without_torchrun_as_a_world_of_one(name, digits):
    """As people start it who have copied it."""
    launch(run_script, name, alone=True, nproc=1, timeout=600)
    alone = fingerprint_of_script(digits)
    if name == "train_ddp":  # the others do not use DDP then
        launch(run_script, name, nproc=1, timeout=600)
        assert alone == fingerprint_of_script(digits)


def test_the_ddp_script_runs_under_torchrun_and_its_original_alone(digits):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for command in ([FOLDER / "train.py"], [*torchrun, FOLDER / "train_ddp.py"]):
        done = python(*command)
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and len(lines) == 3, done.stderr
        assert float(lines[-1].split()[-1].rstrip("%")) > 30


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_imports_nothing_of_the_course_and_is_short(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= LIBRARIES
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in LIBRARIES
    # the traceback of a missing file shows the line that makes it
    loading = 'torch.load("digits.pt")  # python -m ddp_course.data.images digits.pt'
    assert loading in path.read_text()
    tree.body = tree.body[1:]  # without the docstring
    assert len(ast.unparse(tree).splitlines()) <= 60


MY_SCRIPT = """
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    print(f"the sum of ranks is {total.item()}")  # one write: torchrun buffers nothing
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def test_a_script_of_ones_own_runs_as_the_readme_says(tmp_path):
    [block] = re.findall(
        r"```python\n(import my_script.*?)```", (COURSE / "README.md").read_text(), re.S
    )
    (tmp_path / "my_script.py").write_text(MY_SCRIPT)
    lines = "\n".join(f"    {line}" for line in block.splitlines())
    (tmp_path / "all.py").write_text(f'if __name__ == "__main__":\n{lines}\n')
    done = python("all.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the sum of ranks is 1") == 2
    assert done.stdout.count("the sum of ranks is 6") == 8
