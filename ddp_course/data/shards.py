"""Tokens on the disk: shards, and a manifest that says what they are.

A folder of tokens holds `train-00000.npy`, `train-00001.npy` ... and `validation-...`:
NumPy files with one row of token ids, uint16 or uint32, which are read through memory
maps. `tokens.json` names them, and says which tokens are between two documents, and
which of them ends a text. `tokenizer.json` turns ids into text; where that is missing, a
token is a byte.
"""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing

import numpy as np

from ddp_course import UsageError
from ddp_course.data.tokenizers import BPE, Bytes, small_type
from ddp_course.files import (
    Unusable,
    check_alike,
    content_of,
    json_of,
    open_file,
    remove_unfinished,
    write_atomically,
)
from ddp_course.ranks.fork_server import main_module_hidden

MANIFEST = "tokens.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "validation")
PROGRESS = "progress.json"  # of a folder that is being written
SHARD = 50_000_000  # tokens: 100 MB in 16 bits
HELD_OUT = 20  # one document of so many is for validation
BETWEEN = b"\n\x00\n"  # two documents, for a tokenizer without a token that ends a text
BATCH = 2**18  # bytes of documents that a process tokenises at once


class Shards:
    """The tokens of several files as one long row, read from the disk when asked for.

    files: {path: number of tokens}. Raises UsageError if a file is damaged.
    """

    def __init__(self, files):
        self.arrays = [open_shard(path, length) for path, length in files.items()]
        self.ends = np.cumsum([len(array) for array in self.arrays])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, places):
        """The tokens at some places: a slice, or an array of any shape."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        found = np.empty(places.shape, self.arrays[0].dtype)
        numbers = np.searchsorted(self.ends, places, side="right")
        for number in np.unique(numbers):
            here = numbers == number
            array = self.arrays[number]
            found[here] = array[places[here] - self.ends[number] + len(array)]
        return found


def open_shard(path, length):
    """A memory map of a file's `length` tokens. Raises UsageError if it is damaged."""
    try:
        open_file(path).close()  # a pipe would be waited for
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive")
        if array.shape == (length,) and array.dtype in (np.uint16, np.uint32):
            return array
        problem = f"holds {array.dtype} {array.shape}, not {length:,} tokens"
    except Exception as error:  # a file may hold anything
        problem = f"cannot be read: {' '.join(str(error).split())[:60]}"
    raise UsageError(f"{path} {problem}: write the tokens again")


# ---- written ----


class Part:
    """The training tokens, or those held out: a shard is written when it is full.

    shards: {name: entry} of those that are there already; the others are added.
    """

    def __init__(self, folder, name, shards, size, dtype):
        self.folder, self.name, self.shards = folder, name, shards
        self.size, self.dtype = size, dtype
        self.waiting, self.count = [], 0  # arrays, and how many tokens they hold
        # where the last shard ends: the file, the number of the file's first document,
        # the number of a document, and how many of its tokens are in the shards
        self.place = tuple([*shards.values()][-1]["after"]) if shards else (0, 0, 0, 0)

    def add(self, place, tokens):
        """Take the tokens of a document; yield whenever a shard has been written."""
        done = self.place[3] if place == self.place[:3] else 0
        while done < len(tokens):
            piece = tokens[done : done + self.size - self.count]
            self.waiting.append(piece)
            self.count, done = self.count + len(piece), done + len(piece)
            self.place = (*place, done)
            if self.count == self.size:
                yield self.write()

    def write(self):
        """Write what is waiting as a shard: here each token is copied, once."""
        row = np.concatenate([np.empty(0, self.dtype), *self.waiting])
        self.waiting, self.count = [], 0
        name, file = f"{self.name}-{len(self.shards):05}.npy", io.BytesIO()
        np.save(file, row)
        write_atomically(self.folder / name, file.getbuffer())
        checksum = hashlib.sha256(row).hexdigest()
        entry = {"tokens": len(row), "sha256": checksum, "after": list(self.place)}
        self.shards[name] = entry


