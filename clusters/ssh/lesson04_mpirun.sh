#!/bin/sh
# Lesson 4's program on the machines of the hostfile, by Open MPI:
# sh clusters/ssh/lesson04_mpirun.sh [flags of the program]

# mpirun logs in by ssh, once per machine, and starts the ranks. It does not say where
# they meet, so we do: on the first machine. -x hands variables on. If a rank fails,
# mpirun ends all of them, and starts nothing again.
exec mpirun --hostfile clusters/ssh/hostfile \
    -x MASTER_ADDR=node0 -x MASTER_PORT="${MASTER_PORT:-29500}" -x OMP_NUM_THREADS=1 \
    sh clusters/ssh/mpi_rank.sh python ddp_course/lesson04.py "$@"
