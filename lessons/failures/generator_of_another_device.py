"""A random generator of another device

Run:    not here: it needs a GPU
Text:   RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'
Text:   RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'
Cause:  The default device was changed to the GPU, by `torch.set_default_device("cuda")` or the
        older `set_default_tensor_type("torch.cuda.FloatTensor")`, and the DataLoader's sampler then
        draws its order on the GPU with a generator of the CPU.
Fix:    Remove the line and move tensors with `.to(device)`. Or give the loader a generator of the
        right device: `DataLoader(..., generator=torch.Generator(device="cuda"))`;
        DistributedSampler keeps its own on the CPU and does not fit.
Lesson: 4
Source: https://github.com/pytorch/pytorch/issues/62152
Source: https://github.com/ziangcao0312/DiffTF/issues/3
"""
