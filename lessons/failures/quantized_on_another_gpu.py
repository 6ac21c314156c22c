"""A quantised model on another GPU than the rank's

Run:    not here: it needs a quantised model on a GPU
Text:   ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a
        different device than the one you're training on. Make sure you loaded the model on the
        correct device using for example `device_map={'':torch.cuda.current_device()}` or
        `device_map={'':torch.xpu.current_device()}`
Text:   ValueError: You can't train a model that has been loaded in 8-bit precision on a different
        device than the one you're training on.
Text:   ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on
        multiple devices in any distributed mode. In order to use 8-bit or 4-bit models that have
        been loaded across multiple GPUs the solution is to use Naive Pipeline Parallelism.
Text:   ValueError: You can't train a model that has been loaded in 8-bit precision on multiple
        devices.
Text:   ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision with
        CPU or disk offload.
Cause:  A model in 8 or 4 bits stays on the GPU on which it was loaded, and Accelerate does not move
        it. Each rank loaded it on GPU 0, or `device_map="auto"` divided it over several GPUs.
Fix:    Give each rank its own whole copy: `device_map={"": int(os.environ["LOCAL_RANK"])}` (or
        `{"": PartialState().process_index}` on one machine), and call `torch.cuda.set_device` before
        loading. If one GPU cannot hold the model, start one process with `python` instead of
        torchrun, or use FSDP with QLoRA.
Lesson: 11
Source: https://github.com/hiyouga/LlamaFactory/issues/1707
Source: https://github.com/huggingface/accelerate/issues/1515
Source: https://github.com/artidoro/qlora/issues/186
"""
