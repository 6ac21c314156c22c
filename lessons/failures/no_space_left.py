"""A disk that is full

Run:    python lessons/failures/no_space_left.py
Text:   OSError: [Errno 28] No space left on device
Text:   OSError: [Errno 122] Disk quota exceeded
Text:   OSError: [Errno 116] Stale file handle
Text:   safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind:
        StorageFull, message: "No space left on device" })
Text:   RuntimeError: [enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file
        data.pkl: file write failed
Text:   RuntimeError: File …/checkpoint_0.pt cannot be opened.
Cause:  A checkpoint, a log or a cache did not fit on the disk, or into your quota. One rank fails,
        the others then report a closed connection. "Stale file handle" is a network disk on which
        another machine has replaced or deleted the file.
Which:  `df -h` and `df -i` (number of files) for the folder, `quota -s`, and `df -h /tmp /dev/shm`:
        caches and workers write there. `torch.save` to a full disk says `file write failed`, `cannot
        be opened` or `unexpected pos` (lesson 15). A file that cannot be opened may also be in a
        folder that does not exist, or that you may not write to: `touch` a file there.
Fix:    Delete old checkpoints (`save_total_limit`), move caches with `HF_HOME`, `TMPDIR` and
        `TRITON_CACHE_DIR`, and write checkpoints to a temporary name first, so that a full disk
        leaves the last one whole (lesson 9).
Lesson: 15
Source: https://github.com/open-mmlab/mmdetection/issues/12069
Source: https://github.com/hiyouga/LlamaFactory/issues/5155
Source: https://github.com/SWivid/F5-TTS/issues/458
Source: https://github.com/Sachini/ronin/issues/51
"""

with open("/dev/full", "w") as file:  # a disk that is always full
    file.write("a checkpoint")
