"""torchrun without a program to run

Run:    python lessons/failures/torchrun_without_a_script.py
Text:   torchrun: error: the following arguments are required: training_script, training_script_args
Text:   launch.py: error: the following arguments are required: training_script, training_script_args
Text:   run.py: error: the following arguments are required: training_script, training_script_args
Cause:  The launcher has read all words as its own flags, and none was left for the program. A line of
        the shell script ends early: a space after the backslash, a comment between the lines, or no
        backslash. Or `$SCRIPT` is empty, or a flag without its value has taken the program's name for
        it.
Fix:    Print what the shell runs with `bash -x job.sh`. Order: torchrun's flags, the program, the
        program's flags. In a script, keep the words in an array: `FLAGS=(--nproc_per_node 2)`, and
        `torchrun "${FLAGS[@]}" train.py --epochs 3`.
Lesson: 2
Source: https://github.com/hiyouga/LlamaFactory/issues/3301
Source: https://github.com/yongliang-wu/DFT/issues/26
"""

from torch.distributed import run

run.main(["--nproc_per_node", "2"])
