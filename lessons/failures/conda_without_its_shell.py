"""conda in a script that has not loaded it

Run:    not here: it needs conda
Text:   CondaError: Run 'conda init' before 'conda activate'
Text:   CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'.
Cause:  `conda activate` is a function of the shell, which `conda init` writes into `~/.bashrc`. A job's
        script, an ssh command or a notebook's `!` line does not read that file, so the environment is
        not activated, and the lines after it run with another Python.
Fix:    In the script, before: `source "$(conda info --base)/etc/profile.d/conda.sh"`. Or without
        activation: `conda run -n NAME python train.py`, or the environment's own
        `/path/envs/NAME/bin/torchrun`. `set -e` in a script stops it at this line.
Lesson: 14
Source: https://github.com/conda/conda/issues/13786
Source: https://github.com/marbits-icm/marbits-public/issues/78
"""