def write_tokens(folder, documents, tokenizer, shard=SHARD, processes=1, begun=""):
    """Write a folder of tokens; go on in one that a killed process has left behind.

    documents: see Documents; every twentieth is held out. shard: tokens per file.
    processes: how many tokenise; the files are the same with any number. begun: what is
    written, in words or a fingerprint; a folder that was begun with other ones is
    refused. The manifest comes last. Raises UsageError.
    """
    remove_unfinished(folder)
    written = written_so_far(folder, begun)
    dtype, between = small_type(tokenizer.vocabulary), tokens_between(tokenizer)
    parts = [Part(folder, name, written[name], shard, dtype) for name in PARTS]
    line = Line(documents, written)

    def save():
        write_atomically(folder / PROGRESS, json.dumps({"begun": begun} | written))

    line.begin()
    number = max(part.place[2] for part in parts) if any(written.values()) else -1
    with closing(tokenized(unwritten(documents, parts), tokenizer, processes)) as rows:
        for place, tokens in rows:
            *_, number = place
            if number > 1:  # 0 is the first one held out, 1 the first to train on
                tokens = np.concatenate([between, tokens])
            for _ in parts[part_of(number)].add(place, tokens):
                save()
                line.keep()
            line.rewrite()
    line.end()
    if number < 1:
        raise UsageError(f"the text has {number + 1} documents, and 2 are needed")
    for part in parts:
        if part.count or not part.shards:
            part.write()
            save()
    write_manifest(folder, tokenizer, between, written)


def write_manifest(folder, tokenizer, between, written):
    manifest = {
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": tokenizer.end_of_text,
        "between": between.tolist(),
    }
    for part, shards in written.items():
        manifest[part] = {
            name: {key: entry[key] for key in ("tokens", "sha256")}
            for name, entry in shards.items()
        }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def part_of(number):
    """The part of a document: 0, to train on, or 1, held out."""
    return int(number % HELD_OUT == 0)


def tokens_between(tokenizer):
    """The tokens between two documents, as an array."""
    if tokenizer.end_of_text is None:
        return tokenizer.encode(BETWEEN)
    return np.array([tokenizer.end_of_text], small_type(tokenizer.vocabulary))


def written_so_far(folder, begun):
    """The shards of an unfinished folder: {part: {name: entry}}. It is begun, if that has
    not been done. Raises UsageError if it has shards of something else.
    """
    path, fix = folder / PROGRESS, f"delete {folder}, and run the command again"
    nothing = {"begun": begun} | {part: {} for part in PARTS}
    try:
        found = check_progress(json_of(path)) if path.exists() else nothing
    except Unusable as why:
        raise UsageError(f"{path}: {why}; {fix}") from None
    same, has_shards = found["begun"] == begun, any(found[part] for part in PARTS)
    if has_shards and not same:
        changed = "was begun with other flags, or its files have changed since"
        raise UsageError(f"{folder} {changed}: {fix}")
    if not (same and path.exists()):
        (folder / TOKENIZER).unlink(missing_ok=True)  # it may be that of another choice
        write_atomically(path, json.dumps(nothing))
        found = nothing
    for part in PARTS:
        for name, entry in found[part].items():
            open_shard(folder / name, entry["tokens"])
    return {part: found[part] for part in PARTS}


def check_progress(found):
    """What progress.json holds, if it can be used. Raises Unusable."""
    check_alike(found, {"begun": ""} | {part: {} for part in PARTS})
    entry = {"tokens": 0, "sha256": "", "after": [0, 0, 0, 0]}
    for part in PARTS:
        names = [f"{part}-{number:05}.npy" for number in range(len(found[part]))]
        check_alike(found[part], dict.fromkeys(names, entry), part)
    return found


def unwritten(documents, parts):
    """Yield (place, document) for those that have tokens which no shard has yet."""
    file, first, *_ = min((part.place for part in parts), key=lambda place: place[2])
    for place, document in documents.after(file, first):
        if place[2] >= parts[part_of(place[2])].place[2]:
            yield place, document


