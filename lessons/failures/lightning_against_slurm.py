"""Lightning and SLURM that count other tasks

Run:    not here: it needs Lightning under SLURM
Text:   ValueError: You set `devices=4` in Lightning, but the number of tasks per node configured in
        SLURM `--ntasks-per-node=1` does not match. HINT: Set `devices=1`.
Text:   ValueError: You set `num_nodes=1` in Lightning, but the number of nodes configured in SLURM
        `--nodes=2` does not match. HINT: Set `num_nodes=2`.
Text:   RuntimeError: You set `--ntasks=2` in your SLURM bash script, but this variable is not
        supported. HINT: Use `--ntasks-per-node=2` instead.
Text:   The `srun` command is available on your system but is not used. HINT: If your intention is
        to run Lightning on SLURM, prepend your python command with `srun`
Text:   initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8
Text:   Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
Cause:  Inside a job of SLURM, Lightning starts no processes: srun starts one task per GPU, and
        Lightning takes its ranks from SLURM's variables. The job has another number of tasks or
        nodes than the Trainer expects. An error says so, or the run stops after the `MEMBER` lines,
        because the ranks that are there wait for tasks that SLURM has never started.
Which:  Count the lines with `MEMBER: n/8`: each rank prints one, so four of eight lines mean that four
        tasks are missing. If all eight are there, the cause is another one.
        `echo $SLURM_NTASKS_PER_NODE $SLURM_NNODES` in the job. torchrun wants one task per node, so a
        script that was written for torchrun has `--ntasks-per-node=1`.
Fix:    `#SBATCH --nodes=2` and `--ntasks-per-node=4` (not `--ntasks`) for `Trainer(num_nodes=2,
        devices=4)`, and start with `srun python train.py`. The hint's `devices=1` would leave the
        other GPUs idle. In an interactive job on one node, `--job-name=interactive` lets Lightning
        start its own processes.
Lesson: 14
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/18650
Source: https://github.com/Lightning-AI/pytorch-lightning/pull/18292
Source: https://github.com/Lightning-AI/pytorch-lightning/pull/15011
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/8707
"""
