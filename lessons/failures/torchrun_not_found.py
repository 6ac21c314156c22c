"""A shell that does not find torchrun

Run:    not here: the shell's words differ
Text:   /bin/sh: 1: torchrun: not found
Text:   bash: torchrun: command not found
Text:   FileNotFoundError: [Errno 2] No such file or directory: 'torchrun'
Text:   bash: accelerate: command not found
Text:   slurmstepd: error: execve(): torchrun: No such file or directory
Cause:  torchrun is in the `bin` folder of the environment in which torch is installed, and that is
        not in PATH here: the environment is not activated, sudo or a scheduler's job started with a
        PATH of its own, or pip installed into `~/.local/bin`.
Fix:    `python -m torch.distributed.run` is the same program and needs no PATH; `python -m
        accelerate.commands.launch` is accelerate's. In a job, activate the environment in the
        script, and do not use sudo.
Lesson: 2
Source: https://github.com/hiyouga/LlamaFactory/issues/5217
"""
