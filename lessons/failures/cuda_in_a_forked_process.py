"""CUDA in a process that was forked

Run:    not here: it needs a GPU
Text:   RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with
        multiprocessing, you must use the 'spawn' start method
Text:   RuntimeError: CUDA error: initialization error
Text:   ValueError: To launch a multi-GPU training from your notebook, you need to avoid running any
        instruction using `torch.cuda` in any cell. Restart your notebook and make sure no cells use any
        CUDA function.
Text:   RuntimeError: CUDA has been initialized before the `notebook_launcher` could create a forked
        subprocess. This likely stems from an outside import causing issues once the
        `notebook_launcher()` is called.
Text:   MisconfigurationException: Lightning can't create new processes if CUDA is already
        initialized. Did you manually call `torch.cuda.*` functions, have moved the model to the
        device, or allocated memory on the GPU any other way?
Cause:  The parent process has used the GPU, and a forked child cannot. Parent and child may be a
        notebook and `notebook_launcher`, or a rank and its DataLoader workers whose data set
        returns GPU tensors.
Which:  In a DataLoader worker: the data set or `collate_fn` calls `.cuda()`. In a notebook: a cell
        before, such as one that asks `torch.cuda.is_available()`, moves a model, creates
        `TrainingArguments`, or imports a library that does so, as old versions of bitsandbytes and
        peft did. `torch.cuda.is_initialized()` after each cell finds it.
Fix:    Keep data sets on the CPU and move batches in the loop. In a notebook, restart the kernel
        and let only the launched function touch the GPU, or write the program to a file and run
        torchrun.
Lesson: 7
Source: https://github.com/huggingface/accelerate/issues/940
Source: https://github.com/huggingface/accelerate/issues/1831
Source: https://github.com/huggingface/accelerate/issues/3833
Source: https://github.com/huggingface/accelerate/issues/3524
"""
