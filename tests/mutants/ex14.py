"""Exercise 14: many machines."""

import copy
import io
import ipaddress
import itertools
import math
import os
import signal
import sys
import threading
from ipaddress import ip_interface, ip_network

import numpy as np
import torch
import torch.distributed as dist
from ddp_course import lesson14
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mutants import right, wrong

# ---- job_file ----

DIRECTIVES = {
    "nodes": "--nodes={machines}",
    "tasks": "--ntasks-per-node=1",
    "gpus": "--gpus-per-node={gpus}",
    "cores": "--cpus-per-task={cores}",
    "time": "--time={minutes}",
    "signal": "--signal=B:USR1@120",
    "requeue": "--requeue",
    "log": "--open-mode=append",
}
SCRIPT = {
    "head": "head=$(hostname)",
    "port": "port=$((20000 + SLURM_JOB_ID % 10000))",
    "trap": "trap 'scontrol requeue $SLURM_JOB_ID' USR1",
    "srun": "srun {step} {torchrun} train.py &",
    "end": "wait $!",
}
STEP = "--cpus-per-task={cores} --kill-on-bad-exit=1"
TORCHRUN = "torchrun --nnodes {machines} --nproc-per-node {gpus} --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID {meet}"
MEET = "--rdzv-endpoint $head:$port"
STATIC = "--node-rank $SLURM_NODEID --master-addr $head --master-port $port"
JOB = ("machines", "gpus", "cores", "minutes")


def a_file(*asked, **changed):
    """A right job file, with some of its parts changed; None leaves a part out."""
    lines = ["#!/bin/bash"]
    for option in (DIRECTIVES | {key: value for key, value in changed.items() if key in DIRECTIVES}).values():
        lines += [f"#SBATCH {option}"] if option else []
    script = SCRIPT | {key: value for key, value in changed.items() if key in SCRIPT}
    text = "\n".join(lines + [line for line in script.values() if line is not None])
    parts = {"step": STEP, "torchrun": TORCHRUN, "meet": MEET} | changed
    for _ in range(3):  # a part may name another
        for name in ("step", "torchrun", "meet"):
            text = text.replace("{" + name + "}", parts[name])
    for name, value in zip(JOB, asked):
        text = text.replace("{" + name + "}", str(value))
    return text + "\n"


def right_file(name, **changed):
    """A right answer with these parts."""
    answer = lambda machines, gpus, cores, minutes: a_file(machines, gpus, cores, minutes, **changed)
    answer.__name__, answer.__module__ = name, __name__
    right("job_file")(answer)


def wrong_file(name, pattern, **changed):
    answer = lambda machines, gpus, cores, minutes: a_file(machines, gpus, cores, minutes, **changed)
    answer.__name__, answer.__module__ = name, __name__
    wrong("job_file", pattern)(answer)


right_file(
    "short_options", nodes="-N {machines}", cores="-c {cores}", time="-t {minutes}:00", gpus="--gres=gpu:{gpus}",
    step="-c{cores} -K1",
)  # fmt: skip
right_file(
    "two_options_in_a_line", nodes="--nodes {machines} --ntasks {machines}", tasks="--ntasks-per-node 1 -J night # a name",
)  # fmt: skip
right_file("one_task_by_default", tasks=None, gpus="--gpus-per-task=a100:{gpus}")
right_file(
    "static_with_a_shell_in_the_task", port="export head port=$((20000 + SLURM_JOB_ID % 10000))",
    torchrun="sh -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc_per_node=gpu --node_rank=$SLURM_NODEID "
    '--master_addr=$head --master_port=$port "$@"\' sh',
)  # fmt: skip
right_file(
    "as_in_pytorchs_examples", head="nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )\nhead_node=${nodes[0]}\n"
    'head=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)',
)  # fmt: skip
right_file(
    "as_in_the_lesson", head='head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    trap="requeue() {\n    kill -0 \"$step\" 2>/dev/null || return\n    scancel --signal=USR1 \"$SLURM_JOB_ID\"\n"
    '    timeout 40 tail --pid="$step" -f /dev/null\n    scontrol requeue "$SLURM_JOB_ID"\n}\ntrap requeue USR1',
    torchrun="sh -c 'trap \"\" USR1; exec torchrun \"$@\"' torchrun --nnodes $SLURM_NNODES --nproc-per-node {gpus} "
    '--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port"',
    end="step=$!\nwait $step\nwait $step",
)  # fmt: skip
right_file(
    "environment_variables", port="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK SLURM_KILL_BAD_EXIT=1\n"
    "port=$((29999 - SLURM_JOBID % 9973))", step="",
)  # fmt: skip
right_file(
    "as_a_module", torchrun="python -m torch.distributed.run --nnodes {machines}:{machines} --nproc-per-node={gpus} "
    "--rdzv_backend=c10d --rdzv_endpoint=$head:$port",
)  # fmt: skip
right_file(
    "another_signal", signal="--signal B:USR2@120", trap="trap 'scontrol requeue $SLURM_JOB_ID; exit 1' SIGUSR2 SIGTERM",
)  # fmt: skip
right_file(
    "exits_with_a_code", signal="--signal=B:TERM@120", trap="trap 'scontrol requeue ${SLURM_JOB_ID}' TERM",
    end='wait $!\ncode=$?\necho "srun gave $code"\nexit $code',
)  # fmt: skip
right_file("stops_at_an_error", head="set -euo pipefail\nhead=$(hostname -s)", end="step=$!; wait $step")
right_file("days", time="--time=0-00:{minutes}")
right_file(
    "all_on_one_line_of_flags", nodes="-N{machines} -c{cores} --requeue", cores=None, requeue=None, log="--open-mode a",
)  # fmt: skip


wrong_file("a_remainder_of_999", "less than 1,000 need different ports", port="port=$((20000 + SLURM_JOB_ID % 999))")
wrong_file("a_remainder_of_10001", "take a port from the job's number", port="port=$((20000 + SLURM_JOB_ID % 10001))")
wrong_file("the_last_digits_as_text", "take a port from the job's number", port="port=2${SLURM_JOB_ID: -4}")
wrong_file("an_octal_number", "take a port from the job's number", port="port=$((20000 + ${SLURM_JOB_ID: -4}))")
wrong_file(
    "requeued_when_it_was_killed", "put the job back only at the signal", trap="trap : USR1",
    end="step=$!\nwait $step\n[ $? -gt 128 ] && scontrol requeue $SLURM_JOB_ID\nwait $step",
)  # fmt: skip


@wrong("job_file", "ask for the time")
def hours_of_a_day(machines, gpus, cores, minutes):
    return a_file(machines, gpus, cores, minutes, time=f"--time={minutes // 60 % 24:02}:{minutes % 60:02}:00")


@right("job_file")
def a_script_in_python(machines, gpus, cores, minutes):
    directives = "\n".join(f"#SBATCH {option}" for option in DIRECTIVES.values())
    for name, value in zip(JOB, (machines, gpus, cores, minutes)):
        directives = directives.replace("{" + name + "}", str(value))
    return f"""#!/usr/bin/env python3
{directives}
import os, signal, subprocess, sys
job = os.environ["SLURM_JOB_ID"]
head = subprocess.run("hostname", capture_output=True, text=True).stdout.strip()
signal.signal(signal.SIGUSR1, lambda *_: subprocess.run(["scontrol", "requeue", job]))
srun = ["srun", "--cpus-per-task={cores}", "--kill-on-bad-exit"]
line = ["torchrun", "--nnodes={machines}", "--nproc-per-node={gpus}", "--rdzv-backend=c10d"]
line += [f"--rdzv-id={{job}}", f"--rdzv-endpoint={{head}}:{{20000 + int(job) % 10000}}", "train.py"]
sys.exit(subprocess.Popen(srun + line).wait())
"""


@wrong("job_file", "--gpus counts the GPUs of the whole job")
def as_it_was_given(machines, gpus, cores, minutes):
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --nodes={machines}",
            f"#SBATCH --ntasks-per-node={gpus}",
            f"#SBATCH --gpus={gpus}",
            f"#SBATCH --time={minutes // 60}:{minutes % 60:02}",
            "#SBATCH --signal=USR1@120",
            "head=$(hostname)",
            f"#SBATCH --cpus-per-task={cores}",
            "trap 'scontrol requeue $SLURM_JOB_ID' USR1",
            f"srun torchrun --nnodes {machines} --nproc-per-node {gpus} --node-rank $SLURM_NODEID"
            " --master-addr $head --master-port 29500 train.py",
            'echo "the job is done"',
        ]
    )


@wrong("job_file", "join them")
def a_list_of_lines(machines, gpus, cores, minutes):
    return a_file(machines, gpus, cores, minutes).split("\n")


@wrong("job_file", "its first line names a shell")
def an_empty_first_line(machines, gpus, cores, minutes):
    return "\n" + a_file(machines, gpus, cores, minutes)


@wrong("job_file", "does not return|without a return")
def prints_the_file(machines, gpus, cores, minutes):
    print(a_file(machines, gpus, cores, minutes))


@wrong("job_file", "minutes and seconds")
def hours_and_minutes(machines, gpus, cores, minutes):
    return a_file(machines, gpus, cores, minutes, time=f"--time={minutes // 60}:{minutes % 60:02}")


@wrong("job_file", "no #SBATCH line after the first command")
def cores_after_a_command(machines, gpus, cores, minutes):
    head = f"{SCRIPT['head']}\n#SBATCH --cpus-per-task={cores}"
    return a_file(machines, gpus, cores, minutes, cores=None, head=head)


@wrong("job_file", "no space, and one #")
def a_directive_that_is_a_comment(machines, gpus, cores, minutes):
    return a_file(machines, gpus, cores, minutes).replace("#SBATCH --requeue", "##SBATCH --requeue")


