"""A program for torchrun, started with python

Run:    python lessons/failures/started_without_torchrun.py
Text:   ValueError: Error initializing torch.distributed using env:// rendezvous: environment
        variable RANK expected, but not set
Text:   ValueError: Error initializing torch.distributed using env:// rendezvous: environment
        variable MASTER_ADDR expected, but not set
Text:   KeyError: 'LOCAL_RANK'
Text:   KeyError: 'RANK'
Text:   KeyError: 'WORLD_SIZE'
Text:   KeyError: 'LOCAL_WORLD_SIZE'
Text:   KeyError: 'MASTER_ADDR'
Text:   KeyError: 'MASTER_PORT'
Text:   KeyError: 'NODE_RANK'
Cause:  `init_process_group` reads who this process is from the environment, and torchrun has not
        set it: the program was started with `python train.py`, by an editor's run button, or by
        srun without torchrun.
Fix:    Start it with `torchrun --nproc_per_node 2 train.py`, or 1 for one GPU. In an editor, run
        the module `torch.distributed.run` with these arguments. Under SLURM, let each task start
        torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from SLURM's
        variables (lesson 14).
Lesson: 2
Source: https://github.com/meta-llama/llama-cookbook/issues/59
Source: https://github.com/HRNet/HRNet-Semantic-Segmentation/issues/35
"""

import torch.distributed as dist

dist.init_process_group("gloo")
