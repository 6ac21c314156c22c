"""torchrun's note about OMP_NUM_THREADS

Run:    torchrun --nproc_per_node 2 lessons/failures/omp_num_threads.py
Text:   Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid
        your system being overloaded, please further tune the variable for optimal performance in
        your application as needed.
Cause:  This is a note and no error. torchrun gives each rank one CPU thread, because several ranks
        with all cores each would hinder one another. If the program stops after this line,
        something else waits: a download, the first collective, the rendezvous.
Fix:    To choose it yourself, and to silence the note, set `OMP_NUM_THREADS` to the cores divided
        by the ranks. If the program hangs here, see lesson 15.
Lesson: 2
Source: https://github.com/pytorch/pytorch/issues/22260
Source: https://github.com/hailanyi/CasA/issues/26
"""

import os

print("rank", os.environ["RANK"], "has", os.environ["OMP_NUM_THREADS"], "thread")
