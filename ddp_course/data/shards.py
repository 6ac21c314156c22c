"""Tokens on the disk: shards, and a manifest that says what they are.

A folder of tokens holds `train-00000.npy`, `train-00001.npy` ... and `validation-...`:
NumPy files with one row of token ids, uint16 or uint32, which are read through memory
maps. `tokens.json` names them, and `tokenizer.json` turns ids into text; where that is
missing, a token is a byte.
"""

import hashlib
import json

import numpy as np

from ddp_course import UsageError
from ddp_course.data.tokenizers import BPE, Bytes, small_type
from ddp_course.files import Unusable, check_alike, content_of, open_file

MANIFEST = "tokens.json"
SHARD = 50_000_000  # tokens: 100 MB in 16 bits


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


def write_tokens(folder, parts, tokenizer, between, shard=SHARD):
    """Write a folder of tokens; the manifest comes last.

    parts: {'train': contents, 'validation': contents}, an iterable of bytes each.
    between: bytes that separate two contents. shard: tokens per file.
    """
    manifest = {"vocabulary": tokenizer.vocabulary}
    for part, contents in parts.items():
        manifest[part] = {}
        for number, tokens in enumerate(pieces(contents, tokenizer, between, shard)):
            path = folder / f"{part}-{number:05}.npy"
            np.save(path, tokens)
            checksum = hashlib.sha256(tokens.tobytes()).hexdigest()
            manifest[part][path.name] = {"tokens": len(tokens), "sha256": checksum}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def pieces(contents, tokenizer, between, shard):
    """Yield the tokens of the contents in arrays of `shard`; the last one is shorter."""
    waiting = np.empty(0, small_type(tokenizer.vocabulary))
    for number, content in enumerate(contents):
        parts = [waiting, tokenizer.encode(between)] if number else [waiting]
        waiting = np.concatenate([*parts, tokenizer.encode(content)])
        while len(waiting) > shard:
            yield waiting[:shard]
            waiting = waiting[shard:]
    yield waiting


def read_tokens(folder):
    """A folder of tokens: (train, validation, tokenizer, fingerprint).

    The first two are Shards. fingerprint: the SHA-256 of the manifest, which has one
    for each file. Sizes are checked here, and checksums are not: that would read all.
    """
    try:
        content = content_of(folder / MANIFEST)
        manifest = json.loads(content)
        files = [
            {folder / name: entry["tokens"] for name, entry in manifest[part].items()}
            for part in ("train", "validation")
        ]
        vocabulary = manifest["vocabulary"]
        if any(path.parent != folder for each in files for path in each):
            raise ValueError
        if not all(files):  # no file of a part
            raise ValueError
        check_alike(list(files[0].values()) + list(files[1].values()), [0])
    except (Unusable, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{folder / MANIFEST} is damaged: write it again") from None
    has_file = (folder / "tokenizer.json").is_file()
    tokenizer = BPE(folder / "tokenizer.json") if has_file else Bytes()
    if tokenizer.vocabulary != vocabulary:
        counts = f"{vocabulary} token ids, its tokenizer {tokenizer.vocabulary}"
        raise UsageError(f"{folder} has {counts}: write the tokens again")
    fingerprint = hashlib.sha256(content).hexdigest()
    return *map(Shards, files), tokenizer, fingerprint
