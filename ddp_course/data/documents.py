"""Documents, one after the other, from files of text, JSON lines and Parquet.

Files are read as a stream. What is in memory is a line, or the documents of a thousand
rows of Parquet, or a whole file of text, where that is one document.
"""

import gzip
import io
import json
import zlib
from itertools import accumulate, chain
from pathlib import Path

from ddp_course import UsageError
from ddp_course.files import open_file

TEXT = set(
    ".py .txt .md .rst .tex .html .json .csv .c .h .cpp .js .java .ipynb".split()
)
PACKED = {".gz", ".zst"}
ROWS_AT_ONCE = 1000  # of Parquet
# what unpacking raises, zlib's and pyarrow's errors among it
DAMAGED = (OSError, ValueError, EOFError, NotImplementedError, zlib.error)
COMMAND = "python -m ddp_course.data.text"


def kind_of(path):
    """What a file holds: 'text', 'line' (of JSON) or 'row' (of Parquet), or None if it is
    of none of these kinds. `.gz` and `.zst` may follow the name of a text or of lines.
    """
    packed = path.suffix in PACKED
    suffix = Path(path.stem).suffix if packed else path.suffix
    if suffix == ".jsonl" or packed and suffix == ".json":  # C4, for example, names
        return "line"  # its lines of JSON so
    if suffix == ".parquet":
        return None if packed else "row"
    return "text" if suffix in TEXT else None


class Bad(str):
    """In the place of a document: why there is none."""


class Documents:
    """The documents of some files, in order, as bytes of UTF-8 without zero bytes.

    key: the name of the text in a line of JSON, or of its column in Parquet. split: the
    line that ends a document in a file of text, for example '' or '<|endoftext|>';
    None, if such a file is one document. tell: a function that is told of each line
    that holds no document, which is left out; without it, such a line is an error.
    Raises UsageError for that, and for a damaged file.
    """

    def __init__(self, files, key="text", split=None, tell=None):
        self.files, self.key, self.split, self.tell = files, key, split, tell
        self.ends = list(accumulate(path.stat().st_size for path in files))
        self.bytes = self.ends[-1]  # of all files
        self.read = 0  # and how many of them have been read

    def after(self, file=0, first=0):
        """Yield ((file, first, number), document), from a file's beginning to the end.

        file: the number of the file; first: of its first document, counted over all
        files; number: of this document.
        """
        number = first
        for place in range(file, len(self.files)):
            first = number
            for document in self.of(place):
                yield (place, first, number), document
                number += 1
            self.read = self.ends[place]

    def of(self, number):
        """Yield the documents of one file."""
        begin = self.ends[number - 1] if number else 0
        path, place = self.files[number], 0
        kind = kind_of(path)
        unit = "row" if kind == "row" else "line"
        try:
            with open_file(path) as file:
                for place, document in self.placed(path, kind, file):
                    if kind != "row":  # those are read from here and there
                        self.read = begin + file.tell()
                    if not isinstance(document, Bad):
                        yield document.replace(b"\x00", b"")
                    elif self.tell:
                        self.tell(f"{path}, {unit} {place}: {document}")
                    else:
                        fix = f"correct it, or see --skip-bad-lines of {COMMAND}"
                        raise UsageError(f"{path}, {unit} {place}: {document}; {fix}")
        except DAMAGED as error:
            why = " ".join(str(getattr(error, "strerror", None) or error).split())
            after = f", after {unit} {place}," if place else ""
            raise UsageError(f"{path}{after} cannot be read: {why[:120]}") from None

    def placed(self, path, kind, file):
        """Yield (number of the line or row, document or Bad) for an open file."""
        if kind == "row":
            yield from rows(path, file, self.key)
        elif kind == "line":
            for place, line in enumerate(unpacked(path, file), 1):
                if line.strip():
                    yield place, text_of(line, self.key)
        elif self.split is None:
            yield 1, unpacked(path, file).read()
        else:
            yield from sections(unpacked(path, file), self.split.strip().encode())


def unpacked(path, file):
    """The content of a file as a stream of bytes."""
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".zst":
        return io.BufferedReader(pyarrow(path).CompressedInputStream(file, "zstd"))
    return file


def text_of(line, key):
    """The text in a line of JSON, or Bad."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return Bad("is no JSON")
    if not isinstance(entry, dict) or key not in entry:
        return Bad(f"has no {key!r}, and --key says where the text is")
    return as_bytes(entry[key], key)


def as_bytes(text, key):
    if not isinstance(text, str):
        return Bad(f"its {key!r} is no text")
    return text.encode(errors="replace")  # half of a surrogate pair has no bytes


def rows(path, file, key):
    """Yield (number, document or Bad) for the rows of a Parquet file."""
    table = pyarrow(path).parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if key not in names:
        has = f"it has no column {key!r}, but {', '.join(names)}"
        raise ValueError(f"{has[:90]}: --key names one")
    place = 0
    for batch in table.iter_batches(ROWS_AT_ONCE, columns=[key]):
        for text in batch.column(0).to_pylist():
            place += 1
            yield place, as_bytes(text, key)


def sections(lines, split):
    """Yield (number of the last line, text) for what is between lines that are `split`."""
    section, place = [], 0
    for place, line in enumerate(chain(lines, [split]), 1):
        if line.strip() != split:
            section.append(line)
        else:
            text, section = b"".join(section).strip(b"\r\n"), []
            if text:
                yield place, text


def pyarrow(path):
    """The package. Raises UsageError if it is not installed."""
    try:
        import pyarrow.parquet

        return pyarrow
    except ImportError:
        fix = "pip install pyarrow"
        raise UsageError(f"{path} needs a package to be read: {fix}") from None
