"""SLURM's own services that do not answer

Run:    not here: it needs a SLURM that is busy or broken
Text:   srun: error: Task launch for StepId=99121.0 failed on node gpu3: Socket timed out on send/recv
        operation
Text:   sbatch: error: Batch job submission failed: Socket timed out on send/recv operation
Text:   srun: error: Application launch failed: Socket timed out on send/recv operation
Cause:  The program has not begun. SLURM's controller, or the service on the machine that the line
        names, did not answer in time: it is overloaded, the machine hangs or has been restarted, a
        firewall is between, or its key (munge) or configuration is another.
Which:  Always the same machine: that one (`scontrol show node gpu3`). Also for sbatch and squeue: the
        controller. Only for jobs on very many machines at once: the start itself is too much.
Fix:    Try again after a minute. Leave the machine out with `--exclude=gpu3`, and report it. With many
        jobs, submit one array instead of a loop.
Lesson: 14
Source: https://github.com/aws/aws-parallelcluster/issues/4179
Source: https://github.com/mlr-org/batchtools/issues/201
"""
