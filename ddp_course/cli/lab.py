"""`ddp-course lab`: JupyterLab in a course folder."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import typer

from ddp_course import COURSE_FILE, UsageError, folders, is_checkout, project_folder
from ddp_course.cli import start

SETTINGS = Path(__file__).parent / "jupyterlab"
SCRIPTS = sysconfig.get_path("scripts")  # the folder of `ddp-course`


def lab(number, browser, port=None):
    """Open a lesson in JupyterLab, on 127.0.0.1 and with its token, which prints its
    address; return its exit code, once it ends. browser: whether to open a window. port:
    of JupyterLab, and no other; without, 8888 or the next one that is free.
    """
    lesson = folders.find(folders.notebooks(folders.originals("lessons")), number).name
    folder = course_folder()
    if not (folder / "lessons" / lesson).exists():
        fix = f"`ddp-course start {os.path.relpath(folder)}` brings it back"
        raise UsageError(f"lessons/{lesson} is not there: {fix}")
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={folder.absolute()}"]
    command += [f"--ServerApp.terminado_settings={terminal()}"]
    command += [f"--LabApp.default_url=/lab/tree/lessons/{lesson}"]
    # no questions about news, and no requests for them
    command += [f"--LabApp.app_settings_dir={SETTINGS}", "--ServerApp.log_level=WARN"]
    if port:
        refuse_if_taken(port)
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        command += ["--no-browser"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command += ["--allow-root"]  # in a container, where users are often root
    server = subprocess.Popen(command, cwd=folder, env=environment())
    # the server handles Ctrl-C: it asks whether to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # when the command is terminated, terminate its server
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    return server.wait()


def refuse_if_taken(port):
    """Raise UsageError where a program listens on this port already."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port}: {os.strerror(error.errno)}; choose another one, or leave out --port"
        ) from None


def course_folder():
    """The course folder to work in: the current one; in a checkout its work/, created
    or updated; elsewhere, a folder that we ask for.
    """
    here = project_folder()
    if (here / COURSE_FILE).is_file():
        return here
    if is_checkout(here):
        folder = here / "work"
    elif sys.stdin and sys.stdin.isatty():
        name = typer.prompt(
            "Which folder should the lessons be copied to?", default="my-course"
        )
        folder = Path(name).expanduser()
    else:
        raise UsageError(f"there is no course folder here: {folders.MAKE_ONE}")
    for line in start.tell(folder, start.start(folder)):
        print(line, flush=True)
    return folder


def environment():
    """The environment of JupyterLab's kernels and terminals, which find `ddp-course`."""
    startup = SETTINGS / "startup.py"
    variables = {"PYTHONSTARTUP": str(startup)} if startup.exists() else {}
    path = os.pathsep.join([SCRIPTS, os.environ.get("PATH", os.defpath)])
    return variables | os.environ | {"PATH": path}


def terminal():
    """JupyterLab's settings for terminals: a login shell resets PATH, so put our folder
    first again. Other shells start as usual.
    """
    shell = os.environ.get("SHELL") or shutil.which("sh") or ""
    if Path(shell).name not in ("sh", "dash", "bash", "zsh"):
        return {}
    again = 'PATH="$1:$PATH" exec "$0" -i'
    return {"shell_command": [shell, "-l", "-c", again, shell, SCRIPTS]}
