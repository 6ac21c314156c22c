"""Text to learn from: the sources of Python's standard library, or any folder of text.

Text becomes tokens once, in `runs/corpus`. For a large text, or another tokenizer than
the course's own, write the tokens beforehand, with this command:

python -m ddp_course.data.text --data python --tokenizer bpe --out runs/tokens
"""

import argparse
import hashlib
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

from ddp_course import UsageError, project_folder
from ddp_course.data.images import WholeBatch
from ddp_course.data.shards import MANIFEST, SHARD, read_tokens, write_tokens
from ddp_course.data.tokenizers import BPE, Bytes
from ddp_course.flags import count, folder_path

TEXT = set(
    ".py .txt .md .rst .tex .html .json .csv .c .h .cpp .js .java .ipynb".split()
)
NOT_THE_LIBRARY = set(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)
BETWEEN_FILES = b"\n\x00\n"  # between two files: no text has a zero byte
HELD_OUT = 20  # one file of so many is for validation


class Windows(torch.utils.data.Dataset):
    """A text in windows, side by side: sample i is `context` tokens, and their targets.

    The target of a token is the one that follows it, so the last target of a window is
    the first token of the next. tokens: Shards, or an array of integers. A batch, asked
    for by its list of indices, is two tensors, int64 (batch, context).
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
        """So many windows, from all over the text; UsageError if it has fewer."""
        if number > len(self):
            few = f"the text has: {len(self)} windows of {self.context} tokens"
            raise UsageError(f"--train-samples {number} is more than {few}")
        return Windows(
            self.tokens, self.context, self.places[:: len(self) // number][:number]
        )


def files_of(data):
    """The files of a corpus, in order. data: 'python', or a folder.

    Raises UsageError if there are fewer than two.
    """
    top = Path(sysconfig.get_paths()["stdlib"] if data == "python" else data)
    suffixes, left_out = (
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
        found += [path for path in paths if path.suffix in suffixes and path.is_file()]
    if len(found) < 2:
        raise UsageError(
            f"--data {data} has {len(found)} text files ({', '.join(sorted(TEXT))}), and 2 are needed"
        )
    return sorted(found, key=lambda path: path.relative_to(top).as_posix())


def load_text(data="python", tokenizer=None, vocabulary=2048):
    """A corpus as tokens: (train, validation, tokenizer, fingerprint).

    data: 'python', a folder of text, or a folder of tokens, which `main` has written.
    tokenizer: 'bytes' (the default), 'bpe', which learns `vocabulary` tokens, or the
    path of a tokenizer.json. The tokens are Shards. The first process of a machine that
    asks for them makes them, in runs/corpus, and the others wait.
    Raises UsageError if there is no text, or no such tokenizer.
    """
    if (Path(data) / MANIFEST).is_file():
        if tokenizer:
            fix = "leave out --tokenizer, or name a folder of text"
            raise UsageError(f"--data {data} has tokens, not text: {fix}")
        return read_tokens(Path(data))
    tokenizer = tokenizer or "bytes"
    contents = [content_of(path) for path in files_of(data)]
    settings = f"{tokenizer} {vocabulary}".encode()
    if tokenizer not in ("bytes", "bpe"):
        settings = Path(existing(tokenizer)).read_bytes()
    name = fingerprint_of(__file__, [*contents, settings])
    make = lambda folder: tokenize(folder, data, tokenizer, vocabulary)
    return read_tokens(made_once("corpus", name, make))


def load_windows(data, tokenizer, vocabulary, context, samples=None, most=None):
    """A corpus in windows: (train, validation, tokenizer, fingerprint); see load_text.

    samples: how many of the training windows; by default all, or the `most` if there
    are more. Raises UsageError where there are too few.
    """
    *parts, tokenizer, fingerprint = load_text(data, tokenizer, vocabulary)
    train, validation = (Windows(tokens, context) for tokens in parts)
    if not (len(train) and len(validation)):
        problem = f"--data {data} is too short: a window has {context} tokens"
        raise UsageError(f"{problem}, and one is needed to train on, one to evaluate")
    train = train.some(samples or min(most or len(train), len(train)))
    return train, validation, tokenizer, fingerprint


def existing(path):
    """The path of a tokenizer's file. Raises UsageError if there is none."""
    if not Path(path).is_file():
        choice = "bytes, bpe, or the path of a tokenizer.json"
        raise UsageError(f"--tokenizer {path} is not there: use {choice}")
    return path


def content_of(path):
    return path.read_bytes().replace(b"\x00", b"")


def tokenize(folder, data, tokenizer, vocabulary, shard=SHARD):
    """Write a corpus as a folder of tokens; every twentieth file is for validation."""
    files = files_of(data)
    parts = {
        "train": [path for number, path in enumerate(files) if number % HELD_OUT],
        "validation": files[::HELD_OUT],
    }
    chosen, path = Bytes(), folder / "tokenizer.json"
    if tokenizer == "bpe":
        # a hundred files know which pairs are frequent
        some = parts["train"][:: 1 + len(parts["train"]) // 100]
        texts = (content_of(file).decode("utf-8", errors="replace") for file in some)
        BPE.train(texts, vocabulary, path)
    elif tokenizer != "bytes":
        path.write_bytes(Path(existing(tokenizer)).read_bytes())
    if tokenizer != "bytes":
        chosen = BPE(path)
    contents = {part: map(content_of, files) for part, files in parts.items()}
    write_tokens(folder, contents, chosen, BETWEEN_FILES, shard)


def made_once(kind, name, make):
    """The folder runs/<kind>/<name>, which the first process that asks fills.

    make(folder) fills it; other processes of the machine wait. The folder is there
    whole or not at all. Raises UsageError if it cannot be written.
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


def fingerprint_of(maker, sources):
    """16 letters that depend on some texts, bytes, and on the source file `maker`."""
    return hashlib.sha256(
        Path(maker).read_bytes() + BETWEEN_FILES.join(sources)
    ).hexdigest()[:16]


def arguments(argv):
    flags = argparse.ArgumentParser(description="Write a corpus as a folder of tokens.")
    flag = flags.add_argument
    flag("--data", default="python", help="python, or a folder of text (python)")
    flag("--tokenizer", default="bytes", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", type=count, default=2048, help="tokens that bpe learns (2048)")
    flag("--shard", type=count, default=SHARD, help="tokens per file (50 million)")
    flag("--out", type=folder_path, required=True, help="the folder, which must be new")
    return flags.parse_args(argv)


def main(argv):
    """Write a folder of tokens, which the lessons read with --data."""
    args = arguments(argv)
    if args.out.exists():
        raise UsageError(f"{args.out} is there already: name a new folder with --out")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".") as temporary:
        folder = Path(temporary, "tokens")
        folder.mkdir()
        tokenize(folder, args.data, args.tokenizer, args.vocabulary, args.shard)
        os.rename(folder, args.out)
    train, validation, tokenizer, _ = read_tokens(args.out)
    counts = f"{len(train):,} tokens to train on, {len(validation):,} held out"
    print(f"{args.out.name}: {counts}, a vocabulary of {tokenizer.vocabulary:,}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UsageError, OSError) as error:
        print(f"text.py: {error}", file=sys.stderr)
        sys.exit(2)
