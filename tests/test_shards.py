"""Documents of several formats become shards of tokens: in linear time and constant
memory, by one process or several, in one go or after a kill, and always the same bits.
"""

import gzip
import io
import json
import os
import random
import signal
import sys
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import python, wait_until

from ddp_course import UsageError
from ddp_course.data import documents, shards, text
from ddp_course.data.documents import Documents
from ddp_course.data.shards import read_tokens, write_tokens
from ddp_course.data.text import load_text
from ddp_course.data.tokenizers import BPE, Bytes
from ddp_course.ranks.launch import launch

WORDS = "the cat sat on a mat and def return import self mat".split()


def some_texts(number, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(number)]


TEXTS = some_texts(300)


def as_lines(texts, key="text"):
    return "".join(json.dumps({"id": 7, key: text}) + "\n" for text in texts).encode()


def write_zst(path, content):
    with pa.OSFile(str(path), "wb") as file:
        with pa.CompressedOutputStream(file, "zstd") as stream:
            stream.write(content)


def write_texts(path, texts):
    """Write a file of documents, in the format that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif path.suffix == ".txt":
        path.write_text("\n\n".join(texts))
    elif path.suffix == ".gz":
        half = len(texts) // 2  # two members, as `cat a.gz b.gz` makes them
        members = [as_lines(part) for part in (texts[:half], texts[half:])]
        path.write_bytes(b"".join(map(gzip.compress, members)))
    elif path.suffix == ".zst":
        half = len(texts) // 2  # two frames, as pzstd writes them
        write_zst(path, as_lines(texts[:half]))
        first = path.read_bytes()
        write_zst(path, as_lines(texts[half:]))
        path.write_bytes(first + path.read_bytes())
    else:
        path.write_bytes(as_lines(texts))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder with a corpus in two formats, and an empty working folder."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_texts(folder / "a.jsonl.gz", TEXTS[:200])
    write_texts(folder / "b.jsonl", TEXTS[200:])
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BPE.train(TEXTS, 300, path, ["<|endoftext|>"])
    return path


def tokenize(data, out, *flags, shard=1000):
    text.main(["--data", f"{data}", "--out", f"{out}", "--shard", f"{shard}", *flags])
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_in(folder):
    """Those of both parts, in their order in the corpus: what read_tokens gives, cut."""
    *parts, tokenizer, _ = read_tokens(folder)
    between = json.loads((folder / "tokens.json").read_text())["between"]
    cut = [split(part[:].tolist(), between) for part in parts]
    train, held_out = ([tokenizer.decode(piece) for piece in part] for part in cut)
    found = []
    for number in range(len(train) + len(held_out)):
        part = train if number % shards.HELD_OUT else held_out
        found.append(part.pop(0))
    return found


def split(tokens, between):
    pieces, begin, length = [], 0, len(between)
    for place in range(len(tokens)):
        if tokens[place : place + length] == between:
            pieces.append(tokens[begin:place])
            begin = place + length
    return [*pieces, tokens[begin:]]


# ---- how much it copies and keeps ----


def copied_for(number, folder, monkeypatch):
    """How many tokens are copied, to write those of some documents."""
    count, concatenate = [0], np.concatenate

    def counting(arrays):
        joined = concatenate(arrays)
        count[0] += len(joined)
        return joined

    folder.mkdir()
    path = folder / "texts.jsonl"
    write_texts(path, some_texts(number))
    with monkeypatch.context() as patch:
        patch.setattr(shards.np, "concatenate", counting)
        write_tokens(folder, Documents([path]), Bytes())
    return count[0], sum(map(len, read_tokens(folder)[:2]))


def test_each_token_is_copied_twice_whatever_the_number_of_documents(
    tmp_path, monkeypatch
):
    small, tokens = copied_for(500, tmp_path / "small", monkeypatch)
    large, four_times = copied_for(2000, tmp_path / "large", monkeypatch)
    assert tokens < small <= 2 * tokens and four_times < large <= 2 * four_times
    assert four_times == pytest.approx(4 * tokens, rel=0.1)


def peak_for(number, folder):
    """The most memory in use while some documents are written, in bytes."""
    folder.mkdir()
    path = folder / "texts.jsonl.gz"
    write_texts(path, ["x" * 5000] * number)
    tracemalloc.start()
    write_tokens(folder, Documents([path]), Bytes(), shard=50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peak_for(20, tmp_path / "first")  # what is imported on the way
    small, large = (peak_for(20 * n, tmp_path / f"{n}") for n in (1, 10))
    assert large < 1.3 * small < 3e6


# ---- formats ----


@pytest.mark.parametrize(
    "name", "x.jsonl x.jsonl.gz x.json.gz x.jsonl.zst x.json.zst x.parquet".split()
)
def test_a_file_of_each_format_has_the_same_documents(name, tmp_path):
    write_texts(tmp_path / name, TEXTS)
    found = [content for _, content in Documents([tmp_path / name]).after()]
    assert found == [text.encode() for text in TEXTS]


def test_a_folder_is_read_in_the_order_of_its_names(corpus, tmp_path):
    write_texts(corpus / "c.parquet", ["of Parquet"])
    (corpus / "d.txt.gz").write_bytes(gzip.compress(b"a text\n\nin a file"))
    (corpus / "notes.pdf").write_bytes(b"%PDF")
    found = documents_in(tokenize(corpus, tmp_path / "tokens"))
    assert found == [*TEXTS, "of Parquet", "a text\n\nin a file"]


@pytest.mark.parametrize("line", ["", "<|endoftext|>"])
def test_a_line_can_end_a_document_of_a_text(line, tmp_path):
    ends = f"\n{line}\n"
    (tmp_path / "x.txt").write_text(ends + f"{ends}{line}\n".join(TEXTS) + "\n")
    flags = [tmp_path / "x.txt", tmp_path / "tokens", f"--split={line}"]
    assert documents_in(tokenize(*flags)) == TEXTS
    with pytest.raises(UsageError, match="x.txt is one document, and 2 are needed"):
        tokenize(tmp_path / "x.txt", tmp_path / "others")


def test_the_text_may_have_another_key_and_any_characters(tmp_path):
    strange = ["Übung 练习 \N{PILE OF POO}", "half a \ud83d pair", "a\x00zero", "x"]
    (tmp_path / "x.jsonl").write_bytes(b"\n" + as_lines(strange, "body") + b"  \n")
    flags = [tmp_path / "x.jsonl", tmp_path / "tokens", "--key", "body"]
    assert documents_in(tokenize(*flags)) == [
        strange[0],
        "half a ? pair",
        "azero",
        "x",
    ]


def plant_in_lines(line):
    def plant(folder):
        lines = (folder / "b.jsonl").read_bytes().splitlines(keepends=True)
        lines.insert(60, line + b"\n")
        (folder / "b.jsonl").write_bytes(b"".join(lines))

    return plant


def tear(folder):
    path = folder / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])


def tear_zst(folder):
    write_texts(folder / "c.jsonl.zst", some_texts(2000))
    path = folder / "c.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-50])


def no_column(folder):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), folder / "c.parquet")


def a_null(folder):
    pq.write_table(pa.table({"text": ["x", None]}), folder / "c.parquet")


@pytest.mark.parametrize(
    "plant, said",
    [
        (plant_in_lines(b'{"text": "'), r"b.jsonl, line 61: is no JSON; correct it"),
        (plant_in_lines(b"\xff\xfe{}"), r"b.jsonl, line 61: is no JSON; correct it"),
        (plant_in_lines(b'["text"]'), r"b.jsonl, line 61: has no 'text', and --key"),
        (plant_in_lines(b'{"body": "x"}'), r"b.jsonl, line 61: has no 'text'"),
        (plant_in_lines(b'{"text": 3}'), r"b.jsonl, line 61: its 'text' is no text"),
        (a_null, r"c.parquet, row 2: its 'text' is no text"),
        (no_column, r"c.parquet cannot be read: it has no column 'text', but body, id"),
        (tear, r"a.jsonl.gz, after line \d+, cannot be read: Compressed file ended"),
        (tear_zst, r"c.jsonl.zst, after line \d+, cannot be read: Truncated"),
    ],
)
def test_what_is_no_document_gives_one_line_with_its_place(
    plant, said, corpus, tmp_path
):
    plant(corpus)
    with pytest.raises(UsageError, match=said) as error:
        tokenize(corpus, tmp_path / "tokens")
    assert "\n" not in str(error.value) and not (tmp_path / "tokens").exists()


def test_after_a_bad_line_the_same_command_goes_on_without_it(corpus, tmp_path, capsys):
    undisturbed = contents(tokenize(corpus, tmp_path / "undisturbed"))
    plant_in_lines(b'{"text": "')(corpus)
    with pytest.raises(UsageError, match="b.jsonl, line 61: is no JSON"):
        tokenize(corpus, tmp_path / "tokens")
    tokenize(corpus, tmp_path / "tokens", "--skip-bad-lines")
    said = capsys.readouterr().err
    assert "going on; shards written: " in said and said.count("left out: ") == 1
    assert contents(tmp_path / "tokens") == undisturbed


def test_without_pyarrow_one_line_says_what_to_install(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_zst(corpus / "c.jsonl.zst", b"")
    with pytest.raises(UsageError, match="c.jsonl.zst needs a package .* pyarrow$"):
        load_text(str(corpus))


# ---- the end of a text ----


def test_the_tokenizers_own_token_is_between_two_documents(
    corpus, tmp_path, tokenizer_file
):
    strange = "a text about <|endoftext|> itself"
    write_texts(corpus / "c.jsonl", [strange])
    flags = "--tokenizer", f"{tokenizer_file}"
    tokens = tokenize(corpus, tmp_path / "tokens", *flags)
    train, validation, tokenizer, _ = read_tokens(tokens)
    assert tokenizer.end_of_text == 0
    assert tokenizer.tokenizer.id_to_token(0) == "<|endoftext|>"
    both = train[:].tolist() + validation[:].tolist()
    assert both.count(0) == len(TEXTS) + 1 - 2
    assert documents_in(tokens) == [*TEXTS, strange]
    assert tokenizer.decode([0]) == "<|endoftext|>" and tokenizer.size([0]) == 0
    assert tokenizer.size(train[:]) == sum(
        len(text.encode())
        for number, text in enumerate([*TEXTS, strange])
        if number % 20
    )
    assert load_text(str(corpus), f"{tokenizer_file}")[2].end_of_text == 0


def test_a_tokenizer_without_one_has_a_zero_byte_there(corpus, tmp_path):
    for kind in ("bytes", "bpe"):
        tokens = tokenize(corpus, tmp_path / kind, "--tokenizer", kind)
        *_, tokenizer, _ = read_tokens(tokens)
        assert tokenizer.end_of_text is None and documents_in(tokens) == TEXTS
        between = json.loads((tokens / "tokens.json").read_text())["between"]
        assert tokenizer.decode(between) == "\n\x00\n"


def test_the_token_can_be_named(corpus, tmp_path, tokenizer_file):
    BPE.train(TEXTS, 300, tmp_path / "own.json", ["<|pad|>", "<|stop|>"])
    flags = ["--tokenizer", f"{tmp_path}/own.json", "--end-of-text"]
    tokens = tokenize(corpus, tmp_path / "tokens", *flags, "<|stop|>")
    assert read_tokens(tokens)[2].end_of_text == 1 and documents_in(tokens) == TEXTS
    for wrong in ([*flags, "<|halt|>"], ["--end-of-text", "<|stop|>"]):
        with pytest.raises(UsageError, match="no token '<|halt|>'|none has the name"):
            tokenize(corpus, tmp_path / "others", *wrong)


@pytest.mark.parametrize("damage", [-1, 256, "0", [0], 1.5])
def test_an_end_of_text_that_is_no_token_is_refused(damage, corpus, tmp_path):
    path = tokenize(corpus, tmp_path / "tokens") / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"end_of_text": damage}))
    with pytest.raises(UsageError, match="tokens.json is damaged"):
        read_tokens(tmp_path / "tokens")


def test_the_tokens_of_an_older_course_are_read(corpus, tmp_path):
    path = tokenize(corpus, tmp_path / "tokens") / "tokens.json"
    manifest = json.loads(path.read_text())
    del manifest["end_of_text"], manifest["between"]
    path.write_text(json.dumps(manifest))
    assert read_tokens(tmp_path / "tokens")[2].end_of_text is None


# ---- several processes, and a kill ----


def test_two_processes_write_the_same_bits_as_one(
    corpus, tmp_path, tokenizer_file, monkeypatch
):
    monkeypatch.setattr(shards, "BATCH", 5000)
    flags = ["--tokenizer", f"{tokenizer_file}", "--processes"]
    one = tokenize(corpus, tmp_path / "one", *flags, "1")
    two = tokenize(corpus, tmp_path / "two", *flags, "2")
    assert contents(one) == contents(two) and documents_in(two) == TEXTS


def killed_at(write, when, data, out, *flags, shard=4000):
    """Whether the command was killed, before or after a file got its name."""
    pid = os.fork()
    if (
        pid == 0
    ):  # a process with little to do: nothing is imported, no thread is needed
        replace, done = os.replace, [0]

        def dies(*names):
            done[0] += 1
            if done[0] == write and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*names)
            if done[0] == write and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = dies
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            tokenize(data, out, *flags, shard=shard)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_write_it_ends_with_the_bits_of_an_undisturbed_run(
    when, corpus, tmp_path
):
    undisturbed = contents(tokenize(corpus, tmp_path / "undisturbed", shard=4000))
    shards = sum(name.endswith(".npy") for name in undisturbed)
    for write in range(1, 2 * shards + 3):  # each, the list of them twice, the manifest
        out = tmp_path / f"{write}"
        assert killed_at(write, when, corpus, out) and not out.exists()
        assert contents(tokenize(corpus, out, shard=4000)) == undisturbed
    again, kills = tmp_path / "again and again", 0
    while killed_at(3, when, corpus, again):  # it gets a shard further each time
        kills += 1
        assert kills <= 2 * shards
    assert kills > shards / 2 and contents(again) == undisturbed


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from ddp_course.data import shards
from ddp_course.data.documents import Documents
from ddp_course.data.tokenizers import BPE

def die(line):
    pids = [process.pid for process in multiprocessing.active_children()]
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

shards.BATCH, shards.Line.keep = 2000, die
files = sorted(Path("corpus").iterdir())
shards.write_tokens(
    Path("tokens"), Documents(files), BPE(sys.argv[1]), 1000, processes=2
)
"""