wrong_file("hours_for_minutes", "these are hours", time="--time={minutes}:00:00")
wrong_file("all_gpus_of_the_job", "may divide them", gpus="--gpus={gpus}")
wrong_file("ranks_for_machines", "these are the GPUs of a machine", nodes="-N {gpus}")
wrong_file("no_machines", "ask for the machines", nodes=None)
wrong_file("no_gpus", "ask for the GPUs of each machine", gpus=None)
wrong_file("no_cores", "many clusters give one core", cores=None)
wrong_file("a_signal_for_the_step", "without B:", signal="--signal=USR1@120")
wrong_file("two_seconds", "counts the seconds", signal="--signal=B:USR1@2")
wrong_file("no_requeue", "JobRequeue is 0", requeue=None)
wrong_file("a_new_log", "begin the log anew", log=None)
wrong_file("a_task_per_gpu", "each is a torchrun that starts . ranks", tasks="--ntasks-per-node={gpus}")
wrong_file(
    "corrects_the_tasks_at_srun", "it follows SLURM_NTASKS", tasks="--ntasks-per-node={gpus}",
    step=STEP + " --ntasks-per-node=1",
)  # fmt: skip
wrong_file("one_task", "some machines have no task", tasks="--ntasks=1")
wrong_file("without_srun", "the script itself runs on the first machine only", srun="{torchrun} train.py &")
wrong_file("without_torchrun", "without torchrun", torchrun="python")
wrong_file("a_typing_error", "does not understand its options", torchrun=TORCHRUN + " --no-such-thing=1")
wrong_file("nothing_is_started", "srun has to start torchrun", srun="srun {step} tochrun {meet} train.py &")
wrong_file(
    "one_machine_by_default", "default is one machine",
    torchrun="torchrun --nproc-per-node {gpus} --rdzv-backend c10d {meet}",
)  # fmt: skip
wrong_file(
    "ranks_for_nnodes", "--nnodes counts the machines",
    torchrun="torchrun --nnodes $(({machines} * {gpus})) --nproc-per-node {gpus} --rdzv-backend c10d {meet}",
)  # fmt: skip
wrong_file("a_range", "goes on without machines", torchrun=TORCHRUN.replace("{machines}", "1:{machines}"))
wrong_file("one_rank", "the other GPUs have nothing to do", torchrun=TORCHRUN.replace("--nproc-per-node {gpus}", ""))
wrong_file(
    "all_ranks_on_each", "these are the ranks of all machines",
    torchrun=TORCHRUN.replace("--nproc-per-node {gpus}", "--nproc-per-node $(({machines} * {gpus}))"),
)  # fmt: skip
wrong_file("alone", "is for one machine", torchrun="torchrun --standalone --nnodes {machines} --nproc-per-node {gpus}")
wrong_file(
    "node_rank_in_the_script", "it is 0 for all", torchrun="torchrun --nnodes {machines} --nproc-per-node {gpus} {meet}",
    meet=STATIC,
)  # fmt: skip
wrong_file(
    "node_rank_in_quotes", "nobody replaces this", torchrun="torchrun --nnodes {machines} --nproc-per-node {gpus} {meet}",
    meet=STATIC.replace("$SLURM_NODEID", "'$SLURM_NODEID'"),
)  # fmt: skip
wrong_file("loopback", "each would wait for itself", head="head=localhost")
wrong_file("the_list", "short form", head="head=$SLURM_JOB_NODELIST")
wrong_file(
    "the_name_of_each", "waits there alone", port="export port=$((20000 + SLURM_JOB_ID % 10000))",
    torchrun="sh -c 'exec torchrun --nnodes $SLURM_NNODES --nproc-per-node {gpus} --rdzv-backend c10d "
    '--rdzv-endpoint $(hostname):$port "$@"\' sh',
)  # fmt: skip
wrong_file("no_meeting_place", "not told where to meet", meet="")
wrong_file(
    "the_last_machine", "has to be that of node rank 0", head="head=$(scontrol show hostnames | tail -n 1); export head",
    port="export port=$((20000 + SLURM_JOB_ID % 10000))",
    torchrun="sh -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc-per-node={gpus} --node-rank=$SLURM_PROCID "
    '--master-addr=$head --master-port=$port "$@"\' sh',
)  # fmt: skip
wrong_file("a_fixed_port", "derive it from the job's number", port="port=29500")
wrong_file("torchruns_own_port", "torchrun's default port", meet="--rdzv-endpoint $head")
wrong_file("a_hundred_ports", "need different ports", port="port=$((20000 + SLURM_JOB_ID % 100))")
wrong_file("the_job_as_port", "from the job's number|end at 65535", port="port=$SLURM_JOB_ID")
wrong_file("a_drawn_port", "drawn at random", port="port=$((20000 + $(date +%N | sed 's/^0*//') / 10 % 10000))")
wrong_file("no_cores_for_srun", "since SLURM 22.05", step="--kill-on-bad-exit=1")
wrong_file("a_core_per_rank", "these are the cores for one rank", step="-c $(({cores} / {gpus})) -K")
wrong_file("one_gpu_for_the_task", "these GPUs only", step=STEP + " --gpus-per-task=1")
wrong_file("waits_for_the_others", "until their time limit", step="-c {cores}")
wrong_file("kills_nothing", "until their time limit", step="-c {cores} --kill-on-bad-exit=0")
wrong_file(
    "srun_in_the_foreground", "only when the command in the foreground has ended", srun=SCRIPT["srun"][:-2], end=None
)
wrong_file("no_trap", "the signal has ended the script", trap=None)
wrong_file("a_trap_for_another_signal", "the signal has ended the script", trap=SCRIPT["trap"].replace("USR1", "TERM"))
wrong_file("another_job", "sbatch makes another job", trap="trap 'sbatch job.sbatch' USR1")
wrong_file("does_not_wait", "ends while srun is at work", end=None)
wrong_file("waits_without_a_number", "wait without a number gives 0", end="wait")
wrong_file("a_last_word", "exit code of a file is that of its last command", end="wait $!\necho done")
wrong_file("always_again", "again and again", end="wait $! || scontrol requeue $SLURM_JOB_ID")
wrong_file("fails_always", "would call it FAILED|back only at the signal", end="wait $!\nexit 1")


# ---- all_reduce ----


def padded(tensor, parts):
    return F.pad(tensor.reshape(-1), (0, -tensor.numel() % parts))


def restore(tensor, flat):
    tensor.copy_(flat[: tensor.numel()].view_as(tensor))


def in_three_steps(tensor, inside, across, pad=None, op=dist.ReduceOp.SUM, across_op=dist.ReduceOp.SUM):
    """The right answer, with some of its parts changed."""
    n = dist.get_world_size(inside)
    flat = padded(tensor, n if pad is None else pad(n))
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, op, group=inside)
    dist.all_reduce(part, across_op, group=across)
    dist.all_gather_into_tensor(flat, part, group=inside)
    return flat


@right("all_reduce")
def with_lists(tensor, inside, across):
    n = dist.get_world_size(inside)
    parts = list(padded(tensor, n).chunk(n))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=inside)
    dist.all_reduce(own, group=across)
    parts = [torch.empty_like(own) for _ in parts]
    dist.all_gather(parts, own, group=inside)
    restore(tensor, torch.cat(parts))


@right("all_reduce")
def all_of_it_inside(tensor, inside, across):
    """More bytes inside a machine than needed; across, each rank sends its part."""
    flat, n, rank = padded(tensor, dist.get_world_size(inside)), dist.get_world_size(inside), dist.get_rank(inside)
    dist.all_reduce(flat, group=inside)
    own = flat.chunk(n)[rank].clone()
    work = dist.all_reduce(own, group=across, async_op=True)
    work.wait()
    dist.all_gather_into_tensor(flat, own, group=inside)
    restore(tensor, flat)
    return tensor


