"""A machine with NVSwitch without its fabric manager

Run:    not here: it needs GPUs behind an NVSwitch
Text:   Error 802: system not yet initialized
Text:   RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions
        before calling NumCudaDevices() that might have already set an error? Error 802: system not
        yet initialized
Text:   CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda
        functions before calling NumCudaDevices() that might have already set an error? Error 802:
        system not yet initialized
Text:   RuntimeError: cuda runtime error (802) : system not yet initialized
Text:   RuntimeError: CUDA error: system not yet initialized
Cause:  The GPUs of an HGX or DGX machine (A100, H100 and later, with SXM) are joined by an NVSwitch,
        and CUDA does not start before the service nvidia-fabricmanager has set it up. The service
        is not installed, not running, or of another version than the driver, often since an update.
        Your program is not the cause.
Which:  `systemctl status nvidia-fabricmanager` on the machine itself, not in a container. On
        an H100 and later, `nvidia-smi -q | grep -A 2 Fabric` must say `Completed`. nvidia-smi lists
        the GPUs in any case.
Fix:    Install the fabric manager of exactly the driver's version and start it: `sudo systemctl
        enable --now nvidia-fabricmanager`; reboot if the driver was updated. On a rented machine,
        tell its owner, and take another one.
Lesson: 15
Source: https://github.com/pytorch/pytorch/issues/35710
Source: https://github.com/huggingface/huggingface_hub/issues/4134
Source: https://github.com/gpustack/gpustack/issues/4154
"""