def test_a_killed_command_leaves_no_process_behind(corpus, tmp_path, tokenizer_file):
    (tmp_path / "tokens").mkdir()
    done = python("-c", KILLED, tokenizer_file, timeout=600)
    pids = list(map(int, done.stdout.split()))
    assert done.returncode == -signal.SIGKILL and pids, done.stderr
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_killed_process_of_several_ends_it_in_one_line(tmp_path):
    write_texts(tmp_path / "x.jsonl", ["__import__('os')._exit(9)"] * 9)
    dies = SimpleNamespace(vocabulary=256, end_of_text=0, encode=eval)
    with pytest.raises(UsageError, match="has been killed: the same command goes on"):
        write_tokens(tmp_path, Documents([tmp_path / "x.jsonl"]), dies, processes=2)


def test_what_was_begun_otherwise_is_refused_and_stays(corpus, tmp_path):
    out = tmp_path / "tokens"
    assert killed_at(6, "after", corpus, out, shard=1000)
    before = contents(tmp_path / "tokens.unfinished")
    with pytest.raises(UsageError, match="begun with other flags, or its files have"):
        tokenize(corpus, out, shard=900)
    assert contents(tmp_path / "tokens.unfinished") == before
    (tmp_path / "tokens.unfinished" / "progress.json").write_text("{}")
    with pytest.raises(
        UsageError, match="progress.json: .* delete .*tokens.unfinished"
    ):
        tokenize(corpus, out)


