#!/bin/sh
# Lesson 4's program on the machines of the hostfile, by DeepSpeed's launcher and pdsh:
# sh clusters/ssh/lesson04_deepspeed.sh [flags of the program]

# Run this once, on any machine; all must have the same folders, and let you in by key.
# Of the shell's variables only some get to the machines, such as PYTHONPATH, and NCCL_*
# where there are GPUs. The rest is in a file.
export DS_ENV_FILE=clusters/ssh/deepspeed_env

# Each rank gets --local_rank=N, too. If a rank fails, deepspeed ends those on the same
# machine. The others end when a collective fails. Nothing is started again.
exec deepspeed --hostfile clusters/ssh/hostfile --launcher pdsh \
    --master_addr node0 --master_port "${MASTER_PORT:-29500}" \
    ddp_course/lesson04.py "$@"
