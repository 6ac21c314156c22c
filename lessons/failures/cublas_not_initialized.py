"""cuBLAS does not start

Run:    not here: it needs a GPU
Text:   RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
Text:   RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
Text:   RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle,
        opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`
Text:   RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED
Text:   RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED
Cause:  The first product on the GPU fails. Usually there is no memory left for cuBLAS, or an
        earlier kernel has failed, such as an embedding with a number outside of its table, and this
        is the first place that notices.
Which:  `nvidia-smi` while it starts: full, or all ranks on GPU 0, is memory. Otherwise run with
        `CUDA_LAUNCH_BLOCKING=1`, or one batch on the CPU: an index out of range shows up there. A
        new GPU with an old torch: the build.
Fix:    Free memory or use a smaller batch; one GPU per rank with
        `torch.cuda.set_device(local_rank)`; correct labels and token numbers.
Lesson: 15
Source: https://github.com/QwenLM/Qwen/issues/120
Source: https://github.com/OpenBMB/VisCPM/issues/3
"""