def test_without_a_shard_yet_another_choice_begins_anew(corpus, tmp_path):
    flags = ["--tokenizer", "bpe", "--vocabulary"]
    folder = tmp_path / "tokens.unfinished"
    assert killed_at(2, "after", corpus, tmp_path / "tokens", *flags, "280")
    assert (folder / "tokenizer.json").exists()
    tokenize(corpus, tmp_path / "tokens", *flags, "270")
    assert read_tokens(tmp_path / "tokens")[2].vocabulary == 270
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"corpus", "tokens"}


def test_two_commands_do_not_write_the_same_folder_at_once(corpus, tmp_path):
    with text.unfinished(tmp_path / "tokens", wait=True):
        with pytest.raises(UsageError, match="another process is writing .*tokens"):
            tokenize(corpus, tmp_path / "tokens")


def test_more_processes_for_more_text_and_one_for_bytes():
    class Large:
        bytes = 10**12

    assert text.processes_for(Large, "bytes") == 1
    assert text.processes_for(Large, "bpe") == len(os.sched_getaffinity(0))
    Large.bytes = 10**6
    assert text.processes_for(Large, "bpe") == 1


# ---- how far it is ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_is_rewritten(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(time, "monotonic", iter(range(10**6)).__next__)
    tokenize(corpus, tmp_path / "tokens")
    said = sys.stderr.getvalue()
    assert "\n" not in said and said.count("\r") > 100 and said.endswith("\r\033[K")


