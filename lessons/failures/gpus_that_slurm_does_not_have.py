"""A request for GPUs that SLURM does not know

Run:    not here: it needs a SLURM with GPUs
Text:   sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification
Text:   sbatch: error: Invalid generic resource (gres) specification
Text:   srun: error: Unable to create step for job 25393: Invalid generic resource (gres)
        specification
Text:   sbatch: error: Batch job submission failed: Requested node configuration is not available
Text:   sbatch: error: You must always specify a type when requesting gpu GRES
Cause:  `--gres=gpu:...` names what this partition does not have: a type with another spelling, more
        GPUs than one machine has, or GPUs in a partition without any. Some clusters want a type,
        some `--gpus`, and some have not told SLURM of their GPUs. `Requested node configuration` may
        also be about cores or memory: more of them than any machine has.
Which:  `sinfo -o "%P %G %c %m"` prints GPUs, cores and memory (MB) of each partition's machines. From
        srun inside a job: the step wants what the job has not asked for, or you submit from inside
        another job, whose `SLURM_` and `SBATCH_` variables the new one inherits.
Fix:    Write what sinfo prints, such as `#SBATCH --gres=gpu:a100:4` with the right `--partition`.
        Inside a job repeat no more than the job has. `(null)` everywhere: remove the line, or ask
        the administrator.
Lesson: 14
Source: https://github.com/NVIDIA/NeMo-Framework-Launcher/issues/72
Source: https://github.com/facebookincubator/submitit/issues/1726
Source: https://github.com/nebius/soperator/issues/1521
"""
