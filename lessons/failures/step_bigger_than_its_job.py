"""An srun that asks for more than its job has

Run:    not here: it needs a SLURM
Text:   More processors requested than permitted
Text:   srun: error: Unable to create step for job 3092817: More processors requested than permitted
Text:   srun: error: Unable to create step for job 771: Memory required by task is not available
Text:   sbatch: error: Batch job submission failed: More processors requested than permitted
Cause:  srun divides what sbatch has got, and asks for more than that. `More processors`: tasks times
        `--cpus-per-task` are more cores than the job has, or some are reserved for the system. `Memory
        required`: `--mem` is more than the job's, or an earlier srun still holds all of it.
Which:  `scontrol show job $SLURM_JOB_ID` prints what the job has (`NumTasks`, `CPUs/Task`, `TRES`).
        Compare it with the options of srun, and with `SLURM_` variables that an interactive job has
        left (`env | grep SLURM_`).
Fix:    Give the numbers once, to sbatch, and start with a plain `srun`. Only `--cpus-per-task` has to be
        repeated: `srun --cpus-per-task=$SLURM_CPUS_PER_TASK`. Several steps at once: `srun --exact
        --mem=8G ... &` each with its part.
Lesson: 14
Source: https://github.com/E3SM-Project/scream/issues/2112
Source: https://github.com/astroautomata/PySR/issues/891
Source: https://github.com/eth-cscs/DLA-Future/issues/337
"""
