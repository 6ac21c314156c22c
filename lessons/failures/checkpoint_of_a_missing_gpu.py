"""A checkpoint of a GPU that is not here

Run:    not here: it needs a GPU, and a checkpoint of another one
Text:   RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is
        1. Please use torch.load with map_location to map your storages to an existing device.
Cause:  `torch.load` puts each tensor on the GPU from which it was saved. The file is from rank 3, whose
        tensors were on `cuda:3`, and this process sees fewer GPUs: a smaller machine, or one GPU per
        task.
Which:  With as many GPUs as before there is no error, and each rank that loads the file fills the same
        GPU.
Fix:    `torch.load(path, map_location="cpu")`, then `load_state_dict`, which copies each tensor to its
        place. Save on rank 0, or with `torch.distributed.checkpoint`, which knows no devices.
Lesson: 9
Source: https://github.com/pytorch/pytorch/issues/15541
Source: https://github.com/YoungSeng/QPGesture/issues/2
"""
