"""SLURM ended the job

Run:    not here: lesson 14 runs a job that SLURM interrupts
Text:   slurmstepd: error: *** JOB 494583 ON node1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME
        LIMIT ***
Text:   slurmstepd: error: *** STEP 55595933.0 ON node1 CANCELLED AT 2025-01-10T15:27:25 DUE TO TIME
        LIMIT ***
Text:   slurmstepd: error: *** JOB 608 ON node1 CANCELLED AT 2022-08-12T02:06:12 DUE TO PREEMPTION
        ***
Text:   slurmstepd: error: *** JOB 608 ON node1 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE
        ***
Text:   srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
Cause:  SLURM stopped the job: its time was over, or a more important job needed the machine. It
        sends SIGTERM, and SIGKILL after the grace time.
Which:  The words after DUE TO tell. Without them somebody ran scancel, or a task failed and srun
        stopped the others (`srun: error: node1: task 3: Exited with exit code 1`): look for that
        task's error.
Fix:    `#SBATCH --signal=B:USR1@120` sends a warning before the end: save there, and exit so that
        `--requeue` starts the job again and it resumes (lesson 14). Ask for more time with
        `--time`.
Lesson: 14
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/20542
Source: https://github.com/facebookincubator/submitit/issues/1708
"""
