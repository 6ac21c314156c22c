"""What the ranks print, shown by the process that launched them."""

import os
import sys


class Output:
    """The output of the ranks: they write it to files, and this process shows it in
    rank order, each line with its rank.
    """

    def __init__(self, folder, nproc):
        self.files = {}
        for stream in ("stdout", "stderr"):
            for rank in range(nproc):
                path = folder / f"{rank}.{stream}"
                path.touch()
                self.files[stream, rank] = path.open("rb")

    def show(self, rest=False, but_not=()):
        """Print the whole lines that have come since the last call; with `rest`, an
        unfinished last line too.

        but_not: ranks whose stderr is told elsewhere.
        """
        for (stream, rank), file in self.files.items():
            new = file.read()
            whole = len(new) if rest else new.rfind(b"\n") + 1
            file.seek(whole - len(new), os.SEEK_CUR)
            if stream == "stderr" and rank in but_not:
                continue
            for line in new[:whole].decode(errors="replace").splitlines():
                print(f"[rank{rank}]: {line}", file=getattr(sys, stream))
            if rest:
                file.close()


def write_output_to(folder, rank):
    """In a rank: send all that it prints, from Python or from C++, to its files."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{rank}.{stream}", os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        options = {
            "buffering": 1,
            "encoding": "utf-8",
            "errors": "replace",
            "closefd": False,
        }
        setattr(sys, stream, open(number, "w", **options))
