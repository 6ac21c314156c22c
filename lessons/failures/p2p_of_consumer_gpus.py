"""GPUs that cannot talk to each other directly

Run:    not here: it needs two consumer GPUs
Text:   NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband
        via P2P or IB. Please set `NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1" or use `accelerate
        launch` which will do this automatically.
Text:   Using RTX 3090 or 4000 series which doesn't support faster communication speedups. Ensuring
        P2P and IB communications are disabled.
Text:   Cuda failure 217 'peer access is not supported between these two devices'
Text:   Cuda failure 'peer access is not supported between these two devices'
Text:   RuntimeError: CUDA error: peer access is not supported between these two devices
Text:   NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported between these two
        devices
Cause:  GeForce cards of the 4000 series have no peer-to-peer transfers, so nccl has to go through
        the host's memory. On some machines, with any GPU, peer-to-peer is offered but does not work
        (IOMMU or ACS is on, a virtual machine, a driver's fault): there the first collective hangs
        without a text.
Which:  Run the program with `NCCL_P2P_DISABLE=1`. If a hang in the first collective ends, the
        direct transfers are the cause. If it does not, look for a rank that does not arrive (lesson
        15).
Fix:    Set `NCCL_P2P_DISABLE=1` and `NCCL_IB_DISABLE=1` for all ranks; Ray's workers get them from its
        `runtime_env`. For the hang, disable IOMMU
        and ACS in the BIOS or update the driver, and give a container enough `/dev/shm`.
Lesson: 15
Source: https://github.com/NVIDIA/nccl-tests/issues/117
Source: https://github.com/Lightning-AI/pytorch-lightning/issues/19425
Source: https://github.com/ray-project/ray_lightning/issues/24
Source: https://github.com/hiyouga/EasyR1/issues/579
"""
