"""DeepSpeed, which some machines do not have, and how its ranks start."""

from importlib.util import find_spec

from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import start_server

# The ranks begin with these, where they are installed; the process that judges need not
# wait for them.
PRELOADED = ["deepspeed", "torch._inductor.compile_fx"]
TIMEOUT = 60  # seconds, for ranks that have yet to import these; else they need two


def deepspeed_is_needed():
    """Start the ranks' server with DeepSpeed. Raises Wrong where it is not installed."""
    if find_spec("deepspeed") is None:
        cause = "DeepSpeed is not installed here: pip install deepspeed (not on Windows)"
        raise Wrong("nothing yet: this question runs a DeepSpeed engine", cause=cause)
    start_server(*PRELOADED)  # where none runs yet
