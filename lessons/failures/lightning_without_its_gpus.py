"""Lightning asks for GPUs that it does not see

Run:    not here: it needs Lightning and GPUs
Text:   MisconfigurationException: You requested gpu: [0, 1, 2, 3] But your machine only has: [0]
Text:   MisconfigurationException: You requested GPUs: [1] But your machine only has: [0]
Cause:  `devices=4` or a list of GPUs in the Trainer, and this process sees fewer: CUDA_VISIBLE_DEVICES
        names some of them, SLURM gave the job or each of its tasks one, or the number was written for
        another machine. The numbers count the visible ones, from 0.
Which:  `echo $CUDA_VISIBLE_DEVICES` and `nvidia-smi -L` where the program runs, under SLURM with `srun`
        in front. `[]`: torch sees none, see Torch without a GPU.
Fix:    `devices="auto"`, or as many as there are. Under SLURM ask for them per machine,
        `--gpus-per-node=4 --ntasks-per-node=4`, and not with `--gpus-per-task=1` or
        `--gpu-bind=single:1`, which hide the others from each task.
Lesson: 14
Source: https://github.com/talmolab/sleap/issues/2642
Source: https://github.com/bene-ges/nemo_compatible/issues/16
Source: https://github.com/AntixK/PyTorch-VAE/issues/98
"""
