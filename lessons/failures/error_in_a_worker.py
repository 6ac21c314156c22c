"""An error in a DataLoader worker

Run:    python lessons/failures/error_in_a_worker.py
Text:   IndexError: Caught IndexError in DataLoader worker process 0.
Text:   KeyError: Caught KeyError in DataLoader worker process 0.
Text:   RuntimeError: Caught RuntimeError in DataLoader worker process 0.
Text:   FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 1.
Text:   TypeError: Caught TypeError in DataLoader worker process 0.
Cause:  `__getitem__` or `collate_fn` raised in a worker, and the DataLoader raises the same error
        again in the rank. It is not about workers: the traceback below `Original Traceback` is the
        one that counts.
Fix:    Correct the line that `Original Traceback` ends with: an index beyond the end, a file that
        is missing, a sample that is broken. `num_workers=0` shows the error without the detour.
Lesson: 1
Source: https://github.com/sakmalh/houseganpp/issues/1
Source: https://github.com/Suanmd/TR-MISR/issues/3
"""

from torch.utils.data import DataLoader


class Samples:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return [1, 2, 3][index]  # there are three


def main():
    list(DataLoader(Samples(), num_workers=1))


if __name__ == "__main__":
    main()
