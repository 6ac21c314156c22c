"""A job file is run as SLURM runs it, in one process: its commands are small programs that
ask here what to do, so that any spelling of a script counts.

SLURM's rules are those of SLURM 22.05 on the machines of lesson 14: which lines sbatch
reads, what the script finds in its environment, how many tasks srun starts and where.
"""

import json
import os
import re
import shlex
import signal
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from ddp_course.judge.answer import trying

COMMANDS = ["srun", "torchrun", "scontrol", "scancel", "sbatch", "hostname", "getent", "python", "python3"]
LETTERS = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job-name", "M": "clusters", "N": "nodes",
    "c": "cpus-per-task", "d": "dependency", "e": "error", "m": "distribution", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "r": "relative", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
FLAGS = {
    "H": "hold", "K": "kill-on-bad-exit", "O": "overcommit", "Q": "quiet", "k": "no-kill", "l": "label",
    "s": "oversubscribe", "u": "unbuffered", "v": "verbose",
}  # fmt: skip
WITHOUT_VALUE = {
    *FLAGS.values(), "requeue", "no-requeue", "exclusive", "overlap", "exact", "contiguous", "spread-job", "parsable",
    "wait-all-nodes", "get-user-env", "nice", "propagate", "use-min-nodes", "whole", "reboot", "pty",
    "disable-status", "multi-prog", "preserve-env", "quit-on-interrupt", "test-only",
}  # fmt: skip
MOST_TASKS = 24
# seconds: a step that ends by itself; a script after its signal, and at most
A_MOMENT, AFTER, LONGEST = 0.3, 4.0, 8.0

# what stands in the place of each command: it says who called it, and does what it is told
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, lambda *_: os._exit(0))
call = dict(name=os.path.basename(sys.argv[0]), words=sys.argv[1:], env=dict(os.environ), pid=os.getpid())
with socket.socket(socket.AF_UNIX) as line:
    line.connect({place!r})
    file = line.makefile("rw")
    file.write(json.dumps(call) + "\\n")
    file.flush()
    told = json.loads(file.readline() or '[143, ""]')
