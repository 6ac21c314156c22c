"""Groups of ranks on which the questions of exercise 17 try an answer."""

GATHERS = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced")


def whole_world(n):
    return [list(range(n))]


def in_words(groups):
    if len(groups) == 1:
        return f"a group of {len(groups[0])} ranks"
    return "groups " + " and ".join(map(str, groups))


def given(log, size):
    """The bytes that a rank gives to the communication in a Watch's log, in groups of
    this size.
    """
    return sum(entry["whole"] // (size if entry["name"] in GATHERS else 1) for entry in log if is_message(entry))


def is_message(entry):
    return not entry["name"].startswith(("barrier", "monitored", "recv"))


def names_in(log):
    """What is called, barriers too: each rank of one waits for messages of the others."""
    return [entry["name"] for entry in log if not entry["name"].startswith("recv")]


def barrier_or(names, otherwise):
    """What to say of too many of these calls: of a barrier, if there is one."""
    if any("barrier" in name for name in names):
        return "leave out the barrier: it is a collective, too, and nothing here has to wait for it"
    return otherwise
