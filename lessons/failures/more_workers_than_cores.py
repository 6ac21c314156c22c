"""More DataLoader workers than cores

Run:    python lessons/failures/more_workers_than_cores.py
Text:   UserWarning: This DataLoader will create 64 worker processes in total. Our suggested max number of
        worker in current system is 2, which is smaller than what this DataLoader is going to create.
        Please be aware that excessive worker creation might get DataLoader running slow or even freeze,
        lower the worker number to avoid potential slowness/freeze if necessary.
Text:   DataLoader is not able to compute a suggested max number of worker in current system.
Cause:  Each rank has a DataLoader, and each DataLoader starts `num_workers` processes. Eight ranks with
        eight workers are 64 processes. The warning counts the workers of one rank only, and the cores
        that this process may use: in a container or under SLURM these can be fewer than the machine's.
Which:  `len(os.sched_getaffinity(0))` says how many cores the process may use. Under SLURM, one is
        typical of a job without `--cpus-per-task`.
Fix:    `num_workers` = the cores that you may use, divided by the ranks of the machine, less one for the
        rank itself. Ask for cores: `--cpus-per-task` for sbatch and for srun, `--cpus` in Docker.
Lesson: 1
Source: https://github.com/embeddings-benchmark/mteb/issues/1331
Source: https://github.com/pytorch/ignite/issues/1558
Source: https://github.com/AILab-CVC/YOLO-World/issues/413
"""

import warnings

from torch.utils.data import DataLoader

warnings.simplefilter("error")  # so that the program ends here
DataLoader(range(100), num_workers=64)