def test_elsewhere_there_is_a_line_for_each_full_shard(corpus, tmp_path, capsys):
    tokenize(corpus, tmp_path / "tokens")
    lines = capsys.readouterr().err.splitlines()
    full = [np.load(path).size == 1000 for path in (tmp_path / "tokens").glob("*.npy")]
    assert len(lines) == sum(full) > 5 and "shards written: 2, with 2,000" in lines[1]
    tokenize(corpus, tmp_path / "in one shard", shard=10**6)
    assert capsys.readouterr().err == ""


# ---- in training ----


def load_and_count(data):
    """How many files this rank has read, to have the tokens of a corpus."""
    count, of = [0], Documents.of

    def counting(self, number):
        count[0] += 1
        return of(self, number)

    Documents.of = counting
    try:
        load_text(data)
    finally:
        Documents.of = of
    return count[0]


def test_one_rank_reads_the_text_and_after_a_restart_none_does(corpus):
    assert sorted(launch(load_and_count, str(corpus), nproc=3)) == [0, 0, 2]
    assert load_and_count(str(corpus)) == 0
    os.utime(corpus / "b.jsonl", (1, 1))
    assert load_and_count(str(corpus)) == 2


def test_a_killed_rank_is_gone_on_from(corpus, monkeypatch, capsys):
    monkeypatch.setattr(text, "SHARD", 1000)
    write = text.write_tokens
    short = lambda *given: write(*given[:3], 1000, *given[4:])
    monkeypatch.setattr(text, "write_tokens", short)
    plant_in_lines(b"{")(corpus)
    with pytest.raises(UsageError, match="b.jsonl, line 61"):
        load_text(str(corpus))
    monkeypatch.setattr(documents, "text_of", lambda *_: b"a text")
    load_text(str(corpus))
    assert "going on; " in capsys.readouterr().err
