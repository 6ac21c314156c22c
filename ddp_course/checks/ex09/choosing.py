"""Question 1: the newest good checkpoint."""

import hashlib
import json
import os
import random
import tempfile
from pathlib import Path

import torch

from ddp_course.checks.claims import Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

NAMES = ["shared.pt", "rank0.pt", "rank1.pt", "rank2.pt"]  # of a checkpoint's files


def make_checkpoint(folder, name, files, seed, note=None):
    """A checkpoint, as a run would write it: files of random bytes, perhaps a note, and the
    manifest, which does not name the note.
    """
    checkpoint, manifest = folder / name, {}
    checkpoint.mkdir(parents=True)
    for file in NAMES[:files]:
        content = random_bytes(f"{seed} {name} {file}")
        (checkpoint / file).write_bytes(content)
        manifest[file] = hashlib.sha256(content).hexdigest()
    if note:
        (checkpoint / "notes.txt").write_text(note)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def random_bytes(text):
    """5,000 bytes that depend on a text."""
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
    numbers = torch.randint(256, (5000,), generator=generator, dtype=torch.uint8)
    return numbers.numpy().tobytes()


def flip_a_bit(path, bit=4):
    content = bytearray(path.read_bytes())
    content[-7] ^= bit
    path.write_bytes(content)


