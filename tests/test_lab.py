"""`ddp-course lab`: a real JupyterLab server in a course folder, the learner's copies in
it, and `ddp-course` in its kernels and terminals.
"""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
import websocket
from conftest import COURSE, descendants, python, wait_until
from jupyter_client import BlockingKernelClient
from test_start import installed, jupyter_of_its_own, wheel  # noqa: F401

from ddp_course import UsageError
from ddp_course.cli import lab, start

LAB = [sys.executable, "-m", "ddp_course.cli.command", "lab"]
LOGIN = "PATH=/usr/bin:/bin\n"  # as Debian's login shells set it anew


class Server:
    """A JupyterLab server, by the address that its process prints."""

    def __init__(self, process):
        self.process, found = process, None
        for line in process.stdout:
            if found := re.search(
                r"http://127.0.0.1:(\d+)(/lab/\S+)\?token=(\w+)", line
            ):
                break
        assert found, "no address"
        self.port, self.page, self.token = int(found[1]), found[2], found[3]
        # the address is printed a moment before it is served
        assert wait_until(lambda: answers(self.port), 90)

    def ask(self, path, method="GET", body=None, token=True):
        """The answer of its REST API to one request; JSON where it is that."""
        headers = {"Authorization": f"token {self.token}"} if token else {}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers=headers,
            method=method,
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            content = answer.read()
        return json.loads(content) if path.startswith("/api") and content else content


