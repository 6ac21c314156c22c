"""A job of SLURM without its Python

Run:    not here: it needs a SLURM
Text:   slurmstepd: error: execve(): python: No such file or directory
Cause:  srun starts the first word behind it as a program, and the machine has none of this name in
        PATH: the environment is not activated in the job's script, the system has `python3` alone, or
        the folder with the environment is not there on that machine.
Which:  `srun which python; srun ls /path/of/the/environment` shows what the machines see.
        `Permission denied` is a script without `chmod +x`.
Fix:    Activate the environment in the job's script, in a line before srun (`source
        /path/venv/bin/activate`), or give the whole path: `srun /path/venv/bin/python train.py`. With
        a container, the path counts inside of it.
Lesson: 14
Source: https://github.com/CSCfi/pytorch-ddp-examples/issues/1
Source: https://github.com/elyall/wandb_on_slurm/issues/5
"""
