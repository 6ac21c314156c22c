"""Machines of machines.py that let you in by ssh: `with Ssh(machines, conf) as ssh`.

pdsh, mpirun and DeepSpeed's launcher start ranks in this way. Keys, known hosts and the
account are made for the block, in a folder of its own; your ~/.ssh is not touched.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ddp_course import UsageError
from ddp_course.ranks import gpus
from ddp_course.ranks.machines.namespaces import environment
from ddp_course.ranks.variables import DATA

INSTALL = "RUNLEVEL=1 apt-get install --no-install-recommends openssh-server"
HANDED_ON = ("PYTHONPATH", DATA)  # where they are set


class Ssh:
    """sshd on machines, and an account, `learner`, that may log in to all of them.

    machines: open Machines. conf: an sshd_config with FOLDER and ENVIRONMENT to be
    replaced. Raises UsageError if sshd is not installed, or if the machines are only
    pretended.
    """

    def __init__(self, machines, conf):
        machines.real("ssh")
        # sshd must know its whole path
        self.sshd = shutil.which("sshd", path=environment()["PATH"])
        if not self.sshd:
            raise UsageError(f"sshd is not installed: {INSTALL}")
        self.machines, self.conf = machines, Path(conf)
        # inside a machine we are root without the rights of root, which sshd would try
        # to use: the learner is one level deeper, an ordinary user
        user = os.getuid() or 1000
        self.account = f"learner:x:{user}:{user}::{{}}:/bin/sh\n"
        self.deeper = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-course-ssh-"))
        try:
            self._write_files()
            for machine in range(self.machines.count):
                self.start_machine(machine)
            for machine in range(self.machines.count):
                code, text = self.run(f"ssh node{machine} true")
                if code:
                    raise UsageError(f"node{machine} lets nobody in: {text.strip()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for machine in range(self.machines.count):
            if self.machines.namespaces.machines[machine]:
                end = "pkill -9 sshd; umount /etc/passwd; true"
                self.machines.run(machine, ["sh", "-c", end])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self):
        """The learner's home: one key that all machines know, and theirs."""
        keys = self.folder / ".ssh"
        keys.mkdir(mode=0o700)
        for name in ("id_ed25519", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name]
            # on a machine, where everybody has an account
            code, text = self.machines.run(0, [*make, "-f", str(keys / name)])
            if code:
                raise UsageError(f"no key could be made: {text.strip()}")
        (keys / "id_ed25519.pub").rename(keys / "authorized_keys")
        theirs = (keys / "host_key.pub").read_text()
        (keys / "known_hosts").write_text(f"node* {theirs}")
        # never your own agent's keys; and sshd needs a moment to start
        config = "IdentityAgent none\nBatchMode yes\nConnectionAttempts 10\n"
        (keys / "config").write_text(config)
        (self.folder / "passwd").write_text(self.account.format(self.folder))
        env = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        env |= gpus.HIDDEN
        env["TMPDIR"] = str(self.folder)
        # python and torchrun are those of this program
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = " ".join(f'"{name}={value}"' for name, value in env.items())
        text = self.conf.read_text().replace("FOLDER", str(self.folder))
        (self.folder / "sshd_config").write_text(text.replace("ENVIRONMENT", variables))

    def start_machine(self, machine):
        """Let the learner into a machine, as when it was off."""
        begin = f"mount --bind {self.folder}/passwd /etc/passwd"
        begin += " && echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start"
        code, text = self.machines.run(machine, ["sh", "-c", begin])
        if code:
            raise UsageError(f"node{machine} has no account: {text.strip()}")
        daemon = [*self.deeper, self.sshd, "-D", "-f", f"{self.folder}/sshd_config"]
        quiet = {"stdin": -3, "stdout": -3, "stderr": -3}  # subprocess.DEVNULL
        self.machines.start(machine, daemon, **quiet)

    def run(self, line, timeout=60):
        """Run a command line on node0 as the learner; return how it Ended."""
        home = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return self.machines.run(0, [*self.deeper, "sh", "-c", line], home, timeout)
