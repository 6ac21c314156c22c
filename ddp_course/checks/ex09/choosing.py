"""Question 1: the newest good checkpoint."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong

NAMES = ["shared.pt", "rank0.pt", "rank1.pt", "rank2.pt"]  # of a checkpoint's files


def make_checkpoint(folder, name, files, seed):
    """A checkpoint, as a run would write it: files of random bytes, and the manifest."""
    checkpoint, manifest = folder / name, {}
    checkpoint.mkdir(parents=True)
    for file in NAMES[:files]:
        content = random_bytes(f"{seed} {name} {file}")
        (checkpoint / file).write_bytes(content)
        manifest[file] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def random_bytes(text):
    """5,000 bytes that depend on a text."""
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
    numbers = torch.randint(256, (5000,), generator=generator, dtype=torch.uint8)
    return numbers.numpy().tobytes()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def half_of(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def no_object(path):
    path.write_text("null")


# what can be wrong with a checkpoint: the file, and what happens to it. "last" is the
# last file that the manifest names
DAMAGES = {
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", half_of),
    "null as its manifest": ("manifest.json", no_object),
    "a file missing": ("last", Path.unlink),
    "a file cut short": ("shared.pt", cut_short),
    "a flipped bit": ("shared.pt", flip_a_bit),
    "a flipped bit in its last file": ("last", flip_a_bit),
}


def plant(folder, files, whole, damaged, seed):
    """A folder of checkpoints with `files` files each, and of other things.

    whole: numbers, as texts; damaged: {number: what is wrong with it}.
    """
    for number in [*whole, *damaged]:
        checkpoint = make_checkpoint(folder, f"step-{number}", files, seed)
        if number in damaged:
            name, damage = DAMAGES[damaged[number]]
            damage(checkpoint / (NAMES[files - 1] if name == "last" else name))
    if whole:
        newest = folder / f"step-{max(whole, key=int)}"
        (newest / "notes.txt").write_text("not in the manifest, and not needed")
    (folder / "notes.txt").write_text("the learning rate was too high")
    (folder / "step-999999.tar").write_text("an archive of somebody's")
    make_checkpoint(folder, "step-999998-copy", files, seed)


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
        judge_choice(case, seen)


def cases_of_folders(draw):
    """Folders, as the arguments of `plant`: each damage, and other combinations."""
    steps = sorted(draw.sample(range(2, 9), 2)) + [draw.randrange(10, 90), draw.randrange(100, 900)]
    first, second, third, last = map(str, steps)
    planned = [([last], {}), ([first, second, third, last], {})]
    planned += [([first, second, third], {last: damage}) for damage in DAMAGES]
    planned += [
        ([second, first], {third: "a flipped bit", last: "no manifest"}),
        ([f"{first:0>8}", f"{third:0>8}"], {f"{last:0>8}": "a file missing"}),
        ([], {first: "a file missing", last: "half a manifest"}),
        ([], {}),
    ]
    return [
        {"files": 2 + number % 3, "whole": whole, "damaged": damaged} for number, (whole, damaged) in enumerate(planned)
    ]


def judge_choice(case, seen):
    """Raise Wrong unless the newest whole checkpoint was found, and nothing changed."""
    whole = case["whole"]
    expected = f"step-{max(whole, key=int)}" if whole else None
    got, checked = seen["answer"], in_words(case)
    if got != expected:
        cause = cause_of_choice(got, **case)
        rows = {"expected": expected, "got": got if isinstance(got, str) else repr(got)}
        raise Wrong(checked, cause=cause, **rows)
    if not seen["untouched"]:
        cause = "the folder has changed: a search for a checkpoint must not change anything"
        raise Wrong(checked, expected="an unchanged folder", got="another", cause=cause)
    if not seen["stayed"]:
        cause = "os.chdir changes the folder of the whole program, in which it then looks for other files: join paths"
        raise Wrong(checked, expected="the same current folder", got="another, after the call", cause=cause)


CAUSES = {
    "no manifest": "this checkpoint was never finished: its manifest, which is written last, is missing",
    "half a manifest": "its manifest is cut short, so it cannot be trusted",
    "null as its manifest": "its manifest is not a JSON object, so it names no file and proves nothing",
    "a file missing": "its manifest names a file that is missing",
    "a file cut short": "a file is shorter than it was: compare its checksum, not only its name",
    "a flipped bit": "all files exist and have the right length, but the content of one has changed: compare its "
    "checksum with the manifest's, over the whole file",
    "a flipped bit in its last file": "the other files are right, but one is not: compare all of them, over their "
    "whole length",
}


def cause_of_choice(got, files, whole, damaged):
    """The likely cause of a wrong choice."""
    names = {f"step-{number}": why for number, why in damaged.items()}
    if isinstance(got, str) and got.endswith(NO_FOLDER):
        return "return the whole path, folder / name: by its name alone, nobody finds the checkpoint"
    if got in names:
        return CAUSES[names[got]]
    if got in ("step-999999.tar", "notes.txt"):
        return "that is a file, not a checkpoint: use only folders named step- and a number"
    if got == "step-999998-copy":
        return "its name is not step- and a number: it is something else, which happens to look like a checkpoint"
    if got is None and not damaged:
        return (
            "this checkpoint is whole, and it was refused: compare hashlib.sha256 of the complete content of each "
            "file that the manifest names, as hexdigest(), and of no other file"
        )
    if got is None:
        return "there is a whole checkpoint: if one is damaged, try the next older one"
    if whole and got in [f"step-{number}" for number in whole]:
        by_name = max(f"step-{number}" for number in whole)
        if got == by_name:
            return "as texts, step-9 comes after step-10: compare the numbers"
        return "it is whole, but there is a newer one: start with the largest number"
    if isinstance(got, str) and Path(got).is_absolute():
        return "that is in another folder: does something remain from an earlier call?"
    return "return the folder's Path, or None if no checkpoint is whole"
