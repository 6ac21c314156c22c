"""SLURM's memory, asked for in two ways

Run:    not here: it needs a SLURM
Text:   srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually
        exclusive.
Text:   sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.
Cause:  A job gives its memory per machine, per core or per GPU, and this one does so twice. The second
        one is often not in your script: inside of a job, such as an interactive one, SLURM has set
        a variable, and each sbatch and srun from there inherits it.
Which:  `env | grep SLURM_MEM` where you submit. Something is set: you are inside of a job. Nothing:
        the script, or the tool that writes it (submitit, dask, snakemake), has two of the options.
Fix:    Submit from the login node, or `unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU`
        before. Keep one of `--mem`, `--mem-per-cpu` and `--mem-per-gpu`.
Lesson: 14
Source: https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/75
Source: https://github.com/snakemake/snakemake/issues/2912
Source: https://github.com/dask/dask-jobqueue/issues/698
"""
