"""An account or a partition that SLURM does not accept

Run:    not here: it needs a SLURM with accounts
Text:   sbatch: error: Batch job submission failed: Invalid account or account/partition combination
        specified
Text:   srun: error: Unable to allocate resources: Invalid account or account/partition combination
        specified
Text:   sbatch: error: invalid partition specified: gpus
Cause:  The cluster counts time per account, and this job has none, a wrong one, or one that may not use
        this partition. Your script, nodes and GPUs are not the cause.
Which:  `sacctmgr show associations user=$USER format=Account,Partition,QOS` prints what you may use. A
        variable in an `#SBATCH` line is not replaced: `--account=$PROJECT` is a wrong name.
Fix:    `#SBATCH --account=NAME` and `--partition=NAME` of one line of that list. A partition for GPUs
        often has an account of its own. Nothing there: ask the administrator, or leave `--account` out.
Lesson: 14
Source: https://github.com/ComputationalRadiationPhysics/picongpu/issues/2931
Source: https://github.com/ArjunaCluster/ArjunaUsers/issues/47
Source: https://github.com/OSC/ondemand/issues/3253
"""
