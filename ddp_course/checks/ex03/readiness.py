"""When gradients are ready in a backward, and what has been sent by then."""

from contextlib import contextmanager


@contextmanager
def noting_what_is_sent(parameters, log):
    """A list that gets, each time one of the parameters' gradients is ready, the bytes
    of each all-reduce that was started before; log: that of a Watch which is active.

    An answer's hooks may run before or after this one, so an all-reduce that starts with
    this very gradient is included in some answers, and missing in others.
    """
    noted = []

    def gradient_is_ready(parameter):
        sent = [entry["bytes"] for entry in log if entry["name"] == "allreduce"]
        noted.append(sent)

    hooks = [
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
        for parameter in parameters
        if parameter.requires_grad
    ]
    yield noted
    for hook in hooks:
        hook.remove()
