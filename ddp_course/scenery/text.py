"""Text to learn from: the sources of Python's standard library, which every machine
has, or any folder of text.

It is turned into tokens once, and kept as files of uint16 numbers that are read through
a memory map.
"""

import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

from ddp_course import UsageError, project_folder
from ddp_course.scenery.images import WholeBatch

TEXT = set(
    ".py .txt .md .rst .tex .html .json .csv .c .h .cpp .js .java .ipynb".split()
)
NOT_THE_LIBRARY = set(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)
BETWEEN_FILES = b"\n\x00\n"  # between two files: no text has a zero byte
HELD_OUT = 20  # of so many files one is for validation


class Windows(torch.utils.data.Dataset):
    """The windows of a text, side by side: sample i is `context` tokens and, for each,
    the one that comes after it.

    tokens: uint16, a memory map. A batch, asked for by its list of indices, is two
    tensors, int64 (batch, context). Windows do not overlap, but for the last target of
    one, which is the first input of the next.
    """

    def __init__(self, tokens, context, places=None):
        self.tokens, self.context = tokens, context
        self.places = range((len(tokens) - 1) // context) if places is None else places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        [(tokens, targets)] = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices):
        starts = (
            np.array([self.places[index] for index in indices])[:, None] * self.context
        )
        rows = torch.from_numpy(
            self.tokens[starts + np.arange(self.context + 1)].astype(np.int64)
        )
        return [WholeBatch((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))]

    def some(self, number):
        """So many of the windows, from all over the text. Raises UsageError where there
        are fewer.
        """
        if number > len(self):
            few = f"the text has: {len(self)} windows of {self.context} tokens"
            raise UsageError(f"--train-samples {number} is more than {few}")
        return Windows(
            self.tokens, self.context, self.places[:: len(self) // number][:number]
        )


class Bytes:
    """A tokenizer that needs no training: a token is a byte of UTF-8."""

    vocabulary = 256

    def encode(self, content):
        """bytes -> uint16 (tokens,)"""
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens):
        """numbers -> str"""
        return bytes(tokens).decode("utf-8", errors="replace")


class BPE:
    """Byte-pair encoding: a token is a byte, or what two tokens make that often come
    together.

    P. Gage, 1994; R. Sennrich, B. Haddow, A. Birch, "Neural Machine Translation of Rare
    Words with Subword Units", 2016; on bytes: GPT-2. Trained by Hugging Face's
    `tokenizers`.
    """

    def __init__(self, path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))
        self.vocabulary = self.tokenizer.get_vocab_size()

    @staticmethod
    def train(texts, vocabulary, path, special=()):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=alphabet,
            special_tokens=list(special),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))

    def encode(self, content):
        lines = content.decode("utf-8", errors="replace").splitlines(keepends=True)
        encoded = self.tokenizer.encode_batch(lines)
        return np.concatenate(
            [np.asarray(line.ids, dtype=np.uint16) for line in encoded]
        )

    def decode(self, tokens):
        return self.tokenizer.decode(list(map(int, tokens)))


def files_of(data):
    """The files of a corpus, in order. data: 'python', or a folder. Raises UsageError
    where there is none.
    """
    top = Path(sysconfig.get_paths()["stdlib"] if data == "python" else data)
    wanted, left_out = (
        ({".py"}, NOT_THE_LIBRARY) if data == "python" else (TEXT, {"__pycache__"})
    )
    if not top.is_dir():
        raise UsageError(
            f"--data {data} is no folder: name one with text files, or python"
        )
    found = []
    for folder, folders, names in os.walk(top):
        folders[:] = (
            set(folders) - left_out
        )  # what is left out is not even looked at: it may be large
        paths = [Path(folder, name) for name in set(names) - left_out]
        found += [path for path in paths if path.suffix in wanted and path.is_file()]
    if len(found) < 2:
        raise UsageError(
            f"--data {data} has {len(found)} text files ({', '.join(sorted(TEXT))}), and 2 are needed"
        )
    return sorted(found, key=lambda path: path.relative_to(top).as_posix())


def load_text(data="python", tokenizer="bytes", vocabulary=2048):
    """A corpus as tokens: (training tokens, validation tokens, tokenizer, fingerprint).

    data: 'python' or a folder. tokenizer: 'bytes' or 'bpe', of so large a `vocabulary`.
    The tokens are uint16 memory maps, made by the first process of a machine that asks,
    in runs/corpus; the others wait for it. fingerprint: the SHA-256 of the text, in
    which each file counts with its place.
    Raises UsageError where there is no text.
    """
    files = files_of(data)
    contents = [path.read_bytes().replace(b"\x00", b"") for path in files]
    fingerprint = hashlib.sha256(BETWEEN_FILES.join(contents)).hexdigest()
    name = f"{fingerprint[:16]}-{tokenizer}" + (
        f"-{vocabulary}" if tokenizer == "bpe" else ""
    )
    folder = made_once(
        "corpus", name, lambda folder: _make(folder, contents, tokenizer, vocabulary)
    )
    train, validation = (
        np.memmap(folder / f"{part}.bin", np.uint16, "r")
        for part in ("train", "validation")
    )
    return (
        train,
        validation,
        Bytes() if tokenizer == "bytes" else BPE(folder / "tokenizer.json"),
        fingerprint,
    )


def made_once(kind, name, make):
    """The folder runs/<kind>/<name>, filled by make(folder): by the first process of a
    machine that asks.

    It is there whole or not at all; the others wait for it. Raises UsageError where it
    cannot be written.
    """
    from filelock import FileLock

    folder = project_folder() / "runs" / kind / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                with tempfile.TemporaryDirectory(
                    dir=folder.parent, prefix="."
                ) as temporary:
                    Path(temporary, name).mkdir()
                    make(Path(temporary, name))
                    os.rename(Path(temporary, name), folder)
    except OSError as error:
        raise UsageError(f"cannot write to {folder.parent}: {error.strerror}") from None
    return folder


def _make(folder, contents, tokenizer, vocabulary):
    parts = {
        "train": [
            content for number, content in enumerate(contents) if number % HELD_OUT
        ],
        "validation": contents[::HELD_OUT],
    }
    if tokenizer == "bpe":
        # a hundred files know which pairs are frequent
        some = parts["train"][:: 1 + len(parts["train"]) // 100]
        texts = (content.decode("utf-8", errors="replace") for content in some)
        BPE.train(texts, vocabulary, folder / "tokenizer.json")
        tokenizer = BPE(folder / "tokenizer.json")
    else:
        tokenizer = Bytes()
    for part, of_part in parts.items():
        tokenizer.encode(BETWEEN_FILES.join(of_part)).tofile(folder / f"{part}.bin")


def fingerprint_of(maker, sources):
    """16 letters that depend on some texts, bytes, and on the file that makes something
    of them, as it is today.
    """
    return hashlib.sha256(
        Path(maker).read_bytes() + BETWEEN_FILES.join(sources)
    ).hexdigest()[:16]
