"""`ddp-course diagnose`, and the index that it shares with the site's search: each failure
is found by its text, with other paths, numbers and prefixes, cut, and inside a log.
"""

import io
import json
import re
import shutil
import subprocess
import tracemalloc
from signal import Signals

import pytest
from conftest import COURSE, python

from ddp_course.cli.diagnosis import from_programs, log, matching, report, store
from ddp_course.cli.diagnosis.index import general, index, known, texts_of_all
from ddp_course.cli.diagnosis.log import findings, lines_of

KNOWN = known()
PROGRAMS = sorted((COURSE / "lessons" / "failures").glob("*.py"))


def number_of(page):
    """The place of a page in the index."""
    [number] = [n for n, failure in enumerate(KNOWN) if failure.page == page]
    return number


def stranger(text):
    """A text as another machine prints it: other numbers and another path."""
    text = re.sub(
        r"(?<![-\d])[1-9]\d*", lambda number: str(int(number[0]) * 3 + 17), text
    )
    return f"/home/ana/venv/lib/python3.12/site-packages/torch/x.py:88: {text}"


def cut(text):
    """The first words of a text, as it is left when it has been copied carelessly."""
    words = text.split()
    return " ".join(words[: max(7 * len(words) // 10, 8)])


def prefixed(text):
    """A text behind what launchers and loggers add."""
    return f"3: [default5]:[rank21]: [2026-03-01 12:44:01,442] [ERROR] \x1b[31m{text}\x1b[0m"


LOG = """\
W0301 12:40:11.000000 140 torch/distributed/run.py:792] *****************************************
Setting up data, 40000 samples
epoch 1/3 [>.............] step 12 loss 2.31 3.1 it/s
{line}
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ana/train.py", line 8, in <module>
[rank1]:     main()
E0301 12:44:01.000000 140 torch/distributed/elastic/agent/server/api.py:900] shutting down
train.py FAILED
"""


def pages_first(found):
    """The pages that fit equally well as the best one, by (score, failure) pairs."""
    return {number for score, number in found if score >= 0.98 * found[0][0]}


def alone(line):
    return [(match.score, match.failure) for match in index().matches(line)]


def in_a_log(line):
    stream = io.BytesIO(LOG.format(line=line).encode())
    found = findings(lines_of(stream), index())
    return [(finding.weight, finding.failure) for finding in found]


GARBLED = {
    "another machine": lambda text: alone(stranger(text)),
    "cut": lambda text: alone(cut(text)),
    "prefixed": lambda text: alone(prefixed(stranger(text))),
    "in a log": lambda text: in_a_log(prefixed(text)),
}


def first_for(text, number):
    """Which ways of garbling a text do not find its failure first."""
    for way, search in GARBLED.items():
        found = search(text)
        if not found or number not in pages_first(found):
            yield way, [KNOWN[n].page for _, n in found[:3]]


@pytest.mark.parametrize("page", [failure.page for failure in KNOWN])
def test_a_failures_text_finds_it_first_also_when_it_is_garbled(page):
    number = number_of(page)
    assert not list(first_for(KNOWN[number].title, number))


def test_the_texts_of_a_failure_that_lead_to_it_are_counted():
    """Also the lines that other versions, or other ranks, print."""
    texts = [
        (text, number)
        for number, failure in enumerate(KNOWN)
        for text in failure.texts
        if "-" in failure.page and not failure.page[0].isdigit()
    ]
    missed = [
        (KNOWN[number].page, text)
        for text, number in texts
        if not (found := alone(stranger(text))) or number not in pages_first(found)
    ]
    assert len(texts) > 200
    assert missed == []


@pytest.mark.parametrize(
    "line",
    [
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "AttributeError: 'Tokenizer' object has no attribute 'pad_id'",
        "AttributeError: 'Namespace' object has no attribute 'warmup'",
        "AttributeError: 'Trainer' object has no attribute 'config'",
        "AttributeError: module 'torch' has no attribute 'compiler'",
        "AttributeError: module 'numpy' has no attribute 'bool'",
        "KeyError: 'input_ids'",
        "KeyError: 'loss'",
        "KeyError: 'model.layers.0.weight'",
        "KeyError: 3",
        "ModuleNotFoundError: No module named 'pandas'",
        "ModuleNotFoundError: No module named 'utils.data'",
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some "
        "cuda functions before calling NumCudaDevices() that might have already set an "
        "error? Error 304: OS call failed or operation not supported on this OS",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.json'",
        "OSError: [Errno 12] Cannot allocate memory",
        "IndexError: list index out of range",
        "NameError: name 'loss' is not defined",
        "ImportError: cannot import name 'AdamW' from 'transformers'",
        "bash: nvidia-smi: command not found",
    ],
)
def test_an_error_with_a_name_of_the_readers_own_finds_no_page(line):
    """What all attribute and key errors have in common says nothing."""
    assert not alone(line) and not in_a_log(line)


@pytest.mark.parametrize(
    "line",
    [
        "wandb: ERROR Run initialization has timed out after 90.0 sec.",
        "wandb: Network error (ConnectionError), entering retry loop.",
        "srun: job 4242 queued and waiting for resources",
        "srun: job 4242 has been allocated resources",
        "slurmstepd: error: couldn't chdir to `/home/ana': No such file or directory: going "
        "to /tmp instead",
        "Job 4242 finished, exit code 0",
        "Submitted batch job 4242",
        "conda activate ddp",
        "#     $ conda activate ddp",
        "EnvironmentNameNotFound: Could not find conda environment: ddp",
        "ERROR: No matching distribution found for flash-attn==2.5.8",
        "WARNING: Running pip as the 'root' user can result in broken permissions",
        "Successfully installed accelerate-1.2.1 transformers-4.47.1",
        "100%|##########| 1000/1000 [10:10<00:00, 1.64it/s]",
        "Loading checkpoint shards: 100%|##########| 4/4 [00:10<00:00,  2.51s/it]",
        "Some weights of BertForSequenceClassification were not initialized from the model "
        "checkpoint at bert-base-uncased and are newly initialized: ['classifier.bias']",
        "FutureWarning: `evaluation_strategy` is deprecated and will be removed in version "
        "4.46 of Transformers. Use `eval_strategy` instead",
        "Saving model checkpoint to output/checkpoint-500",
        "node1:4242:4300 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>",
        "node1:4242:4300 [0] NCCL INFO NVLS multicast support is not available on dev 0",
        "Exception ignored in: <function tqdm.__del__ at 0x7f0a3c1e5ca0>",
        "Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w' encoding='utf-8'>",
        "PermissionError: [Errno 13] Permission denied: '/scratch/ana'",
        "Connection to gpu1 closed by remote host.",
    ],
)
def test_a_line_of_any_run_finds_no_page(line):
    assert not alone(line) and not in_a_log(line)


@pytest.mark.parametrize(
    "line, page",
    [
        ("'DistributedDataParallel' object has no attribute 'embed'", "wrapper"),
        ("AttributeError: 'DataParallel' object has no attribute 'loss_of'", "wrapper"),
        ("AttributeError: 'DeepSpeedEngine' object has no attribute 'x'", "wrapper"),
        ("KeyError: 'MASTER_ADDR'", "torchrun"),
        ("KeyError: 'RANK'", "torchrun"),
    ],
)
def test_a_wrapper_lacks_any_attribute_and_torchrun_any_of_its_variables(line, page):
    pages = {
        "wrapper": "attribute-of-the-wrapper",
        "torchrun": "started-without-torchrun",
    }
    assert KNOWN[alone(line)[0][1]].page == pages[page]


OF_A_SIGNAL = {
    -7: "bus-error-of-a-rank",
    -8: "floating-point-exception-of-a-rank",
    -9: "killed-by-sigkill",
    -11: "segmentation-fault",
}
NAMED = [
    "failed (exitcode: {code}) local_rank: 0 (pid: 16) of binary: /opt/conda/bin/python",
    "exitcode  : {code} (pid: 16)",
    "exits with return code = {code}",
    "traceback : Signal {number} ({name}) received by PID 16",
    "died with <Signals.{name}: {number}>",
    "ProcessExitedException: process 0 terminated with signal {name}",
]


def told(form, code):
    """A line about an exit code. The forms that name a signal say what any code says."""
    names = {signal.value: signal.name for signal in Signals}
    number = abs(code)
    return form.format(code=code, number=number, name=names[number])


@pytest.mark.parametrize(
    "form, code",
    [(form, code) for form in NAMED for code in (-6, -15, -4, -2, -1)]
    + [(form, code) for form in NAMED[:3] for code in (1, 2, 4, 15)],
)
def test_an_exit_code_is_not_about_another_signal(form, code):
    assert not set(diagnosed(told(form, code))) & set(OF_A_SIGNAL.values())


@pytest.mark.parametrize("code", OF_A_SIGNAL)
@pytest.mark.parametrize("form", NAMED)
def test_an_exit_code_leads_to_the_page_of_its_signal_alone(form, code):
    pages = diagnosed(told(form, code))
    assert pages[0] == OF_A_SIGNAL[code]
    assert set(pages) & set(OF_A_SIGNAL.values()) == {OF_A_SIGNAL[code]}


@pytest.mark.parametrize("code", [-6, -15, 1, 2])
def test_other_exit_codes_lead_to_the_page_about_torchruns_table(code):
    assert diagnosed(told(NAMED[0], code)) == ["only-torchruns-table"]


@pytest.mark.parametrize("form", [NAMED[0], NAMED[3]])
@pytest.mark.parametrize("code", OF_A_SIGNAL)
@pytest.mark.parametrize("upwards", [False, True])
def test_a_signal_comes_before_the_rest_of_torchruns_table(form, code, upwards):
    lines = [
        "W0325 20:57:25 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:897] "
        "Sending process 2625 closing signal SIGTERM",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        told(form, code),
        "error_file: <N/A>",
    ]
    pages = diagnosed("\n".join(lines[::-1] if upwards else lines))
    assert pages[:2] == [OF_A_SIGNAL[code], "only-torchruns-table"]


def test_the_table_of_a_killed_rank_leads_to_its_signal():
    lines = [
        "W0325 20:57:25 2606 torch/distributed/elastic/multiprocessing/api.py:897] "
        "Sending process 2626 closing signal SIGTERM",
        "E0325 20:57:27 2606 torch/distributed/elastic/multiprocessing/api.py:869] "
        + told(NAMED[0], -9),
        "  exitcode  : -9 (pid: 16)",
        "  traceback : Signal 9 (SIGKILL) received by PID 16",
    ]
    assert diagnosed("\n".join(lines))[0] == "killed-by-sigkill"


CONNECT = "node5:240:1201 [6] misc/socket.cc:483 NCCL WARN "
MIXED = (
    "RuntimeError: {} got mixed torch.Tensor and DTensor, need to convert all torch.Tensor "
    "to DTensor before calling distributed operators!"
)
MET = {  # as people have met them, page: lines
    "nccl-not-reached": [
        CONNECT + "socketStartConnect: Connect to 172.17.0.1<17943> failed : Software "
        "caused connection abort",
        CONNECT
        + "socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to "
        "host) errno 115(Operation now in progress)",
        CONNECT + "Net : Connect to 192.168.122.1<38845> failed : Connection timed out",
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, unhandled system error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.18.3\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call "
        "failed or device error.\nLast error:\n"
        + CONNECT
        + "socketStartConnect: Connect to 172.17.0.1<17943> failed : Software caused "
        "connection abort",
    ],
    "nccl-system-error": [
        "gpu2:2143:2561 [1] misc/shmutils.cc:88 NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, "
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
    ],
    "batches-of-different-sizes": [
        "[rank0]: RuntimeError: You can't use batches of different size with "
        "`dispatch_batches=True` or when using an `IterableDataset`.either pass "
        "`dispatch_batches=False` and have each process fetch its own batch  or pass "
        "`split_batches=True`."
    ],
    "lightning-against-slurm": [
        "ValueError: You set `devices=4` in Lightning, but the number of tasks per node "
        "configured in SLURM `--ntasks-per-node=1` does not match. HINT: Set `devices=1`.\n"
        "srun: error: gpu-node07: task 0: Exited with exit code 1",
        "RuntimeError: You set `--ntasks=8` in your SLURM bash script, but this variable "
        "is not supported. HINT: Use `--ntasks-per-node=8` instead.",
        "GPU available: True, used: True\n"
        "initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/8\n"
        "initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/8",
    ],
    "no-space-left": [
        "RuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter "
        "failed writing file data/271: file write failed\n\n"
        "During handling of the above exception, another exception occurred:\n",
        "RuntimeError: File my_out/checkpoints/checkpoint_0.pt cannot be opened.",
    ],
    "12-a-method-that-is-not-forward": [
        MIXED.format("aten.mm.default:"),
        MIXED.format("aten.addmm.default"),
    ],
    "fsdp-with-ordinary-parameters": [
        MIXED.format("aten._foreach_addcdiv_.ScalarList"),
        MIXED.format("aten.stack.default:"),
        MIXED.format("aten.mul.Tensor"),
    ],
    "dcp-of-another-shape": [
        "ValueError: Size mismatch between saved torch.Size([257152, 2048]) and current: "
        "torch.Size([131661824]) for model.language_model.embed_tokens.weight",
        "ValueError: Size mismatch between saved torch.Size([2322]) and current: "
        "torch.Size([4]) for model.layers.0._extra_state",
    ],
    "quantized-and-moved": [
        "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models. "
        "Please use the model as it is, since the model has already been set to the "
        "correct devices and casted to the correct `dtype`.",
        "ValueError: Calling `to()` is not supported for `4-bit` or `8-bit` bitsandbytes "
        "models. Please use the model as it is, since the model has already been set to "
        "the correct devices and casted to the correct `dtype`.",
    ],
    "fabric-manager-not-running": [
        "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some "
        "cuda functions before calling NumCudaDevices() that might have already set an "
        "error? Error 802: system not yet initialized (Triggered internally at "
        "../c10/cuda/CUDAFunctions.cpp:109.)"
    ],
    "deepspeed-without-a-launcher": ["ModuleNotFoundError: No module named 'mpi4py'"],
    "library-of-another-cuda": [
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or "
        "directory",
    ],
    "checkpoint-of-a-missing-gpu": [
        "RuntimeError: Attempting to deserialize object on CUDA device 3 but "
        "torch.cuda.device_count() is 1. Please use torch.load with map_location to map "
        "your storages to an existing device."
    ],
    "ipv6-that-is-off": [
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 "
        "(errno: 97 - Address family not supported by protocol).\n"
        "[W socket.cpp:697] [c10d] The client socket cannot be initialized to connect to "
        "[localhost]:29500 (errno: 97 - Address family not supported by protocol).",
        "NOTE: Redirects are currently not supported in Windows or MacOs.\n"
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to "
        "[kubernetes.docker.internal]:29500 (system error: 10049 - The requested address is "
        "not valid in its context.).",
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to "
        "[DESKTOP-4QK1]:29500 (system error: 10049 - unknown error).",
    ],
    "p2p-of-consumer-gpus": [
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL "
        "version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
        "Cuda failure 'peer access is not supported between these two devices'",
        "Cuda failure 217 'peer access is not supported between these two devices'",
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "node03:2143:2561 [1] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : "
        "217 peer access is not supported between these two devices",
    ],
    "no-socket-interface": [
        "gpu07:18204:18204 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface "
        "found\ntorch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, internal error - please "
        "report this issue to the NCCL developers, NCCL version 2.19.3\n"
        "ncclInternalError: Internal check failed.\nLast error:\n"
        "Bootstrap : no socket interface found"
    ],
    "samples-of-different-sizes": [
        "RuntimeError: Trying to resize storage that is not resizable",
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "torch/utils/data/_utils/collate.py", line 162, in collate_tensor_fn\n'
        "    out = elem.new(storage).resize_(len(batch), *list(elem.size()))\n"
        "RuntimeError: Trying to resize storage that is not resizable",
    ],
    "loader-in-a-forked-process": [
        "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f0a3c>\n"
        "Traceback (most recent call last):\n"
        '  File "multiprocessing/process.py", line 160, in is_alive\n'
        "    assert self._parent_pid == os.getpid(), 'can only test a child process'\n"
        "AssertionError: can only test a child process"
    ],
    "layer-outside-its-fsdp-module": [
        "RuntimeError: The tensor has a non-zero number of elements, but its data is not "
        "allocated yet.\nIf you're using torch.compile/export/fx, it is likely that we are "
        "erroneously tracing into a custom kernel. To fix this, please wrap the custom kernel "
        "into an opaque custom op."
    ],
    "rendezvous-closed": [
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
        "srun: error: cdr2596: task 1: Exited with exit code 1\n"
        "srun: Terminating StepId=21941655.1",
    ],
    "rendezvous-failed": [
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
    ],
    "step-bigger-than-its-job": [
        "+ srun --nodes=2 --ntasks-per-node=8 --cpus-per-task=16 python -u train.py\n"
        "srun: error: Unable to create step for job 3092817: More processors requested than "
        "permitted",
        "srun: error: Unable to create step for job 771: Memory required by task is not "
        "available",
    ],
    "account-that-slurm-does-not-accept": [
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified"
    ],
    "gpus-that-slurm-does-not-have": [
        "sbatch: error: Batch job submission failed: Requested node configuration is not "
        "available",
        "srun: error: Unable to create step for job 25393: Invalid generic resource (gres) "
        "specification",
    ],
    "slurm-does-not-answer": [
        "srun: error: Task launch for StepId=99121.0 failed on node gpu3: Socket timed out on "
        "send/recv operation",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
    "python-not-found-by-srun": [
        "slurmstepd: error: execve(): python: No such file or directory",
        "slurmstepd: error: execve(): /opt/venv/bin/python3: No such file or directory",
    ],
    "torchrun-not-found": [
        "slurmstepd: error: execve(): torchrun: No such file or directory"
    ],
    "conda-without-its-shell": ["CondaError: Run 'conda init' before 'conda activate'"],
    "lightning-without-its-gpus": [
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: "
        "[0, 1, 2, 3]\n But your machine only has: [0]\n"
        "srun: error: gpu-a100-12: tasks 0-3: Exited with exit code 1"
    ],
    "lightning-logs-one-rank": [
        "pytorch_lightning/trainer/connectors/logger_connector/result.py:433: "
        "PossibleUserWarning: It is recommended to use `self.log('val_loss', ..., "
        "sync_dist=True)` when logging on epoch level in distributed setting to accumulate "
        "the metric across devices."
    ],
    "output-of-a-cuda-graph": [
        "[rank3]: RuntimeError: Error: accessing tensor output of CUDAGraphs that has been "
        'overwritten by a subsequent run. Stack trace: File "/megatron-lm/model/attn.py", '
        "line 88, in forward\n[rank3]:     q = q * self.freqs_cos. To prevent overwriting, "
        "clone the tensor outside of torch.compile() or call "
        "torch.compiler.cudagraph_mark_step_begin() before each model invocation."
    ],
    "model-in-part-offloaded": [
        "RuntimeError: You can't move a model that has some modules offloaded to cpu or disk."
    ],
    "safetensors-cut-short": [
        "safetensors_rust.SafetensorError: Error while deserializing header: "
        "MetadataIncompleteBuffer"
    ],
    "worker-bus-error": [
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_4321_778_12>: "
        "Resource temporarily unavailable (11)"
    ],
    "half-precision-on-a-cpu": [
        "RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'"
    ],
    "lazy-parameters-in-ddp": [
        "RuntimeError: Modules with uninitialized parameters can't be used with "
        "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
        "modules"
    ],
    "deepspeed-auto-without-a-hidden-size": [
        "ValueError: The model's config file has neither `hidden_size` nor `hidden_sizes` "
        "entry, therefore it's not possible to automatically fill out the following `auto` "
        "entries in the DeepSpeed config file: ['zero_optimization.reduce_bucket_size']."
    ],
    "optimizer-that-is-a-placeholder": [
        "AttributeError: 'DummyOptim' object has no attribute 'step'"
    ],
    "nvlink-sharp-not-ready": [
        "[2025-04-06 22:31:56] ccw-gpu-128:3485254:3487188 [0] transport/nvls.cc:598 NCCL "
        "WARN Cuda failure 1 'invalid argument'"
    ],
    "nccl-cuda-call": [
        "node1:1:2 [0] init.cc:88 NCCL WARN Cuda failure 1 'invalid argument'"
    ],
    "segmentation-fault": ["Segmentation fault (core dumped)"],
    "checkpoint-renamed-by-all-ranks": [
        "FileNotFoundError: [Errno 2] No such file or directory: "
        "'output/finetune/tmp-checkpoint-500' -> 'output/finetune/checkpoint-500'"
    ],
    "two-versions-of-nccl": [
        "ncclInvalidArgument: Invalid value for an argument.\nLast error:\n"
        "Invalid config blocking attribute value -2147483648",
        "ImportError: libnccl.so.2: cannot open shared object file: No such file or "
        "directory",
    ],
}


@pytest.mark.parametrize(
    "page, text", [(page, text) for page, texts in MET.items() for text in texts]
)
def test_a_text_that_people_have_met_leads_to_its_page(page, text):
    assert diagnosed(text)[:1] == [page]


@pytest.mark.parametrize(
    "page, text",
    [
        ("gpus-that-slurm-does-not-have", "account-that-slurm-does-not-accept"),
        ("gpus-that-slurm-does-not-have", "step-bigger-than-its-job"),
        ("cuda-in-a-forked-process", "lightning-without-its-gpus"),
        ("torchrun-not-found", "python-not-found-by-srun"),
        ("no-space-left", "safetensors-cut-short"),
    ],
)
def test_a_page_with_alike_words_is_not_named_for_another_error(page, text):
    assert page not in diagnosed(MET[text][0])


@pytest.mark.parametrize(
    "page, part, words",
    [
        ("modified-by-an-inplace-operation", "fix", "broadcast_buffers=False"),
        ("fsdp-uniform-dtype", "name", "frozen and trained parameters"),
        ("fsdp-uniform-dtype", "cause", "uniform requires_grad"),
        ("fsdp-uniform-dtype", "fix", "use_orig_params=True"),
        ("fsdp-uniform-dtype", "cause", "those in 4 bits are stored as uint8"),
        ("nccl-not-reached", "fix", "NCCL_SOCKET_IFNAME"),
        ("host-name-not-found", "cause", "gpu-node[03-04]"),
        ("host-name-not-found", "fix", "scontrol show hostnames"),
        ("gpus-that-slurm-does-not-have", "cause", "cores or memory"),
        ("gpus-that-slurm-does-not-have", "which", 'sinfo -o "%P %G %c %m"'),
        ("nvlink-sharp-not-ready", "fix", "NCCL_NVLS_ENABLE=0"),
        ("layer-outside-its-fsdp-module", "fix", "register_fsdp_forward_method"),
        ("checkpoint-of-a-missing-gpu", "fix", 'map_location="cpu"'),
    ],
)
def test_what_is_printed_of_a_page_names_each_of_its_causes(page, part, words):
    assert words in report.plain(getattr(KNOWN[number_of(page)], part))


# ---- the programs ----


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_has_what_its_page_needs(path):
    failure = from_programs.program_of(path)
    assert f"{path.stem}.py" in failure.run or not failure.runs
    assert bool(failure.code) == failure.runs == bool(failure.output)
    assert failure.lesson in {f"{number:02}" for number in range(1, 22)}
    for source in failure.sources:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/\w+/\d+", source)
    for text in (failure.cause, failure.fix, failure.which):
        assert not text or text[-1] in ".:`", text[-20:]
    assert not failure.runs or store.shows(failure.output, failure)
    assert not re.search(r"/(home|root|work|tmp|usr)/\w", failure.output)


@pytest.mark.parametrize(
    "path",
    [path for path in PROGRAMS if from_programs.program_of(path).runs],
    ids=lambda path: path.stem,
)
def test_a_program_shows_the_error_of_its_page(path):
    assert store.shows(store.printed_by(path), from_programs.program_of(path))


def test_a_program_that_shows_another_error_is_found(tmp_path):
    text = (COURSE / "lessons/failures/process_group_twice.py").read_text()
    path = tmp_path / "process_group_twice.py"
    path.write_text(text.replace("range(2)", "range(1)"))
    failure = from_programs.program_of(path)
    assert failure.runs and not store.shows(store.printed_by(path), failure)


@pytest.mark.parametrize("field", ["Run", "Text", "Cause", "Fix", "Lesson", "Source"])
def test_a_field_that_is_missing_is_named(field, tmp_path):
    text = PROGRAMS[0].read_text()
    (tmp_path / "x.py").write_text(text.replace(f"\n{field}:", "\nNote:"))
    with pytest.raises(ValueError, match=f"x.py: no {field}"):
        from_programs.program_of(tmp_path / "x.py")


# ---- a log ----


def diagnosed(log):
    """The pages for a log, as `ddp-course diagnose` orders them."""
    found = findings(lines_of(io.BytesIO(log.encode())), index())
    return [KNOWN[finding.failure].page for finding in found]


ROOT_CAUSE = """\
[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, \
OpType=ALLREDUCE, NumelIn=98, NumelOut=98, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 8, in <module>
[rank1]:     raise ValueError("Attempting to unscale FP16 gradients.")
[rank1]: {error}
[rank2]: RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4242
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4242)
"""


def test_the_error_of_the_first_rank_counts_more_than_what_follows_from_it():
    error = "ValueError: Target modules {'q_proj'} not found in the base model."
    assert diagnosed(ROOT_CAUSE.format(error=error))[0] == "lora-targets-not-found"
    alone = diagnosed(ROOT_CAUSE.format(error="SystemExit"))
    assert alone[0] in {"nccl-watchdog-timeout", "connection-closed-by-peer"}


def test_the_lines_of_a_traceback_do_not_count():
    error = "ValueError: Target modules {'q_proj'} not found in the base model."
    assert "unscale-fp16-gradients" not in diagnosed(ROOT_CAUSE.format(error=error))


def test_of_two_errors_that_of_the_root_cause_comes_first():
    lines = [
        "[rank0]: ValueError: optimizer got an empty parameter list",
        "[rank3]: ValueError: Attempting to unscale FP16 gradients.",
    ]
    table = "Root Cause (first observed failure):\n  rank      : {} (local_rank: 0)\n"
    firsts = [diagnosed("\n".join([*lines, table.format(rank)]))[0] for rank in (0, 3)]
    assert firsts == ["nothing-to-train", "unscale-fp16-gradients"]


NCCL_FAILED = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, {kind}, "
    "NCCL version 2.18.1\n{name}\nLast error:"
)
HEADINGS = [
    NCCL_FAILED.format(
        kind="internal error", name="ncclInternalError: Internal check failed."
    ),
    NCCL_FAILED.format(
        kind="unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        name="ncclUnhandledCudaError: Call to CUDA function failed.",
    ),
    NCCL_FAILED.format(
        kind="unhandled system error (run with NCCL_DEBUG=INFO for details)",
        name="ncclSystemError: System call (e.g. socket, malloc) or external library call "
        "failed or device error.",
    ),
    "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):",
    "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
    "torch.distributed.checkpoint.api.CheckpointException: CheckpointException "
    "ranks:dict_keys([0, 1])",
    "ProcessRaisedException: -- Process 1 terminated with the following error:",
]


@pytest.mark.parametrize("heading", HEADINGS, ids=lambda heading: heading.split()[0])
@pytest.mark.parametrize(
    "page, line",
    [
        ("no-socket-interface", "Bootstrap : no socket interface found"),
        (
            "duplicate-gpu",
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 81000",
        ),
        ("two-versions-of-nccl", "Invalid config blocking attribute value -2147483648"),
        ("no-space-left", "OSError: [Errno 28] No space left on device"),
        ("too-many-open-files", "RuntimeError: received 0 items of ancdata"),
        (
            "samples-of-different-sizes",
            "RuntimeError: stack expects each tensor to be equal size, but got [3, 224] at "
            "entry 0 and [3, 256] at entry 3",
        ),
    ],
)
def test_the_exact_line_below_a_librarys_general_words_counts_more(heading, page, line):
    assert diagnosed(f"{heading}\n{line}")[0] == page


CHAINING = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@pytest.mark.parametrize("sentence", CHAINING)
def test_what_python_says_between_two_exceptions_is_about_no_page(sentence):
    assert not alone(sentence)
    for failure in KNOWN[::20]:
        text = failure.title
        assert diagnosed(f"{text}\n\n{sentence}\n")[0] == diagnosed(text)[0], text
        assert alone(f"{text} {sentence}") == alone(text), text


TORCHRUN = """\
ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 825) of binary: /usr/bin/python3
W1128 15:52:21.168 142 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 14325 closing signal SIGTERM
E1128 15:52:21.343 142 torch/distributed/elastic/multiprocessing/api.py:1002] \
failed (exitcode: 1) local_rank: 0 (pid: 825) of binary: /usr/bin/python3
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 825)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_an_error_above_torchruns_lines_finds_its_page_first():
    """A note, which comes with any run, does not say why a rank failed. What srun says of
    any failure is no more than what torchrun says.
    """
    texts = [
        text
        for failure in KNOWN
        for text in failure.texts[: failure.owned]
        if failure.page != "srun-task-exited" and not log.NOTE.search(text)
    ]
    missed = [
        text
        for text in texts
        if diagnosed(f"{text}\n{TORCHRUN}")[0] != diagnosed(text)[0]
    ]
    assert len(texts) > 600 and missed == []


@pytest.mark.parametrize(
    "page, text",
    [
        (
            "attribute-of-the-wrapper",
            "AttributeError: 'DistributedDataParallel' object has no attribute 'dtype'",
        ),
        ("started-without-torchrun", "KeyError: 'LOCAL_RANK'"),
        ("cuda-out-of-memory", "RuntimeError: CUDA error: out of memory"),
        ("rendezvous-failed", "RuntimeError: Socket Timeout"),
    ],
)
def test_a_short_error_comes_before_the_long_lines_of_launchers(page, text):
    """Also where a log is pasted into the site's search, as one line."""
    srun = "srun: error: gpu-node07: task 0: Exited with exit code 1"
    general = {"only-torchruns-table", "srun-task-exited"}
    for lines in (
        f"{text}\n{TORCHRUN}",
        f"{text}\n{srun}",
        f"{srun}\n{text}\n{TORCHRUN}",
    ):
        first, second, *_ = diagnosed(lines)
        assert first == page and second in general
    assert KNOWN[alone(f"{text} {TORCHRUN.splitlines()[0]}")[0][1]].page == page


@pytest.mark.parametrize(
    "page, text",
    [
        ("started-without-torchrun", "KeyError: 'LOCAL_RANK'"),
        ("cuda-out-of-memory", "torch.OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_a_short_error_comes_before_what_the_other_ranks_say_of_it(page, text):
    left = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    left += "Connection closed by peer [10.0.0.4]:40123"
    for lines in (
        f"[rank0]: {text}\n[rank1]: {left}",
        f"[rank1]: {left}\n[rank0]: {text}",
        f"[rank0]: {text}\n[rank1]: {left}\n{TORCHRUN}",
    ):
        assert diagnosed(lines)[0] == page
    assert diagnosed(f"loss: 2.3\n[rank1]: {left}")[0] == "connection-closed-by-peer"


def test_a_short_error_above_a_long_line_brings_no_page_that_hardly_fits():
    text = f"KeyError: 'LOCAL_RANK'\nepoch 1 loss 2.3\n{TORCHRUN}"
    pages = [
        line for line in report.diagnosis(io.BytesIO(text.encode())) if "more:" in line
    ]
    assert [re.search(r"failures/([\w-]+)\.html", page)[1] for page in pages] == [
        "started-without-torchrun",
        "only-torchruns-table",
    ]


def test_a_line_that_lightning_prints_in_any_run_does_not_hide_the_error():
    line = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4"
    error = "RuntimeError: CUDA error: out of memory"
    assert diagnosed(f"{line}\n{error}")[0] == "cuda-out-of-memory"


def run(*arguments, text=None, **options):
    """`ddp-course diagnose` in a process of its own."""
    command = ["-m", "ddp_course.cli.command", "diagnose", *map(str, arguments)]
    return python(*command, input=text, **options)


def test_diagnose_prints_at_most_three_pages_best_first():
    done = run(
        text=ROOT_CAUSE.format(
            error="ValueError: Attempting to unscale FP16 gradients."
        )
    )
    assert done.returncode == 0 and done.stderr == ""
    blocks = done.stdout.strip().split("\n\n")
    assert 1 <= len(blocks) <= report.PAGES
    assert blocks[0].startswith("Trained parameters in float16: ValueError: Attempting")
    for part in ("line 5:", "cause:", "fix:", "more:"):
        assert f"\n  {part}" in blocks[0], part
    assert "lessons/06_" in blocks[0]
    assert max(len(line) for line in done.stdout.splitlines()) <= 200


def test_an_unknown_text_gives_one_line_and_exit_code_1():
    done = run(text="the quick brown fox jumps over the lazy dog\n" * 3)
    assert (done.returncode, done.stdout) == (1, f"{report.UNKNOWN}\n")


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "there is nothing to read"),
        (b"\n \n", "there is nothing to read"),
        (b"\x7fELF\0\0", "this is not a text"),
        (None, "cannot read "),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(content, told, tmp_path):
    log = tmp_path / "log"
    if content is not None:
        log.write_bytes(content)
    done = run(log)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith(f"ddp-course: {told}") and done.stderr.count("\n") == 1
    )


def test_control_characters_of_a_log_are_not_printed():
    evil = "\x1b]0;pwned\x07\x1b[2J\u202e"
    done = run(text=f"{evil}ValueError: Attempting to unscale FP16 gradients.{evil}\n")
    assert done.returncode == 0 and "unscale FP16" in done.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", done.stdout)


def test_a_long_log_is_read_in_little_memory(tmp_path, monkeypatch):
    """Lines that differ in words, more than are told apart, and a line without an end."""
    monkeypatch.setattr(log, "REMEMBERED", 100)
    path, letters = tmp_path / "log", str.maketrans("0123456789", "abcdefghij")
    with open(path, "w") as file:
        for step in range(20_000):
            file.write(f"step {step} loss\n".translate(letters))
        file.write("x" * 3_000_000 + "\n")
        file.write("ValueError: Attempting to unscale FP16 gradients.\n")
    index()
    tracemalloc.start()
    with open(path, "rb") as stream:
        found = findings(lines_of(stream), index())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert KNOWN[found[0].failure].page == "unscale-fp16-gradients"
    assert peak < 1_000_000


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_program_has_printed_is_a_log_that_leads_to_its_page(path):
    failure = from_programs.program_of(path)
    assert not failure.output or diagnosed(failure.output)[0] == failure.slug


def test_a_zero_byte_in_a_text_does_not_matter():
    line = (
        "some text before it\n"
        + "\0ValueError: Attempting to unscale FP16 gradients.\n"
    )
    assert diagnosed(line)[0] == "unscale-fp16-gradients"


# ---- the site's search does the same ----


def in_javascript(lines, tmp_path):
    """What site/search.js finds for lines: a list of [page, score] for each."""
    pages = [failure.page for failure in KNOWN]
    data = matching.exported(texts_of_all(), pages, general())
    script = (
        f"const Failures = {json.dumps(data)};\n"
        f"{(COURSE / 'site' / 'search.js').read_text()}\n"
        "const matcher = new Matcher(Failures);\n"
        f"const lines = {json.dumps(lines)};\n"
        "console.log(JSON.stringify(lines.map((line) => matcher.matches(line))));\n"
    )
    (tmp_path / "search.js").write_text(script)
    done = subprocess.run(
        ["node", tmp_path / "search.js"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_sites_search_finds_the_same_pages_with_the_same_scores(tmp_path):
    lines = [garble(f.title) for f in KNOWN for garble in (stranger, cut, prefixed)]
    lines += [told(form, code) for form in NAMED for code in (-6, -9, -15)]
    lines += [f"{failure.title} {TORCHRUN.splitlines()[0]}" for failure in KNOWN[::5]]
    for line, found in zip(lines, in_javascript(lines, tmp_path)):
        ours = [
            (KNOWN[match.failure].page, match.score) for match in index().matches(line)
        ]
        assert [page for page, _ in found] == [page for page, _ in ours], line
        for (_, theirs), (_, score) in zip(found, ours):
            assert theirs == pytest.approx(score, abs=1e-5)
