"""DeepSpeed without libaio

Run:    not here: it depends on the machine's packages
Text:   [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.
Text:   [WARNING]  async_io requires the libraries: ['libaio-dev'] but are missing. Can be fixed by: `apt
        install libaio-dev`.
Text:   [WARNING]  If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS
        environment variables to where it can be found.
Text:   AssertionError: Unable to pre-compile async_io
Text:   RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to
        hardware/software issue.
Text:   /usr/bin/ld: cannot find -laio: No such file or directory
Cause:  `async_io` is the extension with which DeepSpeed offloads to a fast disk (NVMe, ZeRO-Infinity). Its
        library and headers are not on this machine. Nothing else in DeepSpeed needs it.
Which:  A `[WARNING]`, at the start or in `ds_report`, is no error: the job goes on. "Unable to pre-compile"
        comes from an installation with `DS_BUILD_OPS=1`, "Unable to JIT load" from a configuration with
        `"device": "nvme"`.
Fix:    Without NVMe offload: ignore it, or install with `DS_BUILD_AIO=0`. With it: `apt install
        libaio-dev` (Ubuntu, Debian), `dnf install libaio-devel` (Red Hat); in conda, set CFLAGS and
        LDFLAGS to where they are.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/3145
Source: https://github.com/deepspeedai/DeepSpeed/issues/6972
Source: https://github.com/deepspeedai/DeepSpeed/issues/1037
Source: https://github.com/deepspeedai/DeepSpeed/issues/1401
"""
