"""Text to learn from: the sources of Python's standard library, or any folder of text.

Text becomes tokens once, in `runs/corpus`. For a large text, or another tokenizer than
the course's own, write the tokens beforehand, with this command. If it is killed, the
same command goes on:

python -m ddp_course.data.text --data python --tokenizer bpe --out runs/tokens
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from ddp_course import UsageError, project_folder
from ddp_course.data import documents, shards, tokenizers
from ddp_course.data.documents import TEXT, Documents, kind_of
from ddp_course.data.images import WholeBatch
from ddp_course.data.shards import (
    BETWEEN,
    HELD_OUT,
    MANIFEST,
    PROGRESS,
    SHARD,
    TOKENIZER,
    read_tokens,
    write_tokens,
    written_so_far,
)
from ddp_course.data.tokenizers import BPE, Bytes
from ddp_course.files import UNFINISHED, cannot_write, write_atomically
from ddp_course.flags import count, folder_path

NOT_THE_LIBRARY = set(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)
LEARNT_FROM = 10_000  # documents at the most, for a tokenizer of our own
A_PROCESS = 16 * 2**20  # bytes of text for which one more process pays


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
    """The files of a corpus, in order. data: 'python', a folder, or a file.

    Raises UsageError if there are none.
    """
    top = Path(sysconfig.get_paths()["stdlib"] if data == "python" else data)
    left_out = NOT_THE_LIBRARY if data == "python" else {"__pycache__"}
    if top.is_file() and kind_of(top):
        return [top]
    if not top.is_dir():
        raise UsageError(
            f"--data {data} is no folder: name one with text files, or python"
        )
    found = []
    for folder, folders, names in os.walk(top):
        # what is left out is not even looked at: it may be large
        folders[:] = set(folders) - left_out
        paths = [Path(folder, name) for name in set(names) - left_out]
        found += [path for path in paths if kind_of(path) and path.is_file()]
    if data == "python":
        found = [path for path in found if path.suffix == ".py"]
    if not found:
        kinds = ", ".join(sorted(TEXT | {".jsonl", ".parquet"}))
        raise UsageError(
            f"--data {data} has 0 text files: {kinds}, .gz and .zst of them"
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
    corpus = Documents(files_of(data))
    choice = {"tokenizer": tokenizer or "bytes", "vocabulary": vocabulary}
    begun = fingerprint_of_files(corpus, choice)
    folder = project_folder() / "runs" / "corpus" / begun[:16]
    if not folder.exists():
        tokenize(folder, corpus, begun, **choice)
    return read_tokens(folder)


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
    return Path(path)


def tokenize(
    out, corpus, begun, tokenizer, vocabulary, *,
    end=None, shard=SHARD, processes=1, wait=True,
):  # fmt: skip
    """Write a corpus, Documents, as the folder `out` of tokens, once.

    begun: see fingerprint_of_files. end: the name of the token between two documents; by
    default, the one by which the tokenizer ends a text, if it has one. wait: for another
    process that writes the same folder, or raise UsageError. The rest: see arguments.
    """
    one_text = len(corpus.files) == 1 and kind_of(corpus.files[0]) == "text"
    if one_text and corpus.split is None:
        fix = "python -m ddp_course.data.text --split LINE says where one ends"
        raise UsageError(f"{corpus.files[0]} is one document, and 2 are needed: {fix}")
    with unfinished(out, wait) as folder:
        if folder is None:
            return
        written_so_far(folder, begun)
        chosen, path = Bytes(), folder / TOKENIZER
        if tokenizer == "bpe" and not path.exists():
            BPE.train(texts_of(corpus), vocabulary, path)
        elif tokenizer not in ("bytes", "bpe"):
            write_atomically(path, existing(tokenizer).read_bytes())
        if tokenizer != "bytes":
            chosen = BPE(path)
        if end is not None:
            chosen.end_of_text = chosen.named(end)
        write_tokens(folder, corpus, chosen, shard, processes, begun)


def texts_of(corpus):
    """Some texts, from which a tokenizer learns which pairs are frequent: of up to two
    hundred files, and of a file that has many, its first ones.
    """
    tell = corpus.tell and (lambda line: None)  # it is told of when it is tokenised
    silent = Documents(corpus.files, corpus.key, corpus.split, tell)
    files = [place for place in range(len(corpus.files)) if place % HELD_OUT] or [0]
    files = files[:: 1 + len(files) // 100]
    for file in files:
        some = islice(silent.of(file), 1 + LEARNT_FROM // len(files))
        yield from (document.decode(errors="replace") for document in some)


@contextmanager
def unfinished(out, wait):
    """The folder in which `out` is made. It gets its name at the end of the block, or stays
    for the next process that wants to make it. None if `out` is there already.
    """
    from filelock import FileLock, Timeout

    folder, lock = (out.with_name(out.name + end) for end in (UNFINISHED, ".lock"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=-1 if wait else 0):
            if out.exists():
                yield None
                return
            folder.mkdir(exist_ok=True)
            yield folder
            os.rename(folder, out)
            with suppress(OSError):
                (out / PROGRESS).unlink()
                lock.unlink()  # who has waited for it finds `out`
    except Timeout:
        raise UsageError(f"another process is writing {out}: wait for it") from None
    except OSError as error:
        raise cannot_write(out.parent, error) from None


def fingerprint_of_files(corpus, settings):
    """A text that depends on the names, sizes and times of a corpus' files, on the
    settings, and on the programs that make tokens of them. It reads no file of the
    corpus: a file with another content has another size or another time.
    """
    made_of = [settings | {"key": corpus.key, "split": corpus.split}]
    for path in corpus.files:
        status = path.stat()
        made_of.append([os.path.abspath(path), status.st_size, status.st_mtime_ns])
    programs = [Path(room.__file__) for room in (documents, shards, tokenizers)]
    if settings["tokenizer"] not in ("bytes", "bpe"):
        programs.append(existing(settings["tokenizer"]))
    contents = [path.read_bytes() for path in programs]
    return fingerprint_of(__file__, [json.dumps(made_of).encode(), *contents])


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
    content = Path(maker).read_bytes() + BETWEEN.join(sources)
    return hashlib.sha256(content).hexdigest()[:16]


# ---- the command ----


def arguments(argv):
    about = "Write a corpus as a folder of tokens. If it is killed, the same command goes on."
    flags = argparse.ArgumentParser(description=about)
    flag = flags.add_argument
    flag("--data", default="python", help="python, or a folder, or a file (python)")
    flag("--tokenizer", default="bytes", help="bytes, bpe, or a tokenizer.json (bytes)")
    flag("--vocabulary", type=count, default=2048, help="tokens that bpe learns (2048)")
    flag("--key", default="text", help="of a line of JSON, a column of Parquet (text)")
    flag("--split", metavar="LINE", help="a line that ends a document in a text file")
    flag("--end-of-text", metavar="TOKEN", help="between texts (the tokenizer's own)")
    flag("--skip-bad-lines", action="store_true", help="and say which were left out")
    flag("--processes", type=count, help="that tokenise (as many as pay)")
    flag("--shard", type=count, default=SHARD, help="tokens per file (50 million)")
    flag("--out", type=folder_path, required=True, help="the folder, which must be new")
    return flags.parse_args(argv)


def processes_for(corpus, tokenizer):
    """How many processes pay for a corpus."""
    if tokenizer == "bytes":
        return 1
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return min(cores, 1 + corpus.bytes // A_PROCESS)


def left_out(line):
    print(f"left out: {line}", file=sys.stderr)


def main(argv):
    """Write a folder of tokens, which the lessons read with --data."""
    args = arguments(argv)
    if args.out.exists():
        raise UsageError(f"{args.out} is there already: name a new folder with --out")
    tell = left_out if args.skip_bad_lines else None
    corpus = Documents(files_of(args.data), args.key, args.split, tell)
    choice = {"tokenizer": args.tokenizer, "vocabulary": args.vocabulary}
    more = {"end": args.end_of_text, "shard": args.shard}
    processes = args.processes or processes_for(corpus, args.tokenizer)
    begun = fingerprint_of_files(corpus, choice | more)
    tokenize(args.out, corpus, begun, **choice, **more, processes=processes, wait=False)
    train, validation, tokenizer, _ = read_tokens(args.out)
    counts = f"{len(train):,} tokens to train on, {len(validation):,} held out"
    print(f"{args.out.name}: {counts}, a vocabulary of {tokenizer.vocabulary:,}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UsageError, OSError) as error:
        print(f"text.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("text.py: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
