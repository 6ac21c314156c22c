"""A barrier that guesses its GPU

Run:    not here: only nccl says it
Text:   [rank0]:[W ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0] using GPU 0 to perform
        barrier as devices used by this process are currently unknown. This can potentially cause a
        hang if this rank to GPU mapping is incorrect. Specify device_ids in barrier() to force use
        of a particular device, or call init_process_group() with a device_id.
Text:   UserWarning: barrier(): using the device under current context. You can specify `device_id`
        in `init_process_group` to mute this warning.
Text:   Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is
        heterogeneous.
Cause:  nccl's barrier is an all-reduce of one number, on some GPU, and the group does not know
        which GPU belongs to this rank. If it guesses wrongly, two ranks use one GPU, or the barrier
        hangs.
Fix:    `torch.cuda.set_device(local_rank)` first, then `init_process_group("nccl",
        device_id=torch.device("cuda", local_rank))`.
Lesson: 15
Source: https://github.com/deepspeedai/DeepSpeed/pull/7266
Source: https://github.com/pytorch/pytorch/pull/149144
"""