@right("all_reduce")
def six_steps(tensor, inside, across):
    """The all-reduce across as a reduce-scatter and an all-gather."""
    n, machines = dist.get_world_size(inside), dist.get_world_size(across)
    flat = padded(tensor, n * machines)
    part = flat.new_empty(len(flat) // n)
    piece = flat.new_empty(len(flat) // n // machines)
    dist.reduce_scatter_tensor(part, flat, group=inside)
    dist.reduce_scatter_tensor(piece, part, group=across)
    dist.all_gather_into_tensor(part, piece, group=across)
    dist.all_gather_into_tensor(flat, part, group=inside)
    restore(tensor, flat)


@right("all_reduce")
def pieces_by_reduce(tensor, inside, across):
    """A reduce to each rank of the machine, and a broadcast from each; no padding."""
    flat = tensor.reshape(-1).clone()
    members, rank = dist.get_process_group_ranks(inside), dist.get_rank()
    parts = flat.tensor_split(len(members))
    for part, owner in zip(parts, members):
        if part.numel():
            dist.reduce(part, owner, group=inside)
    own = parts[members.index(rank)]
    if own.numel():
        dist.all_reduce(own, group=across)
    for part, owner in zip(parts, members):
        if part.numel():
            dist.broadcast(part, owner, group=inside)
    tensor.copy_(flat.view_as(tensor))


@right("all_reduce")
def by_functional_collectives(tensor, inside, across):
    flat = padded(tensor, dist.get_world_size(inside))
    part = functional.wait_tensor(functional.reduce_scatter_tensor(flat, "sum", 0, inside))
    part = functional.wait_tensor(functional.all_reduce(part, "sum", across))
    restore(tensor, functional.wait_tensor(functional.all_gather_tensor(part, 0, inside)))


@right("all_reduce")
def by_messages(tensor, inside, across):
    """Across, a ring of messages; inside, torch's own."""
    n, machines, place = dist.get_world_size(inside), dist.get_world_size(across), dist.get_rank(across)
    flat = padded(tensor, n * machines)
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    pieces, members = list(part.chunk(machines)), dist.get_process_group_ranks(across)
    to, of = members[(place + 1) % machines], members[(place - 1) % machines]
    for step in range(2 * (machines - 1)):
        sent, received = pieces[(place - step) % machines], pieces[(place - step - 1) % machines]
        buffer = torch.empty_like(received)
        work = dist.isend(sent.clone(), to)
        dist.recv(buffer, of)
        work.wait()
        received.copy_(buffer + received if step < machines - 1 else buffer)
    dist.all_gather_into_tensor(flat, part, group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "digits are lost|with more bytes than the tensor has")
def in_float32(tensor, inside, across):
    flat = tensor.float()
    restore(tensor, in_three_steps(flat, inside, across).to(tensor.dtype))


@wrong("all_reduce", "digits are lost")
def half_of_the_bytes(tensor, inside, across):
    if tensor.dtype != torch.float32:
        return restore(tensor, in_three_steps(tensor, inside, across))
    return restore(tensor, in_three_steps(tensor.bfloat16(), inside, across).float())


BUFFERS = {}


@wrong("all_reduce", "")
def a_buffer_for_each_size(tensor, inside, across):
    n = dist.get_world_size(inside)
    flat = BUFFERS.setdefault(tensor.numel(), padded(tensor, n).clone())
    flat[: tensor.numel()] = tensor.reshape(-1)
    restore(tensor, in_three_steps(flat, inside, across).to(tensor.dtype))


@wrong("all_reduce", "a ring of all ranks")
def one_ring(tensor, inside, across):
    flat = tensor.contiguous()
    dist.all_reduce(flat)
    tensor.copy_(flat)


@wrong("all_reduce", "sends the whole tensor across")
def one_leader(tensor, inside, across):
    """The lesson's hierarchy."""
    leader = dist.get_process_group_ranks(inside)[0]
    flat = tensor.contiguous()
    dist.reduce(flat, leader, group=inside)
    if dist.get_rank() == leader:
        dist.all_reduce(flat, group=across)
    dist.broadcast(flat, leader, group=inside)
    tensor.copy_(flat)


@wrong("all_reduce", "sends the whole tensor across")
def all_of_it_twice(tensor, inside, across):
    flat = tensor.contiguous()
    dist.all_reduce(flat, group=inside)
    dist.all_reduce(flat, group=across)
    tensor.copy_(flat)


@wrong("all_reduce", "sends the whole tensor across|a whole all-reduce goes across")
def the_groups_the_other_way_round(tensor, inside, across):
    restore(tensor, in_three_steps(tensor, across, inside))


@wrong("all_reduce", "the other machines are missing")
def only_inside(tensor, inside, across):
    flat = tensor.contiguous()
    dist.all_reduce(flat, group=inside)
    tensor.copy_(flat)


@wrong("all_reduce", "the other ranks of each machine are missing")
def only_across(tensor, inside, across):
    flat = tensor.contiguous()
    dist.all_reduce(flat, group=across)
    tensor.copy_(flat)


@wrong("all_reduce", "the given tensor is unchanged")
def forgets_to_write_it_back(tensor, inside, across):
    in_three_steps(tensor.clone(), inside, across)


@wrong("all_reduce", "copy the result into it")
def returns_another_tensor(tensor, inside, across):
    return in_three_steps(tensor, inside, across)[: tensor.numel()].view_as(tensor)


@wrong("all_reduce", "return nothing, or this tensor")
def returns_a_list(tensor, inside, across):
    restore(tensor, in_three_steps(tensor, inside, across))
    return [tensor]


@wrong("all_reduce", "Check failed|size|shape|divisible", "your code raised")
def without_padding(tensor, inside, across):
    restore(tensor, in_three_steps(tensor, inside, across, pad=lambda n: 1))


@wrong("all_reduce", "keep its dtype")
def in_float64(tensor, inside, across):
    flat = in_three_steps(tensor.double(), inside, across)
    restore(tensor, flat.to(tensor.dtype))


@wrong("all_reduce", "more than an n-th of the tensor")
def pads_too_much(tensor, inside, across):
    restore(tensor, in_three_steps(tensor, inside, across, pad=lambda n: 64 * n))


@wrong("all_reduce", "wait for the work")
def does_not_wait(tensor, inside, across):
    n = dist.get_world_size(inside)
    flat = padded(tensor, n)
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    dist.all_reduce(part, group=across, async_op=True)
    dist.all_gather_into_tensor(flat, part, group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "the other ranks|a part of the numbers|right places|other machines are missing")
def forgets_the_gather(tensor, inside, across):
    n = dist.get_world_size(inside)
    flat = padded(tensor, n).clone()
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    dist.all_reduce(part, group=across)
    flat.chunk(n)[dist.get_rank(inside)].copy_(part)
    restore(tensor, flat)


@wrong("all_reduce", "the other machines are missing")
def forgets_the_middle(tensor, inside, across):
    n = dist.get_world_size(inside)
    flat = padded(tensor, n)
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    dist.all_gather_into_tensor(flat, part, group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "this is the mean|right places|a part of the numbers")
def the_mean(tensor, inside, across):
    restore(tensor, in_three_steps(tensor, inside, across) // dist.get_world_size())


@wrong("all_reduce", "right places")
def the_order_of_memory(tensor, inside, across):
    """Wrong for a transposed view: the parts go back in another order."""
    flat = in_three_steps(tensor, inside, across)
    tensor.T.copy_(flat[: tensor.numel()].view(tensor.T.shape))


@wrong("all_reduce", "each part was added up twice|added up too often|a part of the numbers")
def twice_inside(tensor, inside, across):
    flat = in_three_steps(tensor, inside, across)
    dist.all_reduce(flat, group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "several all-reduces across")
def twice_across(tensor, inside, across):
    n = dist.get_world_size(inside)
    flat = padded(tensor, n)
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    largest = part.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=across)
    dist.all_reduce(part, group=across)
    dist.all_gather_into_tensor(flat, part, group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "to every machine, m - 1 times")
def gathers_the_parts(tensor, inside, across):
    """As cheap as an all-reduce on two machines, but not on three."""
    n = dist.get_world_size(inside)
    flat = padded(tensor, n)
    part = torch.empty_like(flat[: len(flat) // n])
    dist.reduce_scatter_tensor(part, flat, group=inside)
    gathered = [torch.empty_like(part) for _ in range(dist.get_world_size(across))]
    dist.all_gather(gathered, part, group=across)
    dist.all_gather_into_tensor(flat, sum(gathered), group=inside)
    restore(tensor, flat)


@wrong("all_reduce", "a ring of all ranks|more than a whole|sends the whole")
def gathers_everything(tensor, inside, across):
    flat = tensor.reshape(-1).contiguous()
    everything = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, flat)
    tensor.copy_(sum(everything).view_as(tensor))


@wrong("all_reduce", "a part of the numbers|right places|group|rank", "failed|your code raised")
def counts_the_machines_by_rank(tensor, inside, across):
    """Takes the ranks of a machine for neighbours."""
    n, rank = dist.get_world_size(inside), dist.get_rank()
    flat = padded(tensor, n)
    parts = [torch.empty_like(flat[: len(flat) // n]) for _ in range(n)]
    own = parts[rank % n]
    dist.reduce_scatter_tensor(own, flat, group=inside)
    dist.all_reduce(own, group=across)
    gathered = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(gathered, own, group=inside)
    first = rank // n * n
    restore(tensor, torch.cat([gathered[(dist.get_rank(inside) - (rank - first) + k) % n] for k in range(n)]))


# ---- meeting_place ----


def fitting(hosts, loopback=False, down=False, doubles=False, missing=0):
    """The networks that reach all hosts, each a list of interfaces."""
    found = {}
    for host in hosts:
        for interface in host["interfaces"]:
            network = ip_interface(interface["address"]).network
            if (interface["up"] or down) and (loopback or not network.is_loopback):
                found.setdefault(network, {})[host["name"]] = interface
    chosen = []
    for members in found.values():
        addresses = {interface["address"] for interface in members.values()}
        if len(members) >= len(hosts) - missing and (doubles or len(addresses) == len(members)):
            chosen.append([members.get(host["name"]) for host in hosts])
    return chosen


def slowest(interfaces):
    return min(interface["speed"] for interface in interfaces if interface)


def fastest(interfaces):
    return max(interface["speed"] for interface in interfaces if interface)


def good(host, ports, taken=True, blocked=True):
    closed = set(host["taken"] if taken else []) | set(host["blocked"] if blocked else [])
    return [port for port in ports if port not in closed]


def bare(interface):
    return interface["address"].split("/")[0]


def meet(hosts, ports, networks, speed=slowest, ports_of=good):
    if not networks:
        return None
    best = max(networks, key=speed)
    names = [interface and interface["name"] for interface in best]
    for host, interface in zip(hosts, best):
        if interface and (found := ports_of(host, ports)):
            return bare(interface), found[0], names
    return None


@right("meeting_place")
def by_helpers(hosts, ports):
    return meet(hosts, ports, fitting(hosts))


@right("meeting_place")
def the_last_host_that_can(hosts, ports):
    networks = fitting(hosts)
    if not networks:
        return None
    best = max(networks, key=slowest)
    for host, interface in reversed(list(zip(hosts, best))):
        if found := good(host, ports):
            return [bare(interface), found[-1], tuple(each["name"] for each in best)]


@right("meeting_place")
def with_sets_and_pairs(hosts, ports):
    of_hosts = [
        {
            ip_interface(i["address"]).network: (i["speed"], i["name"], ip_interface(i["address"]).ip)
            for i in host["interfaces"]
            if i["up"]
        }
        for host in hosts
    ]
    common = set.intersection(*map(set, of_hosts))
    speeds = []
    for network in common:
        own = [each[network] for each in of_hosts]
        if len({address for _, _, address in own}) == len(hosts):
            speeds.append((min(speed for speed, _, _ in own), str(network), network))
    if not speeds:
        return None
    network = max(speeds)[2]
    for host, each in zip(hosts, of_hosts):
        free = sorted(set(ports) - set(host["taken"]) - set(host["blocked"]))
        if free:
            return (str(each[network][2]), free[0], [each[network][1] for each in of_hosts])
    return None


@right("meeting_place")
def an_address_object_and_numpy(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (ipaddress.ip_address(found[0]), np.int64(found[1]), found[2])


@right("meeting_place")
def asks_whether_an_address_is_in_a_network(hosts, ports):
    first = [i for i in hosts[0]["interfaces"] if i["up"]]
    choices = []
    for interface in first:
        network = ip_network(interface["address"], strict=False)
        members = []
        for host in hosts:
            members += [i for i in host["interfaces"] if i["up"] and ip_network(i["address"], strict=False) == network]
        if network.is_loopback or len({i["address"] for i in members}) != len(hosts):
            continue
        choices.append(members)
    return meet(hosts, ports, choices)


@right("meeting_place")
def a_name_where_all_know_it(hosts, ports):
    networks = fitting(hosts)
    found = meet(hosts, ports, networks)
    if found is None:
        return None
    address, port, names = found
    best = max(networks, key=slowest)
    place = [bare(interface) for interface in best].index(address)
    name = hosts[place]["name"]
    others = [host for host in hosts if host["name"] != name]
    if all(host["resolves"].get(name) == address for host in others):
        return name, port, names
    return address, port, names


@right("meeting_place")
def sorts_by_speed_and_takes_the_first_with_a_port(hosts, ports):
    for network in sorted(fitting(hosts), key=slowest, reverse=True):
        if found := meet(hosts, ports, [network]):
            return found
    return None


@right("meeting_place")
def computes_with_bits(hosts, ports):
    def network(address):
        text, prefix = address.split("/")
        number = 0
        for part in text.split("."):
            number = number * 256 + int(part)
        return number >> (32 - int(prefix)), prefix

    found = {}
    for host in hosts:
        for i in host["interfaces"]:
            if i["up"] and i["name"] != "lo":
                found.setdefault(network(i["address"]), []).append(i)
    fit = [members for members in found.values() if len({i["address"] for i in members}) == len(hosts) == len(members)]
    return meet(hosts, ports, fit)


def members_of(hosts, same):
    """Networks of the first host's interfaces, with what `same` finds on the others."""
    found = []
    for first in hosts[0]["interfaces"]:
        members = [[i for i in host["interfaces"] if i["up"] and same(first, i)] for host in hosts]
        if first["name"] != "lo" and first["up"] and all(members):
            found.append([own[0] for own in members])
    return found


def differ(members):
    return len({i["address"] for i in members}) == len(members)


@wrong("meeting_place", "in different ones|there is a way")
def without_the_length(hosts, ports):
    """10.0.0.0/16 and 10.0.0.0/24 begin with the same address."""
    address = lambda i: ip_interface(i["address"]).network.network_address
    return meet(hosts, ports, [m for m in members_of(hosts, lambda a, b: address(a) == address(b)) if differ(m)])


@wrong("meeting_place", "in different ones|there is a way|several hosts")
def by_the_first_hosts_length(hosts, ports):
    inside = lambda a, b: ipaddress.ip_address(bare(b)) in ip_interface(a["address"]).network
    return meet(hosts, ports, [m for m in members_of(hosts, inside) if differ(m)])


@wrong("meeting_place", "several hosts have the address")
def a_bridge_is_on_all_hosts(hosts, ports):
    """Two of three hosts with one address are enough."""
    networks = [m for m in fitting(hosts, doubles=True) if len({i["address"] for i in m}) > 1]
    return meet(hosts, ports, networks)


@wrong("meeting_place", "there is a way|as slow as its slowest link")
def private_networks_only(hosts, ports):
    return meet(hosts, ports, [m for m in fitting(hosts) if ip_interface(m[0]["address"]).is_private])


@wrong("meeting_place", "there is a way")
def only_with_a_speed(hosts, ports):
    return meet(hosts, ports, [m for m in fitting(hosts) if slowest(m) > 0])


@wrong("meeting_place", "not one of those to choose from|the firewall|listens")
def between_the_ports(hosts, ports):
    return meet(hosts, range(min(ports), max(ports) + 1), fitting(hosts))


@wrong("meeting_place", "is not its address in|does not know the name")
def a_name_that_somebody_knows(hosts, ports):
    networks = fitting(hosts)
    found = meet(hosts, ports, networks)
    if found:
        best = max(networks, key=slowest)
        name = hosts[[bare(interface) for interface in best].index(found[0])]["name"]
        if any(host["resolves"].get(name) == found[0] for host in hosts):
            return name, *found[1:]
    return found


@wrong("meeting_place", "has no interface|in different ones|is down on")
def hosts_by_name(hosts, ports):
    hosts = sorted(hosts, key=lambda host: host["name"])
    return meet(hosts, ports, fitting(hosts))


@wrong("meeting_place", "several hosts have the address 1(72.17.0.1|92.168.122.1)")
def takes_dockers_bridge(hosts, ports):
    return meet(hosts, ports, fitting(hosts, doubles=True))


@wrong("meeting_place", "is down on node")
def does_not_look_whether_it_is_up(hosts, ports):
    return meet(hosts, ports, fitting(hosts, down=True))


@wrong("meeting_place", "a ring is as slow as its slowest link")
def the_fastest_single_interface(hosts, ports):
    return meet(hosts, ports, fitting(hosts), speed=fastest)


@wrong("meeting_place", "a ring is as slow as its slowest link")
def the_first_that_fits(hosts, ports):
    return meet(hosts, ports, fitting(hosts), speed=lambda _: 0)


@wrong("meeting_place", "a ring is as slow as its slowest link")
def the_slowest_network(hosts, ports):
    return meet(hosts, ports, fitting(hosts), speed=lambda own: -slowest(own))


@wrong("meeting_place", "a ring is as slow as its slowest link")
def the_mean_speed(hosts, ports):
    return meet(hosts, ports, fitting(hosts), speed=lambda own: sum(i["speed"] for i in own))


@wrong("meeting_place", "has no interface|a name of an interface|the name of its interface")
def a_network_that_does_not_reach_all(hosts, ports):
    return meet(hosts, ports, fitting(hosts, missing=1))


@wrong("meeting_place", "lo leads to the host itself")
def loopback_is_on_all_hosts(hosts, ports):
    chosen = [own for own in fitting(hosts, loopback=True, doubles=True) if own[0]["name"] == "lo"]
    return meet(hosts, ports, chosen)


@wrong("meeting_place", "interfaces may have other names|is down|in different ones|slowest link")
def the_first_hosts_name_for_all(hosts, ports):
    address, port, names = meet(hosts, ports, fitting(hosts)) or ("", 0, [])
    return names and (address, port, [names[0]] * len(hosts)) or None


@wrong(
    "meeting_place", "which network it is in, and these are in different ones|is down|several hosts have the address"
)
def each_hosts_fastest_interface(hosts, ports):
    best = [max((i for i in host["interfaces"] if i["name"] != "docker0"), key=lambda i: i["speed"]) for host in hosts]
    found = meet(hosts, ports, fitting(hosts))
    return found and (bare(best[0]), found[1], [i["name"] for i in best])


def by_beginnings(hosts, ports, parts):
    found = {}
    for host in hosts:
        for i in host["interfaces"]:
            if i["up"] and i["name"] not in ("lo", "docker0"):
                key = ".".join(i["address"].split(".")[:parts])
                found.setdefault(key, {})[host["name"]] = i
    fit = [list(own.values()) for own in found.values() if len(own) == len(hosts)]
    return meet(hosts, ports, fit)


@wrong("meeting_place", "these are in different ones|slowest link|there is a way")
def compares_three_parts_of_the_address(hosts, ports):
    return by_beginnings(hosts, ports, 3)


@wrong("meeting_place", "these are in different ones|several hosts have|there is a way")
def compares_two_parts_of_the_address(hosts, ports):
    return by_beginnings(hosts, ports, 2)


@wrong("meeting_place", "which is not its address in|does not know the name")
def a_name_for_the_address(hosts, ports):
    networks = fitting(hosts)
    found = meet(hosts, ports, networks)
    if found is None:
        return None
    best = max(networks, key=slowest)
    place = [bare(interface) for interface in best].index(found[0])
    return hosts[place]["name"], *found[1:]


@wrong("meeting_place", "begins with 127 means 'this host'")
def what_its_own_hosts_file_says(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (hosts[0]["resolves"]["node0"], *found[1:])


@wrong("meeting_place", "this address is not in|begins with 127|no host has|return three things|is an address, without")
def what_the_others_hosts_file_says(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (hosts[1]["resolves"]["node0"], *found[1:])


@wrong("meeting_place", "without its prefix")
def with_the_prefix(hosts, ports):
    networks = fitting(hosts)
    found = meet(hosts, ports, networks)
    return found and (f"{found[0]}/24", *found[1:])


@wrong("meeting_place", "no host has this address")
def the_networks_own_address(hosts, ports):
    networks = fitting(hosts)
    found = meet(hosts, ports, networks)
    best = networks and ip_interface(max(networks, key=slowest)[0]["address"]).network
    return found and (str(best.network_address), *found[1:])


@wrong("meeting_place", "somebody listens at this port already")
def does_not_look_at_taken_ports(hosts, ports):
    ports_of = lambda host, ports: good(host, ports, taken=False)
    return meet(hosts, ports, fitting(hosts), ports_of=ports_of)


@wrong("meeting_place", "the firewall of this host drops")
def does_not_ask_the_firewall(hosts, ports):
    ports_of = lambda host, ports: good(host, ports, blocked=False)
    return meet(hosts, ports, fitting(hosts), ports_of=ports_of)


@wrong("meeting_place", "not one of those to choose from")
def torchruns_usual_port(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (found[0], 29500, found[2])


@wrong("meeting_place", "a whole number")
def a_port_as_text(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (found[0], str(found[1]), found[2])


@wrong("meeting_place", "has no good port, but node. has")
def gives_up_at_the_first_host(hosts, ports):
    return meet(hosts, ports, fitting(hosts)) if good(hosts[0], ports) else None


@wrong("meeting_place", "the firewall of this host drops|somebody listens")
def a_port_of_any_host(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    free = [port for host in hosts for port in good(host, ports)]
    best = max(fitting(hosts), key=slowest) if found else None
    return found and (bare(best[0]), free[0], found[2])


@wrong("meeting_place", "each of these ports is taken or blocked: return None")
def takes_a_port_anyway(hosts, ports):
    ports_of = lambda host, ports: good(host, ports) or [ports[0]]
    networks = fitting(hosts)
    if networks and not good(hosts[0], ports):
        for host in hosts:
            if good(host, ports):
                return meet(hosts, ports, networks)
    return meet(hosts, ports, networks, ports_of=ports_of)


@wrong("meeting_place", "ValueError|IndexError", "your code raised")
def does_not_think_of_no_network(hosts, ports):
    best = max(fitting(hosts), key=slowest)
    return meet(hosts, ports, [best])


@wrong("meeting_place", "return three things")
def a_pair(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and found[:2]


@wrong("meeting_place", "return three things")
def interfaces_by_name(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    names = found and dict(zip((host["name"] for host in hosts), found[2]))
    return found and (*found[:2], names)


@wrong("meeting_place", "there is a way")
def always_none(hosts, ports):
    return None


# ---- second_machine ----


def step(machines, sample, batch, gradient, delay, bandwidth):
    message = delay + gradient / machines / bandwidth
    return sample * math.ceil(batch / machines) + 2 * (machines - 1) * message


def pays(machines, sample, batch, gradient, delay):
    saved = sample * (batch - math.ceil(batch / machines)) - 2 * (machines - 1) * delay
    return 2 * (machines - 1) / machines * gradient / saved if saved > 0 else math.inf


@right("second_machine", several=True)
def both_as_helpers():
    return step, pays


@right("second_machine", several=True)
def round_by_round():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        seconds = sample * max(len(range(rank, batch, machines)) for rank in range(machines))
        for _ in ("reduce-scatter", "all-gather"):
            for _ in range(machines - 1):
                seconds += delay + gradient / machines / bandwidth
        return seconds

    return step_seconds, pays


@right("second_machine", several=True)
def with_whole_numbers_rounded_up():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        computing = -(-batch // machines) * sample
        ring = 2 * (machines - 1) / machines * gradient / bandwidth
        return computing + ring + 2 * (machines - 1) * delay

    return step_seconds, pays


@right("second_machine", several=True)
def as_numpy_numbers():
    def step_seconds(*case):
        return np.float64(step(*case))

    def bandwidth_that_pays(*case):
        return np.float64(pays(*case))

    return step_seconds, bandwidth_that_pays


@right("second_machine", several=True)
def as_tensors():
    def step_seconds(*case):
        return torch.tensor(step(*case), dtype=torch.float64)

    return step_seconds, pays


@right("second_machine", several=True)
def searches_for_the_bandwidth():
    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        alone = sample * batch
        if step(machines, sample, batch, gradient, delay, math.inf) >= alone:
            return math.inf
        low, high = 1e-3, 1e18
        for _ in range(300):
            middle = math.sqrt(low * high)
            slower = step(machines, sample, batch, gradient, delay, middle) > alone
            low, high = (middle, high) if slower else (low, middle)
        return high

    return step, bandwidth_that_pays


@right("second_machine", several=True)
def uses_one_for_the_other():
    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        """A step without bytes leaves so much for them."""
        nothing = step(machines, sample, batch, 0, delay, 1.0)
        left = step(1, sample, batch, 0, delay, 1.0) - nothing
        seconds = step(machines, 0, 0, gradient, 0.0, 1.0)  # with a byte per second
        return seconds / left if left > 0 else float("inf")

    return step, bandwidth_that_pays


@right("second_machine", several=True)
def with_divmod_and_a_special_case():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        whole, rest = divmod(batch, machines)
        computing = (whole + (rest > 0)) * sample
        if machines == 1:
            return computing
        return computing + (2 * machines - 2) * (delay + gradient / (machines * bandwidth))

    return step_seconds, pays


def a_step(computing=None, messages=None, share=None, times=None, scale=1):
    """step_seconds with another part, and the right bandwidth_that_pays."""

    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        n = machines
        seconds = sample * (computing(batch, n) if computing else math.ceil(batch / n))
        rounds = messages(n) if messages else 2 * (n - 1)
        size = gradient / (share(n) if share else n) * scale
        return seconds + (times(n) if times else rounds) * delay + rounds * size / bandwidth

    return step_seconds, pays


@wrong("second_machine", "samples cannot be divided", several=True)
def divides_samples():
    return a_step(computing=lambda batch, n: batch / n)


@wrong("second_machine", "the rest of the batch is left out", several=True)
def leaves_out_the_rest():
    return a_step(computing=lambda batch, n: batch // n)


@wrong("second_machine", "round up, not to the nearest", several=True)
def rounds_to_the_nearest():
    return a_step(computing=lambda batch, n: round(batch / n))


@wrong("second_machine", "each machine computes only its part", several=True)
def computes_the_whole_batch():
    return a_step(computing=lambda batch, n: batch)


@wrong("second_machine", "the computing is missing", several=True)
def only_communicates():
    return a_step(computing=lambda batch, n: 0)


@wrong("second_machine", "this is only one round of the ring", several=True)
def one_round():
    return a_step(messages=lambda n: n - 1)


@wrong("second_machine", "n - 1 steps in each of its two rounds", several=True)
def one_message_too_many_per_round():
    return a_step(messages=lambda n: 2 * n)


@wrong("second_machine", "each message of the ring has a part of the gradient", several=True)
def whole_gradients_in_each_message():
    return a_step(share=lambda n: 1)


@wrong("second_machine", "2 \\(n - 1\\) of", several=True)
def the_delay_once():
    return a_step(times=lambda n: 1)


@wrong("second_machine", "2 \\(n - 1\\) of", several=True)
def a_delay_per_round():
    return a_step(times=lambda n: 2)


@wrong("second_machine", "the delay is missing", several=True)
def no_delay():
    return a_step(times=lambda n: 0)


@wrong("second_machine", "in both rounds of the ring", several=True)
def delays_of_one_round():
    return a_step(times=lambda n: n - 1)


@wrong("second_machine", "the delay is not", several=True)
def divides_the_delay_too():
    return a_step(times=lambda n: 2 * (n - 1) / n)


@wrong("second_machine", "not in bits", several=True)
def takes_bytes_for_bits():
    return a_step(scale=8)


@wrong("second_machine", "gradient is in bytes already", several=True)
def counts_four_bytes_per_byte():
    return a_step(scale=4)


@wrong("second_machine", "nothing overlaps here", several=True)
def overlaps():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        message = delay + gradient / machines / bandwidth
        return max(sample * math.ceil(batch / machines), 2 * (machines - 1) * message)

    return step_seconds, pays


@wrong("second_machine", "this is one message with the whole gradient", several=True)
def one_message():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        return sample * math.ceil(batch / machines) + delay + gradient / bandwidth

    return step_seconds, pays


@wrong("second_machine", "as for two machines without a delay", several=True)
def the_lessons_formula():
    """computing + bytes * beta, as the lesson predicts two machines."""

    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        return sample * math.ceil(batch / machines) + gradient / bandwidth

    return step_seconds, pays


@wrong("second_machine", "to each other one", several=True)
def sends_to_each_other_machine():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        sent = (machines - 1) * (delay + gradient / bandwidth)
        return sample * math.ceil(batch / machines) + sent

    return step_seconds, pays


@wrong("second_machine", "these are milliseconds", several=True)
def in_milliseconds():
    return lambda *case: 1e3 * step(*case), pays


@wrong("second_machine", "without a return statement", several=True)
def prints_the_seconds():
    return lambda *case: print(step(*case)), pays


@wrong("second_machine", "the communication is missing", several=True)
def only_computes():
    return (lambda machines, sample, batch, *_: sample * math.ceil(batch / machines), pays)


def a_threshold(total=None, left=None, none=math.inf):
    """The right step_seconds, and bandwidth_that_pays with another part."""

    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        n = machines
        size = total(n) * gradient if total else 2 * (n - 1) / n * gradient
        alone, computing = sample * batch, sample * math.ceil(batch / n)
        saved = alone - computing - 2 * (n - 1) * delay
        if left:
            saved = left(n, alone, computing, delay)
        return size / saved if saved > 0 else none

    return step, bandwidth_that_pays


@wrong("second_machine", "where the delays take longer", several=True)
def a_negative_bandwidth():
    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        saved = sample * (batch - math.ceil(batch / machines)) - 2 * (machines - 1) * delay
        return 2 * (machines - 1) / machines * gradient / saved

    return step, bandwidth_that_pays


@wrong("second_machine", "where the delays take longer", several=True)
def zero_for_never():
    return a_threshold(none=0.0)


@wrong("second_machine", "return one number, the bytes per second, or math.inf|without a return", several=True)
def none_for_never():
    return a_threshold(none=None)


@wrong("second_machine", "the delays take a part of what is saved", several=True)
def forgets_the_delays():
    return a_threshold(left=lambda n, alone, computing, delay: alone - computing)


@wrong("second_machine", "each waits for the delay", several=True)
def subtracts_one_delay():
    return a_threshold(left=lambda n, alone, computing, delay: alone - computing - delay)


@wrong("second_machine", "the gradient once for two machines only", several=True)
def the_gradient_once():
    return a_threshold(total=lambda n: 1)


@wrong("second_machine", "less than twice", several=True)
def the_gradient_twice():
    return a_threshold(total=lambda n: 2)


@wrong("second_machine", "only one round of the ring", several=True)
def bytes_of_one_round():
    return a_threshold(total=lambda n: (n - 1) / n)


@wrong("second_machine", "return bytes per second", several=True)
def bits_per_second():
    return a_threshold(total=lambda n: 16 * (n - 1) / n)


@wrong("second_machine", "some machines get one more", several=True)
def saves_divided_samples():
    return a_threshold(left=lambda n, alone, computing, delay: alone - alone / n - 2 * (n - 1) * delay)


@wrong("second_machine", "the machines compute, too", several=True)
def forgets_that_they_compute():
    return a_threshold(left=lambda n, alone, computing, delay: alone - 2 * (n - 1) * delay)


@wrong("second_machine", "in the time that is saved", several=True)
def in_the_time_of_computing():
    return a_threshold(left=lambda n, alone, computing, delay: computing - 2 * (n - 1) * delay)


# ---- survive_preemption ----

BOTH = (signal.SIGTERM, signal.SIGUSR1)


class Run:
    """A right answer in parts, of which each mistake replaces one."""

    kinds = BOTH

    def __init__(self, network, samples, batches, path):
        self.network, self.batches, self.path = network, batches, path
        self.inputs, self.labels = samples
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        self.losses, self.signals = [], []
        for kind in self.kinds:
            signal.signal(kind, self.told)

    def told(self, number, frame):
        self.signals.append(number)

    def state(self):
        parts = {"network": self.network.state_dict(), "losses": self.losses}
        return parts | {"optimizer": self.optimizer.state_dict()}

    def load(self):
        if self.path.exists():
            found = torch.load(self.path, weights_only=True)
            self.network.load_state_dict(found["network"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.losses = found["losses"]

    def save(self):
        if self.rank == 0:
            temporary = self.path.with_suffix(".tmp")
            torch.save(self.state(), temporary)
            os.replace(temporary, self.path)
        dist.barrier()

    def mine(self, batch):
        return batch[self.rank :: self.ranks]

    def backward(self, batch):
        """The gradients of this rank's part, added up over the ranks; return the part
        of the loss.
        """
        own = self.mine(batch)
        outputs = self.network(self.inputs[own])
        loss = F.cross_entropy(outputs, self.labels[own], reduction="sum") / len(batch)
        loss.backward()
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.grad)
        return loss.item()

    def update(self, batch):
        self.optimizer.zero_grad()
        part = self.backward(batch)
        self.optimizer.step()
        total = torch.tensor(part, dtype=torch.float64)
        dist.all_reduce(total)
        self.losses.append(total.item())

    def stops(self):
        flag = torch.tensor(len(self.signals))
        dist.all_reduce(flag)
        return flag.item() > 0

    def rest(self):
        return self.batches[len(self.losses) :]

    def train(self):
        self.load()
        for batch in self.rest():
            self.update(batch)
            if self.stops():
                self.save()
                break
        return self.losses


def training(kind):
    """The function that trains with a kind of Run."""

    def train(network, samples, batches, path):
        return kind(network, samples, batches, path).train()

    train.__name__ = kind.__name__
    return train


def right_run(kind):
    right("survive_preemption")(training(kind))
    return kind


def wrong_run(pattern, status="failed"):
    def register(kind):
        wrong("survive_preemption", pattern, status)(training(kind))
        return kind

    return register


@right_run
class InParts(Run):
    pass


@right("survive_preemption")
def with_ddp(network, samples, batches, path):
    inputs, labels = samples
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, stop = [], threading.Event()
    for kind in BOTH:
        signal.signal(kind, lambda *_: stop.set())
    found = [torch.load(path) if rank == 0 and path.is_file() else None]
    dist.broadcast_object_list(found)
    if found[0]:
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
        losses = found[0]["losses"]
    while len(losses) < len(batches):
        batch = batches[len(losses)]
        mine = batch.tensor_split(ranks)[rank]
        loss = F.cross_entropy(model(inputs[mine]), labels[mine]) * len(mine) / len(batch)
        optimizer.zero_grad(set_to_none=True)
        (loss * ranks).backward()
        optimizer.step()
        told = [None] * ranks
        dist.all_gather_object(told, (loss.item(), stop.is_set()))
        losses.append(sum(part for part, _ in told))
        if any(is_set for _, is_set in told):
            if rank == 0:
                content = io.BytesIO()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"losses": losses}, content)
                with open(f"{path}.new", "wb") as file:
                    file.write(content.getvalue())
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(f"{path}.new", path)
            dist.barrier()
            return losses
    return losses


@right_run
class SavesAfterEachUpdate(Run):
    def train(self):
        self.load()
        for batch in self.rest():
            self.update(batch)
            self.save()
            if self.stops():
                break
        return self.losses


@right_run
class LooksBeforeEachUpdate(Run):
    def train(self):
        self.load()
        for batch in self.rest():
            if self.stops():
                self.save()
                break
            self.update(batch)
        return self.losses


@right_run
class BlocksSignalsAndAsks(Run):
    """No handler: the system keeps the signals until somebody asks."""

    def __init__(self, *given):
        super().__init__(*given)
        signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)

    def stops(self):
        while pending := signal.sigpending() & set(BOTH):
            self.signals.append(signal.sigwait(pending))
        return super().stops()


@right_run
class TheLargestFlag(Run):
    def stops(self):
        flag = torch.tensor([bool(self.signals)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@right_run
class OneSampleAtATime(Run):
    """Micro-batches of one sample, in the order of the batch."""

    def backward(self, batch):
        part = 0.0
        for number in batch.chunk(self.ranks)[self.rank] if self.ranks < 4 else self.mine(batch):
            outputs = self.network(self.inputs[number : number + 1])
            loss = F.cross_entropy(outputs, self.labels[number : number + 1]) / len(batch)
            loss.backward()
            part += loss.item()
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.grad)
        return part


@right_run
class OneMessageForAll(Run):
    """Gradients, loss and flag travel together: a signal after that waits one update."""

    def update(self, batch):
        own = self.mine(batch)
        loss = F.cross_entropy(self.network(self.inputs[own]), self.labels[own], reduction="sum")
        parameters = list(self.network.parameters())
        gradients = torch.autograd.grad(loss / len(batch), parameters)
        news = torch.tensor([loss.item() / len(batch), len(self.signals)]).double()
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), news])
        dist.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters] + [2])):
            parameter.grad = part.view_as(parameter).clone()
        self.optimizer.step()
        self.losses.append(flat[-2].item())
        self.flag = flat[-1].item() > 0

    def stops(self):
        return self.flag


@right_run
class NumbersInPlaceOfFlags(Run):
    """The ranks agree on the last update; the checkpoint names its number."""

    def train(self):
        self.load()
        last = len(self.batches)
        while len(self.losses) < last:
            self.update(self.batches[len(self.losses)])
            wish = torch.tensor(len(self.losses) if self.signals else last)
            dist.all_reduce(wish, dist.ReduceOp.MIN)
            last = min(last, int(wish))
        if last < len(self.batches):
            self.save()
        return np.array(self.losses)


@right_run
class KeepsTheOldFile(Run):
    """The checkpoint before is kept as well, and is used if the newest is damaged."""

    def save(self):
        if self.rank == 0:
            if self.path.exists():
                copied = self.path.with_suffix(".old")
                copied.write_bytes(self.path.read_bytes())
            super_path, self.path = self.path, self.path.with_suffix(".next")
            torch.save(self.state(), self.path)
            self.path = self.path.replace(super_path)
        dist.barrier()


@wrong_run("without a handler, this is what a signal does")
class NoHandler(Run):
    kinds = ()


@wrong_run("SIGTERM has ended the process")
class OnlyUsr1(Run):
    kinds = (signal.SIGUSR1,)


@wrong_run("SIGUSR1 has ended the process")
class OnlyTerm(Run):
    kinds = (signal.SIGTERM,)


@wrong_run("all ranks have to stop together, and only rank 0 writes")
class EachRankForItself(Run):
    def stops(self):
        return bool(self.signals)

    def save(self):
        torch.save(self.state(), self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)


@wrong_run("the rank that has it must tell the others")
class Rank0Decides(Run):
    def stops(self):
        flag = [bool(self.signals)]
        dist.broadcast_object_list(flag)
        return flag[0]


@wrong_run("the rank that has it must tell the others")
class OnlyIfAllWereTold(Run):
    def stops(self):
        flag = torch.tensor(int(bool(self.signals)))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)


@wrong_run("the rank that has it must tell the others")
class SavesAndGoesOn(Run):
    def train(self):
        self.load()
        for batch in self.rest():
            self.update(batch)
            if self.stops():
                self.save()
        return self.losses


@wrong_run("the rank that has it must tell the others")
class IgnoresSignals(Run):
    def stops(self):
        return False


@wrong_run("only rank 0 writes")
class SavesInTheHandler(Run):
    def told(self, number, frame):
        torch.save(self.state(), self.path)
        sys.exit(0)


@wrong_run("its caller ends the program|all ranks must decide together")
class LeavesInTheHandler(Run):
    def told(self, number, frame):
        raise SystemExit(143)


@wrong_run("its caller ends the program")
class SavesAndExits(Run):
    def train(self):
        self.load()
        for batch in self.rest():
            self.update(batch)
            if self.stops():
                self.save()
                sys.exit(0)
        return self.losses


@wrong_run("all ranks must decide together")
class ACollectiveInTheHandler(Run):
    def told(self, number, frame):
        flag = torch.tensor(1)
        dist.all_reduce(flag)
        self.signals.append(number)


@wrong_run("the system kills the job some seconds after the signal")
class LooksEveryFourUpdates(Run):
    def stops(self):
        return len(self.losses) % 4 == 0 and super().stops()


@wrong_run("the momentum is lost in the restart")
class ForgetsTheOptimizer(Run):
    def load(self):
        if self.path.exists():
            found = torch.load(self.path)
            self.network.load_state_dict(found["network"])
            self.losses = found["losses"]


@wrong_run("of a network that was never trained")
class ForgetsTheNetwork(Run):
    def load(self):
        if self.path.exists():
            found = torch.load(self.path)
            self.optimizer.load_state_dict(found["optimizer"])
            self.losses = found["losses"]


@wrong_run("the training begins anew")
class NeverLoads(Run):
    def load(self):
        pass


@wrong_run("they belong into the checkpoint, too")
class ForgetsTheLosses(Run):
    def load(self):
        super().load()
        self.before, self.losses = len(self.losses), []

    def rest(self):
        return self.batches[self.before :]


@wrong_run("an update that was saved is computed again")
class RepeatsAnUpdate(Run):
    def rest(self):
        return self.batches[max(0, len(self.losses) - 1) :]


@wrong_run("updates have been left out")
class SkipsAnUpdate(Run):
    def rest(self):
        done = len(self.losses)
        return self.batches[done + (done > 0) :]


@wrong_run("before the last update|save them between two updates")
class SavesTheParametersBefore(Run):
    def update(self, batch):
        self.before = copy.deepcopy(self.network.state_dict())
        super().update(batch)

    def state(self):
        return super().state() | {"network": self.before}


@wrong_run("the file at `path` has only its first")
class WritesInPlace(Run):
    def save(self):
        if self.rank == 0:
            torch.save(self.state(), self.path)
        dist.barrier()

    def load(self):
        try:
            super().load()
        except Exception:
            self.losses = []


@wrong_run("the file at `path` has only its first")
class WritesInPlaceAndTrusts(Run):
    def save(self):
        if self.rank == 0:
            torch.save(self.state(), self.path)
        dist.barrier()


@wrong_run("leave the old one there until os.replace")
class RemovesTheOldFileFirst(Run):
    def save(self):
        if self.rank == 0:
            self.path.unlink(missing_ok=True)
            torch.save(self.state(), self.path.with_suffix(".tmp"))
            os.replace(self.path.with_suffix(".tmp"), self.path)
        dist.barrier()


@wrong_run("only rank 0 writes")
class AllRanksWrite(Run):
    def save(self):
        temporary = self.path.with_suffix(f".{self.rank}")
        torch.save(self.state(), temporary)
        os.replace(temporary, self.path)
        dist.barrier()


@wrong_run("nothing was saved")
class StopsWithoutSaving(Run):
    def save(self):
        pass


@wrong_run("all of them load the checkpoint|load its parameters from the checkpoint, on all ranks|all ranks")
class OnlyRank0Loads(Run):
    def load(self):
        if self.rank == 0:
            super().load()
        number = [self.losses]
        dist.broadcast_object_list(number)
        self.losses = number[0]


@wrong_run("the mean of their means is not")
class TheMeanOfMeans(Run):
    def backward(self, batch):
        own = self.mine(batch)
        loss = F.cross_entropy(self.network(self.inputs[own]), self.labels[own])
        loss.backward()
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks
        return loss.item() / self.ranks


@wrong_run("too small by the number of ranks")
class DividesOnceMore(Run):
    def backward(self, batch):
        part = super().backward(batch)
        for parameter in self.network.parameters():
            parameter.grad /= self.ranks
        return part


@wrong_run("trains on its own samples alone|add up the gradients")
class EachAlone(Run):
    def backward(self, batch):
        own = self.mine(batch)
        loss = F.cross_entropy(self.network(self.inputs[own]), self.labels[own])
        loss.backward()
        return loss.item() * len(own) / len(batch)


@wrong_run("each rank computes all samples of the update")
class DoesNotDivide(Run):
    def mine(self, batch):
        return batch


@wrong_run("must take each sample of an update once")
class LeavesOutTheRest(Run):
    def mine(self, batch):
        share = len(batch) // self.ranks
        return batch[self.rank * share : (self.rank + 1) * share]


@wrong_run("must take each sample of an update once")
class ShareOfTheOldRanks(Run):
    def mine(self, batch):
        return batch[self.rank :: 2]


@wrong_run("the optimizer has no momentum")
class NoMomentum(Run):
    def __init__(self, *given):
        super().__init__(*given)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)


@wrong_run("this rank's part of the loss only")
class LossOfItsOwnPart(Run):
    def update(self, batch):
        self.optimizer.zero_grad()
        part = self.backward(batch)
        self.optimizer.step()
        self.losses.append(part)


@wrong_run("without a return statement")
class ReturnsNothing(Run):
    def train(self):
        super().train()


@wrong_run("train the given network, in place")
class TrainsACopy(Run):
    def __init__(self, network, *given):
        super().__init__(copy.deepcopy(network), *given)
        self.given = network

    def train(self):
        losses = super().train()
        self.given.seen = self.network.seen
        return losses


@wrong("survive_preemption", "the mean of the cross entropy over its samples")
def the_lessons_update(network, samples, batches, path):
    """Lesson 14's own function, which takes the logarithms of probabilities."""
    inputs, labels = samples
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        mine = batch[dist.get_rank() :: dist.get_world_size()]

        class args:
            global_batch, batch_size = len(batch), len(batch)

        part = lesson14.update(model, inputs[mine], labels[mine], optimizer, args)
        dist.all_reduce(part)
        losses.append(part.item())
    return losses


@wrong("survive_preemption", "(SIGTERM|SIGUSR1) has ended the process")
def the_lessons_loop(network, samples, batches, path):
    """Lesson 14's loop with this loss: it knows no signals."""
    inputs, labels = samples
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    parts, losses = {"model": network, "optimizer": optimizer}, []
    if found := lesson14.resume(path, parts, {}):
        losses = found["losses"]
    for batch in batches[len(losses) :]:
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        loss = F.cross_entropy(model(inputs[mine]), labels[mine], reduction="sum") / len(batch)
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        if len(losses) % 5 == 0:
            lesson14.save_checkpoint(path, parts, {"losses": losses, "settings": {}})
    return losses


@wrong_run("must be able to overwrite it")
class CannotOverwriteALeftover(Run):
    def save(self):
        if self.rank == 0:
            temporary = self.path.with_suffix(".tmp")
            with open(temporary, "xb") as file:
                torch.save(self.state(), file)
            os.replace(temporary, self.path)
        dist.barrier()


@wrong_run("the checkpoint has another name")
class NeverRenames(Run):
    def save(self):
        if self.rank == 0:
            torch.save(self.state(), self.path.with_suffix(".tmp"))
        dist.barrier()


@right("second_machine", several=True)
def by_parts_of_the_batch():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        parts = [batch // machines + (rank < batch % machines) for rank in range(machines)]
        ring = sum(delay + gradient / machines / bandwidth for _ in range(2 * machines - 2))
        return max(part * sample for part in parts) + ring

    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        """By the step with two bandwidths, which is a line in 1 / bandwidth."""
        alone = step_seconds(1, sample, batch, gradient, delay, 1.0)
        least = step_seconds(machines, sample, batch, 0, delay, 1.0)
        if least >= alone:
            return float("inf")
        return 2 * (machines - 1) * gradient / (machines * (alone - least))

    return step_seconds, bandwidth_that_pays


@right("second_machine", several=True)
def with_fractions():
    from fractions import Fraction

    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        message = Fraction(delay) + Fraction(gradient, machines) / Fraction(bandwidth)
        return float(Fraction(sample) * -(-batch // machines) + (2 * machines - 2) * message)

    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        try:
            seconds = sample * (batch + (-batch // machines)) / (2 * (machines - 1)) - delay
            per_second = gradient / machines / seconds
        except ZeroDivisionError:
            return math.inf
        return per_second if per_second > 0 else math.inf

    return step_seconds, bandwidth_that_pays


@right("second_machine", several=True)
def with_numpy_and_its_ceil():
    def step_seconds(machines, sample, batch, gradient, delay, bandwidth):
        rounds = np.full(2 * (machines - 1), delay + gradient / machines / bandwidth)
        return np.ceil(batch / machines) * sample + rounds.sum()

    return step_seconds, pays


@wrong("second_machine", "ZeroDivisionError", "your code raised", several=True)
def does_not_think_of_nothing_saved():
    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        saved = sample * (batch - math.ceil(batch / machines)) - 2 * (machines - 1) * delay
        return math.inf if saved < 0 else 2 * (machines - 1) / machines * gradient / saved

    return step, bandwidth_that_pays


@wrong("second_machine", "there is a bandwidth that is enough", several=True)
def never_pays():
    return step, lambda *_: math.inf


@wrong("second_machine", "is 0 divided by 0", several=True)
def not_a_number():
    return step, lambda *_: math.nan


@wrong("second_machine", "in bytes per second here, and the gradient in bytes", several=True)
def bytes_as_bits_the_other_way():
    return a_step(scale=1 / 8)


@wrong("second_machine", "those of two rounds", several=True)
def n_messages_of_bytes():
    return a_step(messages=lambda n: n * (n > 1), times=lambda n: 2 * (n - 1))


@wrong("second_machine", "return one number, the seconds", several=True)
def as_a_text():
    return (lambda *case: f"{step(*case):.3f} s"), pays


@wrong("second_machine", "one sample too many where the batch is a multiple", several=True)
def one_sample_more_on_all():
    return a_step(computing=lambda batch, n: batch // n + 1)


@wrong("second_machine", "the largest part of the batch, times sample", several=True)
def rounded_to_milliseconds():
    return (lambda *case: round(step(*case), 3)), pays


@wrong("second_machine", "the rest of the batch is left out", several=True)
def saves_too_much():
    def bandwidth_that_pays(machines, sample, batch, gradient, delay):
        left = sample * (batch - batch // machines) - 2 * (machines - 1) * delay
        return 2 * (machines - 1) / machines * gradient / left if left > 0 else math.inf

    return step, bandwidth_that_pays


@wrong("second_machine", "each waits for the delay", several=True)
def subtracts_two_delays():
    return a_threshold(left=lambda n, alone, computing, delay: alone - computing - 2 * delay)


@wrong("second_machine", "1 / n of it", several=True)
def sends_all_of_it_each_time():
    return a_threshold(total=lambda n: 2 * (n - 1))


@wrong("second_machine", "this is the time that several machines compute", several=True)
def in_all_the_time_of_computing():
    return a_threshold(left=lambda n, alone, computing, delay: computing)


@right("meeting_place")
def with_grouped_pairs(hosts, ports):
    """Sorts (network, host) pairs, and groups them; the port is the last good one."""
    pairs = []
    for number, host in enumerate(hosts):
        for interface in filter(lambda i: i["up"], host["interfaces"]):
            pairs.append((str(ip_interface(interface["address"]).network), number, interface))
    best, speed = None, -1
    for network, group in itertools.groupby(sorted(pairs, key=lambda pair: pair[:2]), key=lambda pair: pair[0]):
        members = [interface for _, _, interface in group]
        if network.startswith("127.") or len({i["address"] for i in members}) < len(hosts):
            continue
        if (least := min(i["speed"] for i in members)) > speed:
            best, speed = members, least
    for host, interface in zip(hosts, best or []):
        for port in reversed(ports):
            if port not in host["taken"] + host["blocked"]:
                return bare(interface), port, tuple(i["name"] for i in best)
    return None


@right("meeting_place")
def network_by_network(hosts, ports):
    """Asks of each of the first host's networks what the others have in it."""
    options = []
    for first in hosts[0]["interfaces"]:
        network = ip_interface(first["address"]).network
        members = [
            [i for i in host["interfaces"] if i["up"] and ip_interface(i["address"]).network == network][:1]
            for host in hosts
        ]
        if not all(members) or network.is_loopback:
            continue
        members = [own for [own] in members]
        if len({i["address"] for i in members}) == len(hosts):
            options.append((min(i["speed"] for i in members), [i["name"] for i in members], members))
    if not options:
        return None
    _, names, members = max(options, key=lambda option: option[0])
    places = ((bare(i), port, names) for host, i in zip(hosts, members) for port in good(host, ports))
    return next(places, None)


@right("meeting_place")
def as_a_list_of_strings(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return None if found is None else [str(found[0]), np.int64(found[1]), np.array(found[2]).tolist()]


@wrong("meeting_place", "a ring is as slow as its slowest link")
def adds_up_the_speeds(hosts, ports):
    return meet(hosts, ports, fitting(hosts), speed=lambda best: sum(i["speed"] for i in best))


@wrong("meeting_place", "a ring is as slow as its slowest link")
def the_first_hosts_speed(hosts, ports):
    speed = lambda best: max(best[0]["speed"], best[1]["speed"])
    return meet(hosts, ports, fitting(hosts), speed=speed)


@wrong("meeting_place", "somebody listens at this port already")
def looks_at_the_first_host_only(hosts, ports):
    """Its ports, but another host's address."""
    found = meet(hosts, ports, fitting(hosts))
    best = found and max(fitting(hosts), key=slowest)
    free = [port for port in ports if port not in hosts[0]["blocked"]]
    return found and (bare(best[-1]), free[0], found[2])


@wrong("meeting_place", "the firewall of this host drops|has no good port|somebody listens")
def the_first_host_always(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    best = found and max(fitting(hosts), key=slowest)
    return found and (bare(best[0]), found[1], found[2])


@wrong("meeting_place", "each needs the name of its interface")
def one_name(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (*found[:2], found[2][:1])


@wrong("meeting_place", "return three things")
def names_in_a_text(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (*found[:2], ",".join(found[2]))


@wrong("meeting_place", "has no interface")
def addresses_for_names(hosts, ports):
    found, networks = meet(hosts, ports, fitting(hosts)), fitting(hosts)
    return found and (*found[:2], [bare(i) for i in max(networks, key=slowest)])


@wrong("meeting_place", "not one of those to choose from")
def the_place_of_the_port(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (found[0], ports.index(found[1]), found[2])


@wrong("meeting_place", "return three things|no network joins|there is a way")
def true_and_false(hosts, ports):
    return meet(hosts, ports, fitting(hosts)) is not None


@wrong("meeting_place", "is down on|several hosts have|there is a way|in different ones|lo leads")
def the_most_frequent_network(hosts, ports):
    """Of all interfaces, whether they are up or not."""
    names = [ip_interface(i["address"]).network for host in hosts for i in host["interfaces"] if i["name"] != "lo"]
    best = max(fitting(hosts, down=True), key=lambda own: (names.count(own[0]), slowest(own)), default=None)
    return meet(hosts, ports, [best] if best else [])


@wrong("meeting_place", "without its prefix|no host has this address")
def a_url(hosts, ports):
    found = meet(hosts, ports, fitting(hosts))
    return found and (f"tcp://{found[0]}", *found[1:])


@right_run
class LooksBeforeTheNextUpdate(Run):
    """At the beginning of the loop, so it saves what the update before has left."""

    def train(self):
        self.load()
        for batch in self.rest():
            if self.stops():
                self.save()
                return self.losses
            self.update(batch)
        return self.losses


@right_run
class GathersAllSignals(Run):
    def stops(self):
        told = [None] * self.ranks
        dist.all_gather_object(told, bool(self.signals))
        return any(told)


@right_run
class ReturnsATensorOfLosses(Run):
    def train(self):
        return torch.tensor(super().train(), dtype=torch.float64)


@wrong_run("has ended the process")
class OnlyRank0HasAHandler(Run):
    def __init__(self, *given):
        self.kinds = BOTH if dist.get_rank() == 0 else ()
        super().__init__(*given)


@wrong_run("save and return after that update")
class TwoUpdatesMore(Run):
    late = 0

    def stops(self):
        self.late += super().stops()
        return self.late > 2


@wrong_run("all ranks must decide together")
class RaisesInTheHandler(Run):
    """Leaves the update where the signal comes, and saves."""

    def told(self, number, frame):
        raise InterruptedError

    def train(self):
        try:
            return super().train()
        except InterruptedError:
            self.save()
            return self.losses


@wrong_run("and the optimizer SGD with lr=0.1")
class AnotherRate(Run):
    def __init__(self, *given):
        super().__init__(*given)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)


@wrong_run("on all ranks, before the step")
class TheLossAfterTheStep(Run):
    def update(self, batch):
        super().update(batch)
        with torch.no_grad():
            loss = F.cross_entropy(self.network.layers(self.inputs[batch][:, 1:]), self.labels[batch])
        self.losses[-1] = loss.item()


@wrong_run("without a return statement")
class OnlyRank0Returns(Run):
    def train(self):
        losses = super().train()
        return losses if self.rank == 0 else None


@wrong_run("this is the sum over the samples|that of the sum over the samples")
class AddsUpTheSamples(Run):
    def backward(self, batch):
        own = self.mine(batch)
        loss = F.cross_entropy(self.network(self.inputs[own]), self.labels[own], reduction="sum")
        loss.backward()
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.grad)
        return loss.item()


@wrong_run("this is the mean over this rank's own samples")
class TheMeanOfItsOwnSamples(Run):
    def update(self, batch):
        own = self.mine(batch)
        with torch.no_grad():
            logits = self.network.layers(self.inputs[own][:, 1:])
        loss = F.cross_entropy(logits, self.labels[own]).item()
        super().update(batch)
        self.losses[-1] = loss


@wrong_run("written over in place")
class CopiesOverTheOldFile(Run):
    def save(self):
        if self.rank == 0:
            temporary = self.path.with_suffix(".tmp")
            torch.save(self.state(), temporary)
            self.path.write_bytes(temporary.read_bytes())
        dist.barrier()


@wrong_run("SIG(TERM|USR1) has ended the process")
class TheSecondSignalKills(Run):
    def told(self, number, frame):
        super().told(number, frame)
        signal.signal(number, signal.SIG_DFL)


@wrong_run("each sample of an update once|take each sample")
class AnOrderOfItsOwn(Run):
    def mine(self, batch):
        return batch[torch.randperm(len(batch))][self.rank :: self.ranks]


@wrong_run("", "failed|your code raised")
class Chunks(Run):
    def mine(self, batch):
        return batch.chunk(self.ranks)[self.rank]


@wrong_run("SIG(TERM|USR1) has ended the process")
class ListensFromTheSecondUpdateOn(Run):
    kinds = ()

    def update(self, batch):
        super().update(batch)
        for kind in BOTH:
            signal.signal(kind, self.told)