def answers(port):
    with (
        contextlib.suppress(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", port)),
    ):
        return True


@contextlib.contextmanager
def serving(command, folder, environment):
    """The Server that a command has started in a folder. In the end, only the command
    itself is ended: nothing may be left of what it has started.
    """
    process = subprocess.Popen(
        [*command, "--no-browser"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    try:
        yield Server(process)
        started = descendants(process.pid)
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert not psutil.wait_procs(started, timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def of_its_own(home):
    """Environment variables that keep Jupyter's files in a folder."""
    names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]
    return {name: str(home / name.lower()) for name in names} | {"HOME": str(home)}


def git(*arguments, cwd):
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@test", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout of the course as it is on the disk now, with all of it committed."""
    folder = tmp_path_factory.mktemp("a checkout")
    listed = git("ls-files", "-co", "--exclude-standard", cwd=COURSE)
    for name in listed.splitlines():
        if (COURSE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(COURSE / name, folder / name)
    git("init", "-q", cwd=folder)
    git("add", "-A", cwd=folder)
    git("commit", "-qm", "the course", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def server(checkout, tmp_path_factory):
    """JupyterLab, started in the checkout, by somebody whose login shell sets PATH."""
    home = tmp_path_factory.mktemp("home")
    (home / ".profile").write_text(LOGIN)
    environment = os.environ | of_its_own(home)
    environment |= {"SHELL": shutil.which("bash"), "PYTHONPATH": str(checkout)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with serving([*LAB, "2", "--port", str(free)], checkout, environment) as server:
        assert server.port == free
        yield server


def test_a_port_that_is_taken_is_told_in_one_line_before_anything_starts(server):
    with pytest.raises(UsageError, match=f"^port {server.port}: .*in use; choose"):
        lab.refuse_if_taken(server.port)


def test_in_a_checkout_it_opens_a_copy_of_the_lesson_in_work(server, checkout):
    name = "02_ranks_and_collectives.ipynb"
    assert server.page == f"/lab/tree/lessons/{name}"
    assert b"JupyterLab" in server.ask(server.page)
    listed = server.ask("/api/contents/")["content"]
    assert {entry["name"] for entry in listed} == {
        "AGENTS.md",
        "lessons",
        "exercises",
        "clusters",
        "ddp_course",
    }
    assert (checkout / "work" / "lessons" / name).is_file()
    # the programs can be read in the file browser
    program = server.ask("/api/contents/ddp_course/lesson04.py?type=file&format=text")
    assert program["content"] == (checkout / "ddp_course/lesson04.py").read_text()


def test_it_is_on_loopback_with_a_token(server):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        server.ask("/api/contents/lessons", token=False)
    servers = [psutil.Process(server.process.pid), *descendants(server.process.pid)]
    listening = []
    for process in servers:
        with contextlib.suppress(psutil.NoSuchProcess):  # some live for a moment only
            listening += [
                connection.laddr
                for connection in process.net_connections()
                if connection.status == psutil.CONN_LISTEN
            ]
    assert server.port in {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def test_a_lesson_that_is_run_and_saved_changes_nothing_for_git(server, checkout):
    path = "/api/contents/lessons/01_one_device.ipynb"
    notebook = server.ask(path)["content"]
    notebook["cells"][0]["source"] += "\n\nmy own notes"
    notebook["metadata"]["mine"] = True
    server.ask(path, "PUT", {"type": "notebook", "content": notebook})
    saved = (checkout / "work/lessons/01_one_device.ipynb").read_text()
    assert "my own notes" in saved
    (checkout / "work" / "runs").mkdir(exist_ok=True)
    assert git("status", "--porcelain", cwd=checkout) == ""
    # planted: what is saved in lessons/ itself is seen
    ours = checkout / "lessons/01_one_device.ipynb"
    original = ours.read_text()
    ours.write_text(saved)
    assert git("status", "--porcelain", cwd=checkout) == f" M lessons/{ours.name}\n"
    ours.write_text(original)


def test_the_copies_are_trusted_so_that_their_pictures_show(server):
    notebook = server.ask("/api/contents/lessons/02_ranks_and_collectives.ipynb")
    cells = notebook["content"]["cells"]
    trusted = [
        cell["metadata"].get("trusted") for cell in cells if cell["cell_type"] == "code"
    ]
    assert trusted and all(trusted)


def test_its_kernels_find_the_command_and_write_into_the_course_folder(
    server, checkout
):
    body = {"name": "python3", "path": "lessons/01_one_device.ipynb"}
    kernel = server.ask("/api/kernels", "POST", body)
    [file] = checkout.parent.rglob(f"kernel-{kernel['id']}.json")
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    # by default, a kernel that does not answer for a second is taken for dead
    client.hb_channel.time_to_dead = 60
    client.start_channels()
    printed = []
    program = (
        "!command -v ddp-course\nimport ddp_course; print(ddp_course.project_folder())"
    )
    try:
        client.wait_for_ready(timeout=600)
        client.execute_interactive(
            program,
            timeout=600,
            output_hook=lambda message: printed.append(message["content"].get("text")),
        )
    finally:
        client.stop_channels()
        server.ask(f"/api/kernels/{kernel['id']}", "DELETE")
    lines = "".join(filter(None, printed)).splitlines()
    assert lines == [f"{lab.SCRIPTS}/ddp-course", str(checkout / "work")]


def test_its_terminals_find_the_command_in_a_login_shell(server):
    name = server.ask("/api/terminals", "POST", {})["name"]
    terminal = websocket.create_connection(
        f"ws://127.0.0.1:{server.port}/terminals/websocket/{name}?token={server.token}",
        timeout=60,
    )
    try:
        line = "shopt login_shell; echo PATH=$PATH; command -v ddp-course; echo END$?"
        terminal.send(json.dumps(["stdin", f"{line}\r"]))
        shown, deadline = "", time.monotonic() + 60
        while not re.search(r"END\d", shown) and time.monotonic() < deadline:
            kind, *text = json.loads(terminal.recv())
            shown += text[0] if kind == "stdout" else ""
    finally:
        terminal.close()
        server.ask(f"/api/terminals/{name}", "DELETE")
    assert f"PATH={lab.SCRIPTS}:/usr/bin:/bin" in shown, shown
    assert f"\n{lab.SCRIPTS}/ddp-course" in shown and "END0" in shown


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh"])
def test_each_usual_shell_finds_the_command_as_a_login_shell(
    shell, tmp_path, monkeypatch
):
    path = shutil.which(shell) or pytest.skip(f"{shell} is not installed here")
    for name in (".profile", ".zprofile"):
        (tmp_path / name).write_text(LOGIN)
    monkeypatch.setenv("SHELL", path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(command):
        typed = "command -v ddp-course\nexit\n"
        done = subprocess.run(command, input=typed, capture_output=True, text=True)
        return done.stdout.split()

    assert found([path, "-l"]) == []  # planted: what JupyterLab would start
    assert found(lab.terminal()["shell_command"]) == [f"{lab.SCRIPTS}/ddp-course"]


def test_shells_that_we_do_not_know_are_started_as_jupyterlab_does(monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert lab.terminal() == {}


def test_kernels_begin_with_the_courses_startup_file_or_the_users_own(monkeypatch):
    monkeypatch.delenv("PYTHONSTARTUP", raising=False)
    ours = lab.SETTINGS / "startup.py"
    expected = str(ours) if ours.exists() else None
    assert lab.environment().get("PYTHONSTARTUP") == expected
    monkeypatch.setenv("PYTHONSTARTUP", "mine.py")
    assert lab.environment()["PYTHONSTARTUP"] == "mine.py"


def test_in_a_course_folder_it_opens_that(tmp_path, monkeypatch):
    start.start(tmp_path)
    monkeypatch.chdir(tmp_path / "exercises")
    assert lab.course_folder() == tmp_path
    assert not (tmp_path / "work").exists()


def test_elsewhere_it_asks_for_a_folder_on_a_terminal(tmp_path):
    program = "from ddp_course.cli import lab; lab.course_folder()"
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"\n")
        done = python("-c", program, cwd=tmp_path, stdin=theirs, timeout=600)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout.startswith(
        "Which folder should the lessons be copied to? [my-course]: "
    )
    assert (tmp_path / "my-course" / "lessons" / "04_ddp.ipynb").is_file()


def test_elsewhere_without_a_terminal_it_names_the_command_in_one_line(tmp_path):
    done = python(*LAB[1:], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=600)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr == (
        "ddp-course: there is no course folder here: "
        "`ddp-course start FOLDER` makes a course folder to work in\n"
    )


def test_a_lesson_that_is_gone_is_told_with_its_fix(tmp_path):
    start.start(tmp_path)
    (tmp_path / "lessons" / "04_ddp.ipynb").unlink()
    done = python(*LAB[1:], "4", cwd=tmp_path, timeout=600)
    assert done.returncode == 2 and done.stderr == (
        "ddp-course: lessons/04_ddp.ipynb is not there: "
        "`ddp-course start .` brings it back\n"
    )


def test_from_a_wheel_it_opens_the_course_folder(installed, tmp_path):  # noqa: F811
    environment = installed.environment | of_its_own(tmp_path)
    command = ["ddp-course", "start", "my-course"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    folder = tmp_path / "my-course"
    with serving(["ddp-course", "lab", "4"], folder, environment) as server:
        assert server.page == "/lab/tree/lessons/04_ddp.ipynb"
        listed = server.ask("/api/contents/exercises")["content"]
        assert "04_exercise_ddp.ipynb" in {entry["name"] for entry in listed}
        program = server.ask(
            "/api/contents/ddp_course/lesson04.py?type=file&format=text"
        )
        assert "DistributedDataParallel" in program["content"]
