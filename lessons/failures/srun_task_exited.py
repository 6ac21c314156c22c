"""A task of srun that failed

Run:    not here: lesson 14 runs jobs of SLURM
Text:   srun: error: slurm-job-compute-0-0: tasks 2-7: Exited with exit code 1
Text:   srun: error: node1: task 3: Exited with exit code 1
Text:   srun: error: node1: task 0: Killed
Text:   srun: error: node1: task 0: Segmentation fault (core dumped)
Text:   srun: Terminating StepId=9411285.0
Cause:  srun reports how its tasks ended, and not why. The error is in the output of the task that
        it names first.
Which:  Exit code 1: a Python error in that task's output. 2: wrong arguments. `Killed`: memory or
        the time limit. `Aborted`: nccl's watchdog, a consequence.
Fix:    Write the output of each task to its own file, `srun --output=log-%t.txt`, or with its
        number in front, `srun --label`, and give it to `ddp-course diagnose`.
        `--kill-on-bad-exit=1` stops the other tasks at once.
Lesson: 14
Source: https://github.com/facebookresearch/ParlAI/issues/3084
"""
