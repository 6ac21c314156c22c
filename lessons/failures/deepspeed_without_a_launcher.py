"""DeepSpeed without a launcher

Run:    python lessons/failures/deepspeed_without_a_launcher.py
Text:   ModuleNotFoundError: No module named 'mpi4py'
Cause:  The program was started with `python`, so the variables RANK, LOCAL_RANK, WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT are not set, and DeepSpeed asks MPI for them.
Which:  The frame above it is `mpi_discovery` of deepspeed/comm/comm.py. If you did start with mpirun,
        mpi4py is really missing. Otherwise it is not what you need: with it, the program would run as
        one rank.
Fix:    Start with a launcher, also on one GPU: `torchrun --nproc_per_node 1 train.py`, `deepspeed
        train.py`, or `accelerate launch --use_deepspeed train.py`. In a notebook, set the five
        variables in `os.environ` first.
Lesson: 13
Source: https://github.com/axolotl-ai-cloud/axolotl/issues/1211
Source: https://github.com/InternLM/xtuner/issues/592
Source: https://github.com/deepspeedai/DeepSpeed/pull/8444
"""

import deepspeed

deepspeed.init_distributed("gloo")
