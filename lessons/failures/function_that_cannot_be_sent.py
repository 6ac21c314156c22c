"""A function that cannot be sent to another process

Run:    python lessons/failures/function_that_cannot_be_sent.py
Text:   AttributeError: Can't get local object 'main.<locals>.train'
Text:   AttributeError: Can't pickle local object 'main.<locals>.train'
Text:   AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>
Text:   _pickle.PicklingError: Can't pickle local object <function main.<locals>.train at
        0x7f25256ca740>
Text:   TypeError: cannot pickle '_io.TextIOWrapper' object
Text:   Got pickle error when attempting to start a worker Process. Python 3.14+ changed the multiprocessing
        start method in non-Mac POSIX platforms to 'forkserver'
Cause:  A process that is spawned gets its function and its arguments as a pickle, which names a
        function by its module. A function inside another function, a lambda, a notebook's function,
        or an object with an open file or a lock cannot be sent. It concerns `mp.spawn`, DataLoader
        workers on macOS and Windows, and from Python 3.14 on Linux, too.
Fix:    Move the function to the top of a file and import it; pass plain values and open files
        inside. In a notebook, write the file with `%%writefile` and run torchrun.
Lesson: 2
Source: https://github.com/pytorch/pytorch/issues/20375
Source: https://github.com/jupyter/notebook/issues/6258
"""

import torch.multiprocessing as mp


def main():
    def train(rank):
        print(rank)

    mp.spawn(train, nprocs=2)


if __name__ == "__main__":
    main()
