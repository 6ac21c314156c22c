#!/bin/sh
# Lesson 4's program by torchx, which starts torchrun on what it is told, here twice on
# this machine: sh clusters/torchx/lesson04.sh [flags of the program]
# needs pip install torchx-nightly==2026.10.26

# The same line goes to a cluster: --scheduler slurm instead of local_cwd. --dryrun shows
# what that would submit. For --scheduler kubernetes, which was not run here, you need
# pip install kubernetes, and Volcano on the cluster. Even its dry run asks a Docker
# engine to build an image of this folder, and the cluster whether it takes the job;
# --workspace "" --scheduler_args queue=Q,validate_spec=False and --image do without.
#
# -j is machines x ranks. Both agents of torchrun are on this machine, but their store
# listens on all its interfaces, at port 29500: use it where nobody else can connect.
exec torchx run --scheduler local_cwd --scheduler_args "log_dir=${LOG_DIR:-runs/torchx}" \
    dist.torchrun -j 2x1 --script ddp_course/lesson04.py -- "$@"
