"""More ranks than GPUs

Run:    not here: it needs a GPU
Text:   RuntimeError: CUDA error: invalid device ordinal
Text:   torch.AcceleratorError: CUDA error: invalid device ordinal
Cause:  A rank asks for a GPU with a number that does not exist for it. torchrun started more ranks
        than the machine has GPUs; `CUDA_VISIBLE_DEVICES` or the scheduler shows fewer; or the
        program uses the global rank instead of the local one, which fails from the second machine
        on.
Fix:    `--nproc_per_node` at most as large as the number of visible GPUs, or `--nproc_per_node
        gpu`. Use `int(os.environ["LOCAL_RANK"])` for the device. Where the scheduler shows each
        process one GPU only, the device is `cuda:0` on each.
Lesson: 4
Source: https://github.com/hustvl/Vim/issues/61
Source: https://github.com/tatsu-lab/stanford_alpaca/issues/67
"""
