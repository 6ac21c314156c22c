"""Twenty and more ways in which a file may be damaged, or made to do harm."""

import copy
import io
import json
import math
import os
import pickle
import shutil
import zipfile

import torch

CANARY = "DDP_COURSE_CANARY"  # an environment variable: whether code of a file has run


def sing():
    os.environ[CANARY] = "1"


class Code:
    def __reduce__(self):
        return exec, (f"import os; os.environ[{CANARY!r}] = '1'",)


OTHERS = [None, True, "x", "", -1, 0, 1.5, math.nan, math.inf, 10**400, [], {}]
OTHERS += [[[1], [2]], {"a": 1}, ["x"], torch.ones(2), torch.full((3, 3), math.nan)]


def with_another_value(value, draw, others=OTHERS):
    """A copy of nested dicts and lists in which one value is another one, or missing."""
    value = copy.deepcopy(value)
    places = []

    def visit(part):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, item in items:
            places.append((part, key))
            if isinstance(item, dict | list):
                visit(item)

    if not isinstance(value, dict | list) or not value:
        return draw.choice(others)
    visit(value)
    part, key = draw.choice(places)
    if draw.random() < 0.2:
        del part[key]
    else:
        part[key] = draw.choice(others)
    return value


def damage(path, draw, kind=None):
    """Damage a file in one of KINDS, drawn or given; return its name."""
    kind = kind or draw.choice(list(KINDS))
    before = path.read_bytes()
    made = KINDS[kind](path, before, draw)
    if made is not None:
        path.write_bytes(made)
    return kind


def replaced(make):
    """A kind that puts something in the place of the file."""

    def kind(path, before, draw):
        path.unlink()
        make(path)

    return kind


def flipped(path, before, draw):
    content = bytearray(before or b"x")
    for _ in range(draw.choice([1, 1, 8])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def as_json(path, before, draw):
    try:
        value = json.loads(before)
    except ValueError:
        value = {"a": [1]}
    plain = [other for other in OTHERS if not isinstance(other, torch.Tensor)]
    return json.dumps(with_another_value(value, draw, plain)).encode()


def as_tensors(path, before, draw):
    try:
        value = torch.load(io.BytesIO(before), weights_only=False)
    except Exception:
        value = {"a": [1]}
    return saved(with_another_value(value, draw))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive_with_code(path, before, draw):
    """A file of torch.save with another pickle in it."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(2)}))) as old,
        zipfile.ZipFile(file, "w") as new,
    ):
        for name in old.namelist():
            content = (
                pickle.dumps(Code()) if name.endswith("data.pkl") else old.read(name)
            )
            new.writestr(name, content)
    return file.getvalue()


KINDS = {
    "empty": lambda *_: b"",
    "half": lambda path, before, draw: before[: len(before) // 2],
    "cut": lambda path, before, draw: before[: draw.randrange(len(before) + 1)],
    "flipped": flipped,
    "noise": lambda path, before, draw: draw.randbytes(draw.randrange(1, 5000)),
    "zeros": lambda path, before, draw: bytes(len(before)),
    "twice": lambda path, before, draw: before + before,
    "a text": lambda *_: "no file öf ours \0\n".encode() * 9,
    "deep lists": lambda *_: b"[" * 100_000,
    "deep dicts": lambda *_: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "null": lambda *_: b"null",
    "a number": lambda *_: b"1e999",
    "a list": lambda *_: b"[NaN, -Infinity, 1e999]",
    "other JSON": as_json,
    "more JSON": as_json,
    "a pickle with code": lambda *_: pickle.dumps(Code()),
    "an old pickle with code": lambda *_: pickle.dumps(Code(), 2),
    "code in torch's file": lambda *_: saved(Code()),
    "code in an archive": archive_with_code,
    "nothing, saved": lambda *_: saved(None),
    "a text, saved": lambda *_: saved("a text"),
    "other tensors": as_tensors,
    "more tensors": as_tensors,
    "a pipe": replaced(os.mkfifo),
    "a folder": replaced(os.mkdir),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "without end": replaced(lambda path: path.symlink_to("/dev/zero")),
    "missing": replaced(lambda path: None),
}


def empty(folder):
    """Delete what is in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