class Line:
    """How far it is, on stderr: a line that is rewritten on a terminal, and otherwise a
    line for each full shard.
    """

    def __init__(self, documents, written):
        self.documents, self.written = documents, written
        self.terminal, self.last = sys.stderr.isatty(), 0.0

    def text(self):
        entries = [entry for name in PARTS for entry in self.written[name].values()]
        tokens = sum(entry["tokens"] for entry in entries)
        read, size = self.documents.read / 1e6, self.documents.bytes / 1e6
        written = f"shards written: {len(entries)}, with {tokens:,} tokens"
        return f"{read:,.1f} of {size:,.1f} MB read, {written}"

    def begin(self):
        if any(self.written.values()):
            print(f"going on; {self.text().partition(', ')[2]}", file=sys.stderr)

    def rewrite(self):
        if self.terminal and time.monotonic() > self.last + 0.2:
            self.last = time.monotonic()
            print(f"\r\033[K{self.text()}", end="", file=sys.stderr, flush=True)

    def keep(self):
        if not self.terminal:
            print(self.text(), file=sys.stderr, flush=True)

    def end(self):
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ---- by several processes ----


def tokenized(items, tokenizer, processes):
    """Yield (place, tokens) for (place, document), in the same order."""
    if processes == 1:
        for place, document in items:
            yield place, tokenizer.encode(document)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, begin_process, (tokenizer,))
    waiting = deque()  # not more than a few batches, however fast the files are read
    try:
        for places, batch in batches(items):
            with main_module_hidden():
                waiting.append((places, pool.submit(encode, batch)))
            if len(waiting) > 2 * processes:
                places, tokens = waiting.popleft()
                yield from zip(places, tokens.result())
        for places, tokens in waiting:
            yield from zip(places, tokens.result())
    except BrokenProcessPool:
        fix = "the same command goes on; with fewer --processes it needs less memory"
        raise UsageError(f"a process that tokenised has been killed: {fix}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def batches(items):
    """Yield (places, documents) of about BATCH bytes."""
    places, batch, size = [], [], 0
    for place, document in items:
        places.append(place)
        batch.append(document)
        size += len(document) + 100  # and what it takes to send one
        if size >= BATCH:
            yield places, batch
            places, batch, size = [], [], 0
    if batch:
        yield places, batch


def begin_process(tokenizer):
    """What a process does first that is to tokenise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that reads
    threading.Thread(target=end_with_the_caller, daemon=True).start()
    encode.tokenizer = tokenizer


def end_with_the_caller():
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(batch):
    return [encode.tokenizer.encode(document) for document in batch]


# ---- read ----


def read_tokens(folder):
    """A folder of tokens: (train, validation, tokenizer, fingerprint).

    The first two are Shards. tokenizer.end_of_text: the token between two documents, or
    None if several tokens are there. fingerprint: the SHA-256 of the manifest, which
    has one for each file. Sizes are checked here, and checksums are not: that would
    read all.
    """
    try:
        content = content_of(folder / MANIFEST)
        manifest = json.loads(content)
        files = [
            {folder / name: entry["tokens"] for name, entry in manifest[part].items()}
            for part in PARTS
        ]
        vocabulary = manifest["vocabulary"]
        end_of_text = manifest.get("end_of_text")
        if any(path.parent != folder for each in files for path in each):
            raise ValueError
        if not all(files):  # no file of a part
            raise ValueError
        if end_of_text is not None and end_of_text not in range(vocabulary):
            raise ValueError
        check_alike(list(files[0].values()) + list(files[1].values()), [0])
    except (Unusable, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{folder / MANIFEST} is damaged: write it again") from None
    has_file = (folder / TOKENIZER).is_file()
    tokenizer = BPE(folder / TOKENIZER) if has_file else Bytes()
    if tokenizer.vocabulary != vocabulary:
        counts = f"{vocabulary} token ids, its tokenizer {tokenizer.vocabulary}"
        raise UsageError(f"{folder} has {counts}: write the tokens again")
    tokenizer.end_of_text = end_of_text
    fingerprint = hashlib.sha256(content).hexdigest()
    return *map(Shards, files), tokenizer, fingerprint
