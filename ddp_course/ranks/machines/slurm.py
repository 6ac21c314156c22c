"""A real SLURM on the machines of machines.py: `with Slurm(machines) as slurm`.

SLURM is the engine of most clusters. Its daemons run here as an ordinary user, without
munge, cgroups and systemd; clusters/slurm/slurm.conf says what that takes.
"""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from ddp_course import UsageError
from ddp_course.ranks.machines.namespaces import environment

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client"


def installed():
    """Whether SLURM's daemons and commands are on this machine."""
    path, programs = environment()["PATH"], ("slurmctld", "slurmd", "sbatch")
    return all(shutil.which(program, path=path) for program in programs)


class Slurm:
    """SLURM's daemons on machines, node0 with the controller.

    machines: open Machines. conf: a slurm.conf with FOLDER, USER and LAST to be
    replaced. Raises UsageError if SLURM is not installed, or if the machines are only
    pretended.
    """

    def __init__(self, machines, conf):
        machines.real("SLURM")
        if not installed():
            raise UsageError(f"SLURM is not installed: {INSTALL}")
        self.machines, self.conf = machines, Path(conf)
        # inside a machine we are root without the rights of root, which the daemons
        # would try to use: they run one level deeper, as ourselves, or else as daemon
        user = os.getuid() or 1
        self.name = "daemon" if user == 1 else user_name(user)
        self.deeper = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-course-slurm-"))
        (self.folder / "state").mkdir()
        text = self.conf.read_text().replace("FOLDER", str(self.folder))
        text = text.replace("LAST", str(self.machines.count - 1))
        (self.folder / "slurm.conf").write_text(text.replace("USER", self.name))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self._start(0, "slurmctld")
            for machine in range(self.machines.count):
                self.start_machine(machine)
            self.wait_for(
                "sinfo --noheader --format=%D/%T", f"{self.machines.count}/idle"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for machine in range(self.machines.count):
            if self.machines.namespaces.machines[machine]:
                self.machines.run(machine, ["sh", "-c", "pkill -9 slurm; true"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, machine, daemon):
        quiet = {"stdin": -3, "stdout": -3, "stderr": -3}  # subprocess.DEVNULL
        command = [*self.deeper, daemon, "-D"]
        return self.machines.start(machine, command, self.environment, **quiet)

    def start_machine(self, machine):
        """Start a machine's daemon, as when the machine was off."""
        self._start(machine, "slurmd")

    def run(self, line, timeout=60):
        """Run a command of SLURM on node0; return what it printed. Raises UsageError
        with what it printed if it fails.
        """
        command = [*self.deeper, "sh", "-c", line]
        code, text = self.machines.run(0, command, self.environment, timeout)
        if code:
            raise UsageError(f"{line} ended with {code}: {text.strip()}")
        return text

    def submit(self, line):
        """sbatch with these flags, a script and its flags; return the job's number."""
        return int(re.search(r"\d+", self.run(f"sbatch {line}"))[0])

    def state(self, job):
        """A job's state, such as PENDING, RUNNING or COMPLETED."""
        return re.search(r"JobState=(\w+)", self.run(f"scontrol show job {job}"))[1]

    def wait_for(self, line, pattern, timeout=60):
        """Run a command again and again until it prints a match for the pattern."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                text = self.run(line)
            except UsageError as error:  # the controller needs a moment to start
                text = str(error)
            if match := re.search(pattern, text):
                return match
            if time.monotonic() > deadline:
                raise TimeoutError(f"{line} did not print {pattern!r}, but {text!r}")
            time.sleep(0.5)

    def wait(self, job, timeout=300):
        """Wait for the end of a job; return its state."""
        ends = "JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)"
        return self.wait_for(f"scontrol show job {job}", ends, timeout)[1]


def user_name(number):
    """The name of the account with this number."""
    import pwd

    return pwd.getpwuid(number).pw_name