def flip_the_highest_bit(path):
    """What comes of a text in ASCII is no UTF-8 any more."""
    flip_a_bit(path, 128)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def half_of(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def no_object(path):
    path.write_text("null")


def a_list(path):
    path.write_text(json.dumps(NAMES[:1]))


# what can be wrong with a checkpoint: the file, and what happens to it. "last" is the
# last file that the manifest names
DAMAGES = {
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", half_of),
    "null as its manifest": ("manifest.json", no_object),
    "a flipped bit in its manifest": ("manifest.json", flip_the_highest_bit),
    "a file missing": ("last", Path.unlink),
    "a file cut short": ("shared.pt", cut_short),
    "a flipped bit": ("shared.pt", flip_a_bit),
    "a flipped bit in its last file": ("last", flip_a_bit),
    "a list as its manifest": ("manifest.json", a_list),
}
FILES, FOLDERS = ["notes.txt", "step-999999.tar", "step-999997"], ["step-999998-copy", "old-step-999996"]
ARCHIVED = "archive/step-999995"


def plant(folder, files, whole, damaged, seed):
    """A folder of checkpoints with `files` files each, and of other things, made in a
    random order: the newest is not the one that was made last.

    whole: numbers, as texts; damaged: {number: what is wrong with it}.
    """
    numbers = [*whole, *damaged]
    random.Random(f"{seed} {numbers}").shuffle(numbers)
    for number in numbers:
        note = "not in the manifest, and not needed" if number == max(whole, key=int, default=None) else None
        checkpoint = make_checkpoint(folder, f"step-{number}", files, seed, note)
        if number in damaged:
            name, damage = DAMAGES[damaged[number]]
            damage(checkpoint / (NAMES[files - 1] if name == "last" else name))
    for name in FILES:
        (folder / name).write_text("something of somebody's")
    for name in [*FOLDERS, ARCHIVED]:
        make_checkpoint(folder, name, files, seed)


def found_in(newest_good, cases, seed):
    """For each case, what the answer returned, and whether the folder is unchanged."""
    found, here = [], os.getcwd()
    with tempfile.TemporaryDirectory() as top:
        for number, case in enumerate(cases):
            folder = Path(top, str(number), "checkpoints")
            folder.mkdir(parents=True)
            plant(folder, **case, seed=seed)
            before = listing(folder)
            with trying(in_words(case)):
                answer = newest_good(folder)
            untouched, stayed = listing(folder) == before, os.getcwd() == here
            found.append({"answer": name_in(folder, answer), "untouched": untouched, "stayed": stayed})
            os.chdir(here)
    return found


def name_in(folder, answer):
    """A path as text, relative to the folder where it is inside of it."""
    if not isinstance(answer, Path | str):
        return answer
    if Path(answer).is_relative_to(folder):
        return str(Path(answer).relative_to(folder))
    return str(answer) if Path(answer).is_absolute() else f"{answer}{NO_FOLDER}"


NO_FOLDER = ", without its folder"


def listing(folder):
    return sorted((str(path), path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*"))


def in_words(case):
    words = [f"step-{number}" for number in case["whole"]]
    words += [f"step-{number} ({why})" for number, why in case["damaged"].items()]
    return "a folder with " + (", ".join(sorted(words)) if words else "no checkpoint")


@question(
    "Read each manifest with json.loads, and hash each file that it names: "
    "hashlib.sha256(path.read_bytes()).hexdigest(). Any error on the way means that this checkpoint is damaged.",
    "The number in the name decides which checkpoint is newer, not the alphabet: step-90 is older than step-100. "
    "Use int(path.name.removeprefix('step-')) as the key of sorted(), for the folders that glob('step-*') finds and "
    "whose name ends in digits only.",
    "Go through the folders from the largest number down. In a try: manifest = json.loads((path / 'manifest.json')"
    ".read_text()), and return path if all(hashlib.sha256((path / name).read_bytes()).hexdigest() == expected for "
    "name, expected in manifest.items()). except (OSError, ValueError, AttributeError): go on; the last one is the "
    "error of a manifest that is not an object. At the end, return None.",
)
def check_newest_good(answer, draw):
    """In each of several folders with whole and damaged checkpoints, it must find the
    newest whole one, or none.
    """
    cases = cases_of_folders(draw)
    [found] = answer.on_ranks(found_in, cases, draw.randrange(10**6))
    for case, seen in zip(cases, found):
        hold(claims(seen, **case))


def cases_of_folders(draw):
    """Folders, as the arguments of `plant`: each damage, and other combinations."""
    steps = sorted(draw.sample(range(2, 9), 2)) + [draw.randrange(10, 90), draw.randrange(100, 900)]
    first, second, third, last = map(str, steps)
    planned = [([last], {}), ([first, second, third, last], {})]
    planned += [([first, second, third], {last: damage}) for damage in DAMAGES]
    planned += [
        ([second, first], {third: "a flipped bit", last: "no manifest"}),
        ([f"{first:0>8}", f"{third:0>8}"], {f"{last:0>8}": "a file missing"}),
        ([f"{first:0>8}", f"{second:0>4}", third], {last: "a file missing"}),
        ([], {first: "a file missing", last: "half a manifest"}),
        ([], {}),
    ]
    return [
        {"files": 3 + number % 2, "whole": whole, "damaged": damaged} for number, (whole, damaged) in enumerate(planned)
    ]


# ---- what is claimed ----

NO_OBJECT = "its manifest is not a JSON object, so it names no file and proves nothing"
CAUSES = {
    "no manifest": "this checkpoint was never finished: its manifest, which is written last, is missing",
    "half a manifest": "its manifest is cut short, so it cannot be trusted",
    "null as its manifest": NO_OBJECT,
    "a list as its manifest": NO_OBJECT,
    "a flipped bit in its manifest": "its manifest is no text any more, so it cannot be trusted",
    "a file missing": "its manifest names a file that is missing",
    "a file cut short": "a file is shorter than it was: compare its checksum, not only its name",
    "a flipped bit": "all files exist and have the right length, but the content of one has changed: compare its "
    "checksum with the manifest's, over the whole file",
    "a flipped bit in its last file": "the other files are right, but one is not: compare all of them, over their "
    "whole length",
}
OTHERS = [
    *((name, "that is a file, not a checkpoint: use only folders named step- and a number") for name in FILES),
    *((name, "its name is not step- and a number: it is something else, which happens to look like a checkpoint")
      for name in FOLDERS),
    (ARCHIVED, "that is in a folder within the folder: its checkpoints are directly in it"),
]  # fmt: skip
REFUSED = (
    "this checkpoint is whole, and it was refused: compare hashlib.sha256 of the complete content of each file that the "
    "manifest names, as hexdigest(), and of no other file"
)


def claims(seen, files, whole, damaged):
    """That the newest whole checkpoint was found, and nothing has changed."""
    folder, got = in_words({"whole": whole, "damaged": damaged}), seen["answer"]
    names = [f"step-{number}" for number in whole]
    mistakes = [(f"step-{number}", CAUSES[why]) for number, why in damaged.items()] + OTHERS
    mistakes += [
        (None, "there is a whole checkpoint: if one is damaged, try the next older one" if damaged else REFUSED)
    ]
    mistakes += [
        (name, "as texts, step-9 comes after step-10: compare the numbers") for name in names if name == max(names)
    ]
    mistakes += [(name, "it is whole, but there is a newer one: the one with the largest number") for name in names]
    otherwise = "return the folder's Path, or None if no checkpoint is whole"
    if isinstance(got, str) and got.endswith(NO_FOLDER):
        otherwise = "return the whole path, folder / name: by its name alone, nobody finds the checkpoint"
    elif isinstance(got, str) and Path(got).is_absolute():
        otherwise = "that is in another folder: does something remain from an earlier call?"
    newest = f"step-{max(whole, key=int)}" if whole else None
    yield Claim(folder, got, newest, otherwise, mistakes)
    yield Claim(
        folder, seen["untouched"], True,
        "the folder has changed: a search for a checkpoint must not change anything",
        told="an unchanged folder", shown="another",
    )  # fmt: skip
    yield Claim(
        folder, seen["stayed"], True,
        "os.chdir changes the folder of the whole program, in which it then looks for other files: join paths",
        told="the same current folder", shown="another, after the call",
    )  # fmt: skip