if told is None:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
sys.stdout.write(told[1])
sys.stdout.flush()
os._exit(told[0])
"""


# ---- options ----


def options_of(words):
    """The options at the beginning of a command's words, {long name: value}, and the rest.
    A flag without a value has "1". Of an option that comes twice, the last one counts.
    """
    found, words = {}, list(words)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
        else:
            name, value = (FLAGS | LETTERS).get(word[1], word[1]), word[2:]
            given = value
            if word[1] in FLAGS and value and not value.isdecimal():  # -lu
                words.insert(0, "-" + value)
                given = value = ""
        if not given:
            value = "1" if name in WITHOUT_VALUE or not words else words.pop(0)
        found[name] = value
    return found, words


def directives(text):
    """The options in the lines that sbatch reads: those with #SBATCH at their beginning,
    before the first line that is neither empty nor a comment.
    """
    found = {}
    for line in text.split("\n")[1:]:
        if line.startswith("#SBATCH"):
            with suppress(ValueError):  # a quotation mark that is never closed
                found |= options_of(shlex.split(line.removeprefix("#SBATCH"), comments=True))[0]
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def whole(value, otherwise):
    """The first number of a value such as 2 or 2-4."""
    number = re.match(r"\d+", value or "")
    return int(number[0]) if number else otherwise


def signal_of(value):
    """(whether only the script is told, the signal's number or None, seconds before the
    end) of a value of --signal.
    """
    found = re.fullmatch(r"(?:([BR]+):)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", (value or "").upper())
    if not found:
        return False, None, None
    name, seconds = found[2], int(found[3] or 60)
    number = int(name) if name.isdecimal() else getattr(signal, f"SIG{name}", None)
    return "B" in (found[1] or ""), number and int(number), seconds


# ---- a job ----


class Job:
    """One attempt of a job. how: "ends", "fails" (one torchrun, on the last machine),
    "killed" (that one, by the kernel), or "time" (its signal comes while all are at work).
    """

    def __init__(self, text, number, hosts, nodelist, gpus, how):
        self.text, self.number, self.hosts, self.nodelist, self.how = text, number, hosts, nodelist, how
        self.options = directives(text)
        self.gpus = gpus
        self.started, self.requeued, self.sbatched, self.tasks = [], False, False, []
        self.at_work, self.over, self.lock = 0, threading.Event(), threading.Lock()
        self.latest = time.monotonic()

    def run(self):
        """Run the script; what was seen, a dict of plain values."""
        with tempfile.TemporaryDirectory() as folder:
            place, script = os.path.join(folder, "s"), Path(folder, "job.sbatch")
            for name in COMMANDS:
                self.write(Path(folder, "bin", name), STAND_IN.format(python=sys.executable, place=place))
            self.write(script, self.text)
            with Server(place, self) as server:
                threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
                try:
                    code, printed = self.attempt(script, folder)
                finally:
                    self.over.set()
                    server.shutdown()
                    for task in self.tasks:
                        with suppress(OSError):
                            os.killpg(task.pid, signal.SIGKILL)
        seen = {"code": code, "started": self.started, "requeued": self.requeued, "sbatched": self.sbatched}
        return seen | {"left": self.left, "signal": self.sent, "printed": printed}

    def write(self, path, text):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def attempt(self, script, folder):
        self.sent, self.left = None, 0
        with open(Path(folder, "log"), "w+") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            environment = self.environment(folder)
            try:
                batch = subprocess.Popen([str(script)], env=environment, cwd=folder, **pipes)
            except OSError as error:
                return None, f"{error.strerror}: {self.text.split(chr(10))[0][:80]}"
            try:
                code = self.wait(batch)
            finally:
                with suppress(OSError):
                    os.killpg(batch.pid, signal.SIGKILL)
                batch.wait()
            log.seek(0)
            return code, log.read(3000).replace(folder, "")

    def wait(self, batch):
        """Wait for the script's end, or until its time is up; return its exit code."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            code = batch.poll()
            if code is not None:
                self.left = self.at_work if self.sent is None else 0
                return code
            everywhere = len({task["host"] for task in self.started}) >= len(self.hosts)
            quiet = time.monotonic() - self.latest > (A_MOMENT if everywhere else 2)
            if self.how == "time" and self.sent is None and self.at_work and quiet:
                only_script, number, _ = signal_of(self.options.get("signal"))
                self.sent = number if only_script else 0
                if not self.sent:
                    return None
                batch.send_signal(number)
                end = time.monotonic() + AFTER
            if self.requeued:
                return None
            time.sleep(0.01)
        return None

    def environment(self, folder):
        """What SLURM sets for the script, on the first machine."""
        options, count = self.options, len(self.hosts)
        per_node, tasks = options.get("ntasks-per-node"), options.get("ntasks")
        number, nodes = str(self.number), str(count)
        found = {"SLURM_JOB_ID": number, "SLURM_JOBID": number, "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
        found |= {"SLURM_JOB_NODELIST": self.nodelist, "SLURM_NODELIST": self.nodelist}
        found |= {"SLURM_JOB_NAME": options.get("job-name", "job.sbatch"), "SLURM_SUBMIT_DIR": folder}
        found |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        found |= {"SLURMD_NODENAME": self.hosts[0], "HOSTNAME": self.hosts[0]}
        found |= {"SLURM_GPUS_ON_NODE": str(self.gpus), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.gpus)))}
        found |= {"SLURM_TASKS_PER_NODE": f"{whole(per_node, 1)}(x{count})"}
        found |= {"SLURM_CPUS_ON_NODE": str(whole(options.get("cpus-per-task"), 1) * whole(per_node, 1))}
        if tasks or per_node:
            found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(whole(tasks, count * whole(per_node, 1)))
        for name in ("ntasks-per-node", "cpus-per-task", "gpus-per-node", "gpus", "gpus-per-task"):
            if name in options:
                found["SLURM_" + name.upper().replace("-", "_")] = options[name]
        path = os.pathsep.join([os.path.join(folder, "bin"), os.environ.get("PATH", ""), "/usr/bin", "/bin"])
        return found | {"PATH": path, "HOME": folder, "TMPDIR": folder, "USER": "learner", "LANG": "C.UTF-8"}

    # ---- its commands ----

    def call(self, name, words, env, pid):
        """What a command of the job does: [exit code, what it prints]; None: Python itself."""
        with self.lock:
            self.latest = time.monotonic()
        if name.startswith("python"):
            if words[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
                return self.torchrun(words[2:], env)
            if not any(word.endswith("train.py") for word in words):
                return None
            return self.torchrun(None, env)
        own = getattr(self, name, None)
        return own(words, env)

    def torchrun(self, words, env):
        """words: its own; None for the program without it."""
        with self.lock:
            step, host = env.get("DDP_STEP"), self.host(env)
            task = {"words": words, "host": host, "step": json.loads(step) if step else None}
            kill = {"SLURM_KILL_BAD_EXIT": env.get("SLURM_KILL_BAD_EXIT")}
            self.started.append(task | {"cores": env.get("SRUN_CPUS_PER_TASK"), **kill})
            self.at_work += 1
        self.over.wait(LONGEST * 2 if self.how == "time" else A_MOMENT)
        with self.lock:
            self.at_work -= 1
        return [{"fails": 1, "killed": 137}.get(self.how, 0) if host == self.hosts[-1] else 0, ""]

    def host(self, env):
        """The machine on which a command runs."""
        return env.get("SLURMD_NODENAME") if env.get("SLURMD_NODENAME") in self.hosts else self.hosts[0]

    def srun(self, words, env):
        options, command = options_of(words)
        hosts = self.places(options, env)
        outputs, codes = [""] * len(hosts), [0] * len(hosts)

        def run(rank):
            node = sorted(set(hosts), key=self.hosts.index).index(hosts[rank])
            own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_NTASKS": str(len(hosts))}
            own |= {"SLURM_LOCALID": str(rank - hosts.index(hosts[rank])), "SLURMD_NODENAME": hosts[rank]}
            own |= {"HOSTNAME": hosts[rank], "DDP_STEP": json.dumps(options)}
            if "cpus-per-task" in options:
                own["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
            try:
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                task = subprocess.Popen(command, env=env | own, text=True, start_new_session=True, **pipes)
                self.tasks.append(task)
                outputs[rank], _ = task.communicate()
                codes[rank] = task.returncode
            except (OSError, IndexError) as error:
                codes[rank], outputs[rank] = 2, f"slurmstepd: error: execve(): {error}\n"

        threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(len(hosts))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return [max(codes, default=0), "".join(outputs)]

    def places(self, options, env):
        """The machine of each task of a step, as srun chooses it."""
        listed = [name for name in re.split(r"[,\s]+", options.get("nodelist", "")) if name in self.hosts]
        inherited = whole(env.get("SLURM_NTASKS"), None) if "ntasks" not in options else None
        tasks = whole(options.get("ntasks"), inherited)
        nodes = whole(options.get("nodes"), len(listed) or len(self.hosts))
        nodes = max(1, min(nodes, len(self.hosts), tasks or MOST_TASKS))
        if tasks is None:
            per_node = options.get("ntasks-per-node", env.get("SLURM_NTASKS_PER_NODE"))
            tasks = nodes * whole(per_node, 1)
        chosen = [*listed, *(host for host in self.hosts if host not in listed)][:nodes]
        chosen.sort(key=self.hosts.index)
        tasks = min(tasks, MOST_TASKS)
        block = -(-tasks // nodes)
        return [chosen[rank // block] for rank in range(tasks)]

    def scontrol(self, words, env):
        if words[:1] == ["requeue"]:
            self.requeued = self.requeued or str(self.number) in words[1:]
        elif words[:1] == ["show"] and words[1:2] and words[1].startswith("hostname"):
            listed = words[2] if len(words) > 2 else env.get("SLURM_JOB_NODELIST", "")
            names = self.hosts if listed == self.nodelist else re.split(r",(?![^[]*\])", listed)
            return [0, "".join(f"{name}\n" for name in names)]
        return [0, ""]

    def scancel(self, words, env):
        self.over.set()  # the program saves, and ends
        return [0, ""]

    def sbatch(self, words, env):
        self.sbatched = True
        return [0, "Submitted batch job 1\n"]

    def address(self, host):
        return f"10.20.0.{11 + self.hosts.index(host)}"

    def hostname(self, words, env):
        asked = any(word in ("-i", "-I", "--ip-address", "--all-ip-addresses") for word in words)
        return [0, (self.address(self.host(env)) if asked else self.host(env)) + "\n"]

    def getent(self, words, env):
        found = [host for host in words[1:] if host in self.hosts]
        return [0 if found else 2, "".join(f"{self.address(host)}  {host}\n" for host in found)]


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, place, job):
        self.job = job
        super().__init__(place, Line)


class Line(socketserver.StreamRequestHandler):
    """One command of a job, which waits for what it has to do."""

    def handle(self):
        call = json.loads(self.rfile.readline())
        with suppress(OSError):  # it was ended meanwhile
            self.wfile.write(json.dumps(self.server.job.call(**call)).encode() + b"\n")


# ---- the observer ----


def run_jobs(job_file, cases):
    """For each of this rank's cases, the text of the answer, and what happened."""
    rank, ranks, seen = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    for case in cases[rank::ranks]:
        with trying(f"job_file{case['asked']}"):
            text = job_file(*case["asked"])
        what = {"text": text[:20_000] if isinstance(text, str) else None, "kind": type(text).__name__}
        if what["text"]:
            what |= Job(text, case["number"], case["hosts"], case["nodelist"], case["asked"][1], case["how"]).run()
        seen.append(what)
    return seen
