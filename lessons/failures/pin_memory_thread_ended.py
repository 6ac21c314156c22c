"""The thread that pins memory has ended

Run:    not here: it needs a GPU
Text:   RuntimeError: Pin memory thread exited unexpectedly
Text:   RuntimeError: Caught RuntimeError in pin memory thread for device 0.
Text:   UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then device pinned
        memory won't be used.
Cause:  With `pin_memory=True`, a thread of each rank copies batches into pinned memory. It ends when it
        meets something that it cannot copy: no room in the GPU's or the machine's memory, a batch that
        was on the GPU already, an error in a batch of a class of your own, or a program that is ending.
Which:  Above it is the thread's own error, if there is one. Take `pin_memory=False`: if the program runs
        now, or says more, it was the thread. The warning about "no accelerator" is no error.
Fix:    If it comes at the end of an epoch, leave out `persistent_workers=True`. Let the data set return
        tensors on the CPU. Give fewer workers and a smaller `prefetch_factor` if
        memory is short. A batch of a class of your own needs a method `pin_memory`. On machines without a
        GPU, leave `pin_memory` out.
Lesson: 1
Source: https://github.com/pytorch/pytorch/issues/47445
Source: https://github.com/milesial/Pytorch-UNet/issues/517
Source: https://github.com/mittagessen/kraken/issues/642
"""
