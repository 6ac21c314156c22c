"""A launcher that passes --local-rank

Run:    python lessons/failures/local_rank_argument.py
Text:   error: unrecognized arguments: --local-rank=0
Text:   error: unrecognized arguments: --local_rank=0
Text:   AttributeError: 'Namespace' object has no attribute 'local_rank'
Text:   FutureWarning: The module torch.distributed.launch is deprecated and will be removed in
        future. Use torchrun.
Cause:  `python -m torch.distributed.launch` adds `--local-rank=N` to the program's arguments, with
        a dash since torch 2.0 and with an underscore before. The program's parser does not know it
        in this spelling.
Fix:    Start with torchrun, which adds no argument, and read `int(os.environ["LOCAL_RANK"])`. To
        support both, `parser.add_argument("--local-rank", "--local_rank", type=int)`.
Lesson: 2
Source: https://github.com/huggingface/pytorch-image-models/issues/1724
Source: https://github.com/XPixelGroup/BasicSR/issues/626
"""

import argparse
import os
import subprocess
import sys

if "LOCAL_RANK" in os.environ:
    argparse.ArgumentParser().parse_args()
else:
    subprocess.run([sys.executable, "-m", "torch.distributed.launch", __file__])
