#!/bin/sh
# One rank of mpirun: Open MPI's variables under torchrun's names, and then the program.
export RANK="$OMPI_COMM_WORLD_RANK"
export WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
export LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK"
export LOCAL_WORLD_SIZE="$OMPI_COMM_WORLD_LOCAL_SIZE"
exec "$@"
