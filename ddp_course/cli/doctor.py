"""What `ddp-course doctor` checks: one function per question, each with a Finding as
its answer.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from typing import NamedTuple

from ddp_course.ranks.variables import START_METHOD

REINSTALL = "install the two together: pip install --force-reinstall torch torchvision"


class Finding(NamedTuple):
    """One answer: what was checked, what was found, and how to fix it; `fix` is empty
    if all is well.
    """

    subject: str
    found: str
    fix: str = ""


def examine():
    """Yield the Findings in order. Those that start ranks come last, and only if torch
    can be imported.
    """
    yield python()
    torch = torch_and_torchvision()
    yield torch
    yield notebooks()
    yield environment()
    yield loopback()
    yield ports()
    yield disk()
    if "none" in torch.found:
        return
    yield devices()
    yield backends()
    yield images()
    yield grading()
    yield machines()
    yield ranks_by_launch()
    yield ranks_by_torchrun()


def python():
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        "Python",
        f"{version} on {platform.system()}",
        "" if good else "use Python 3.11, 3.12 or 3.13",
    )


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def torch_and_torchvision():
    """Import both in a separate process: a pair that does not match fails at import."""
    found = f"torch {version_of('torch')}, torchvision {version_of('torchvision')}"
    if "none" in found:
        return Finding(
            "torch",
            found,
            "install the course: make setup, or pip install -c constraints.txt -e .",
        )
    program = "import torch, torchvision; torchvision.ops.nms"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    if done.returncode == 0:
        return Finding("torch", f"{found}, a matched pair")
    reason = (done.stderr.strip().splitlines() or ["import failed"])[-1]
    return Finding("torch", f"{found} do not match ({reason})", REINSTALL)


def notebooks():
    names = [
        "jupyterlab",
        "ipykernel",
        "papermill",
        "nbval",
        "matplotlib",
        "accelerate",
        "transformers",
        "peft",
        "bitsandbytes",
        "datasets",
    ]
    missing = [name for name in names if version_of(name) == "none"]
    found = ", ".join(f"{name} {version_of(name)}" for name in names)
    return Finding(
        "packages",
        found,
        f"missing {', '.join(missing)}: make setup" if missing else "",
    )


def environment():
    """Environment variables with which a program would seem to be started by torchrun,
    or that mislead gloo.
    """
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    left = [name for name in names if name in os.environ]
    if left:
        return Finding(
            "environment",
            f"{', '.join(left)} set in this shell",
            f"unset {' '.join(left)}: only a launcher should set them",
        )
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and interface not in [name for _, name in socket.if_nameindex()]:
        return Finding(
            "environment",
            f"GLOO_SOCKET_IFNAME={interface}, which is not an interface of this machine",
            "unset GLOO_SOCKET_IFNAME",
        )
    return Finding("environment", "no launcher's variables left over")


def loopback():
    """Ranks on one machine communicate over 127.0.0.1."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            pass
    except OSError as error:
        fix = "enable the loopback interface, and allow it in your firewall"
        return Finding("loopback", f"127.0.0.1 cannot be reached ({error})", fix)
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        name = socket.gethostname()
        return Finding(
            "loopback",
            f"127.0.0.1 works; the host name {name} does not resolve, and torch may warn about that",
        )
    return Finding("loopback", "127.0.0.1 works, the host name resolves")


def ports():
    """The course uses free ports. 29500 is the default of other launchers."""
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", 29500)) == 0
    return Finding(
        "ports",
        f"29500, other launchers' default, is {'taken: no matter here' if taken else 'free'}",
    )


def disk():
    from ddp_course import project_folder

    folder = project_folder()
    free = shutil.disk_usage(folder).free / 2**30
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk",
            f"{folder} cannot be written to",
            "work in a folder that you can write to, or pass --out to the lessons",
        )
    return Finding(
        "disk",
        f"{free:.1f} GiB free",
        "free some space: runs and notebooks are written here" if free < 0.5 else "",
    )


def devices():
    import torch

    cores = os.cpu_count()
    gpus = [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    others = ", mps" if torch.backends.mps.is_available() else ""
    return Finding(
        "devices",
        f"{cores} CPU cores{others}, {len(gpus)} GPUs{': ' + ', '.join(gpus) if gpus else ', and none is needed'}",
    )


def backends():
    import torch.distributed as dist

    if not dist.is_available():
        return Finding(
            "backends",
            "none: this torch was built without torch.distributed",
            REINSTALL,
        )
    there = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if getattr(dist, f"is_{name}_available")()
    ]
    return Finding("backends", ", ".join(there), "" if "gloo" in there else REINSTALL)


def images():
    from ddp_course import UsageError
    from ddp_course.data import images

    folder = images.data_folder()
    if not any((folder / images.RAW / name).exists() for name in images.MNIST_FILES):
        return Finding(
            "data", f"digits; no MNIST in {folder}, lessons try to download it"
        )
    try:
        for name in images.MNIST_FILES:
            images.read_verified(folder / images.RAW / name)
    except UsageError as error:
        return Finding(
            "data", str(error).rpartition(": ")[0], str(error).rpartition(": ")[2]
        )
    return Finding("data", f"digits, and MNIST in {folder}, verified")


def grading():
    """A learner needs no sandbox: without one there is a note, and no problem."""
    from ddp_course.judge import sandbox

    if reason := sandbox.why_not():
        return Finding("sandbox", f"none, and only graders need one: {reason}")
    return Finding("sandbox", "bubblewrap, in which other people's answers are graded")


def machines():
    """What lesson 14's machines are made of here. Pretended ones are no problem."""
    from ddp_course.ranks.machines import slurm
    from ddp_course.ranks.machines.namespaces import why_not

    if reason := why_not():
        return Finding("machines", f"only pretended, in lesson 14: {reason}")
    also = ", with SLURM" if slurm.installed() else ""
    return Finding("machines", f"network namespaces, in lesson 14{also}")


def sum_of_ranks():
    """What each of the two ranks does: an all_reduce of its rank plus one. Both get 3."""
    import torch
    import torch.distributed as dist

    from ddp_course.ranks.environment import process_group

    with process_group(timeout=20) as (rank, _):
        number = torch.tensor([rank + 1])
        dist.all_reduce(number)
        return number.item()


def ranks_by_launch():
    from ddp_course.ranks.launch import RankError, launch

    try:
        sums = launch(sum_of_ranks, timeout=60)
    except RankError as error:
        return Finding(
            "launch()",
            str(error),
            f"set {START_METHOD}=spawn and try again; if that fails, report this text",
        )
    if sums != [3, 3]:
        return Finding(
            "launch()", f"2 ranks, one all_reduce: sums of {sums}, not 3", "report this"
        )
    return Finding("launch()", "2 ranks, one all_reduce: right")


def ranks_by_torchrun():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "ddp_course.cli.doctor",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "torchrun",
            "2 ranks did not answer within two minutes",
            "check the loopback line above, and your firewall",
        )
    if done.returncode == 0 and "".join(done.stdout.split()) == "33":
        return Finding("torchrun", "2 ranks, one all_reduce: right")
    words = [line for line in done.stderr.splitlines() if "Error" in line] or [
        "no reason given"
    ]
    fix = (
        "set USE_LIBUV=0"
        if "libuv" in done.stderr
        else "look at the loopback and environment lines above"
    )
    return Finding("torchrun", f"2 ranks failed: {words[-1].strip()}", fix)


if __name__ == "__main__":
    if sys.argv[1:] == ["pair"]:
        finding = torch_and_torchvision()
        sys.exit(f"{finding.found}: {finding.fix}" if finding.fix else None)
    print(sum_of_ranks())
