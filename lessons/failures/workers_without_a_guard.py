"""Workers without the guard of the main program

Run:    python lessons/failures/workers_without_a_guard.py
Text:   RuntimeError: An attempt has been made to start a new process before the current process has
        finished its bootstrapping phase. This probably means that you are not using fork to start
        your child processes and you have forgotten to use the proper idiom in the main module:
Text:   if __name__ == '__main__': freeze_support()
Text:   The "freeze_support()" line can be omitted if the program is not going to be frozen to
        produce an executable.
Cause:  A worker that is not forked starts a new Python and imports your script. Without a guard,
        the import runs the whole script again, which wants to start workers itself. macOS and
        Windows always start workers in this way, and so does Linux with Python 3.14, or with
        `multiprocessing_context="spawn"`.
Fix:    Put the program into a function `main()`, and call it only `if __name__ == "__main__":`.
Lesson: 2
Source: https://github.com/guoyang9/BPR-pytorch/issues/1
Source: https://github.com/AnswerDotAI/fsdp_qlora/issues/28
"""

import torch
from torch.utils.data import DataLoader

# the same line below `if __name__ == "__main__":` works
print(list(DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="spawn")))
