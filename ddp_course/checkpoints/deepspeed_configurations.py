"""DeepSpeed configurations: files, batch arithmetic, and why one is refused."""

import json
import os
from contextlib import contextmanager

from ddp_course import UsageError
from ddp_course.files import open_file

ALL, MICRO, ACCUMULATE = BATCH = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
]


def read_configuration(path):
    """A configuration from a JSON file. Raises UsageError where there is none."""
    try:
        with open_file(path) as file:
            config = json.loads(file.read())
    except json.JSONDecodeError as error:
        line = f"{path}, line {error.lineno}"
        raise UsageError(f"{line}, is no JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", error)
        raise UsageError(f"cannot read {path}: {reason}") from None
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise UsageError(f"{path} must hold an object, in braces, and holds a {kind}")
    return config


def check_batch(config, world_size):
    """The three sizes of a batch, in BATCH's order; DeepSpeed derives those left out.

    Raises UsageError where they contradict each other.
    """
    whole, micro, accumulation = (config.get(name) for name in BATCH)
    for name in BATCH:
        size = config.get(name, 1)
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} is {size!r}, and must be a whole number from 1")
    if whole is None and micro is None:
        raise UsageError(f"the configuration must say {ALL} or {MICRO}")
    if micro is None:
        accumulation = accumulation or 1
        micro = whole // (accumulation * world_size)
    elif accumulation is None:
        accumulation = whole // (micro * world_size) if whole else 1
    product = micro * accumulation * world_size
    if whole not in (None, product):
        ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
        sizes = f"micro batch {micro} x accumulation {accumulation} x {ranks}"
        problem = f"{ALL} is {whole}, but {sizes} = {product}"
        hint = ": was it started with python, and not with torchrun?"
        raise UsageError(problem + hint * (world_size == 1))
    return product, micro, accumulation


@contextmanager
def refusals_in_words(config):
    """Around deepspeed.initialize: its refusals of a configuration become UsageErrors.

    So do an optimizer that it cannot compile, and fp16 in stage 0, where DeepSpeed 0.19
    divides the gradients by a scale that the loss was not multiplied by (its pull
    request 8393). A process without a launcher gets the LOCAL_RANK that it insists on.
    """
    if "optimizer" not in config:
        raise UsageError("the configuration must say which optimizer")
    alone = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split("For further information")[0].split())
        raise UsageError(f"DeepSpeed refuses the configuration: {reason}") from None
    except RuntimeError as error:
        if not any(words in str(error) for words in ("JIT load", "building extension")):
            raise
        needs = "DeepSpeed compiles its own optimizer, with a compiler and ninja"
        raise UsageError(f'{needs}; "torch_adam": true takes torch\'s') from None
    finally:
        if alone:
            del os.environ["LOCAL_RANK"]
    fp16 = config.get("fp16", {}).get("enabled")
    if fp16 and not config.get("zero_optimization", {}).get("stage"):
        raise UsageError("DeepSpeed does not scale the loss in stage 0: take stage 1")
