"""Two ranks on one GPU

Run:    not here: it needs nccl and a GPU
Text:   Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000
Text:   torch.distributed.DistBackendError: NCCL error in:
        /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, invalid usage (run with
        NCCL_DEBUG=WARN for details), NCCL version 2.21.5
Text:   ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Cause:  nccl needs a GPU of its own per rank, and two ranks use the same one. Nobody chose the
        device, so each rank took GPU 0; `.cuda()` or `"cuda:0"` is written somewhere; there are
        more ranks than GPUs; or the launcher gave each process one visible GPU and the program asks
        for `cuda:0` of a wrong list.
Fix:    At the start of each rank, `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, and
        `"cuda"` instead of `"cuda:0"` everywhere. Start no more ranks than `nvidia-smi -L` lists.
        To try two ranks on one GPU, use gloo.
Lesson: 4
Source: https://github.com/NVIDIA/Megatron-LM/issues/661
Source: https://github.com/Peterande/D-FINE/issues/289
"""
