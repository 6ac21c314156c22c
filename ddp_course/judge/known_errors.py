"""What the errors and the timeouts of answers usually mean, in a learner's words."""

import re

from ddp_course.ranks.launch import SYMPTOMS


def without_our_frames(story):
    """A rank's traceback without the lines that load an answer or watch its
    communication.
    """
    ours = re.compile(
        r"ddp_course/(judge/(answer|cells)\.py, line|\S+\.py, line \d+, in __torch_dispatch__)"
    )
    return "\n".join(line for line in story.splitlines() if not ours.search(line))


def where_they_were(story):
    """Where each rank was at a timeout. The barrier of our own observers is described in
    words.
    """
    return re.sub(
        r"was in torch/distributed/\S+, line \d+, in barrier: .*", FINISHED, story
    )


def some_rank_has_not_begun(where):
    """Whether at a timeout a rank was still starting: the others may wait for it."""
    return "was still starting" in re.findall(PLACES, where)


PLACES = r"(?m)^\s*rank \d+ (.*)"
FINISHED = "had done its part, and waited for the others"


def cause_of_waiting(where):
    """The likely cause of a timeout, from where each rank was."""
    places = re.findall(PLACES, where)
    if places and all(re.search(r"\bsend\(", place) for place in places):
        return "all ranks send, and nobody receives: isend only begins to send; receive, and then wait for it"
    if places and all(re.search(r"\brecv\(", place) for place in places):
        return (
            "all ranks wait for a message that does not come: does somebody send first? "
            + FORGOTTEN
        )
    if places and all(place == FINISHED for place in places):
        return (
            "all calls have returned, but an operation that they started has not ended. "
            + FORGOTTEN
        )
    cause = "some rank waits for another that does not come, or a loop does not end"
    if len(places) == 1 and not re.search(r"torch/distributed", where):
        return "a loop does not end, or each round of it takes too long"
    return f"{cause}. {FORGOTTEN}" if re.search(r"\b(send|recv)\(", where) else cause


FORGOTTEN = "After isend or irecv, keep the work that it returns and call its wait(): without that, nothing may come"


NO_GRADIENT = "(None was used in the place of a tensor)"

KNOWN_ERRORS = {
    "cannot register a hook on a tensor that doesn't require gradient": "a frozen parameter cannot have a hook: "
    "check requires_grad first",
    "but got <class 'NoneType'> instead": "parameter.grad is None without a gradient, as for a frozen parameter: skip "
    "it. (In a hook: register_hook runs before the gradient is stored, register_post_accumulate_grad_hook after.)",
    "File too large": "more than 64 MB were printed, or written to a file: does it print without end?",
    "SIGABRT": "two ranks brought tensors of different sizes to a collective or a message: gloo then aborts",
    **dict.fromkeys(
        SYMPTOMS,
        "another rank has left, or is in another call, while this one waited for it: do all ranks call the same "
        "collectives? With messages: do two ranks wait in send at the same time? isend does not wait",
    ),
    "inLengthPerRank[myRank] == outLengthPerRank[myRank]": "the split sizes do not fit: a rank receives from itself what it "
    "sends to itself. Both lists follow from the same counts, and from which rank has which expert",
    "Can't pickle <class 'ddp_course.checks": "save the state_dict of the network, not the network itself",
    "iter() returned non-iterator": "__iter__ must return an iterator: for a list, return iter(the_list)",
    "can require gradients": "a weight that is packed into integers cannot have a gradient: check "
    "value.is_floating_point()",
    "torch's dispatcher was not told of": "what is sent is counted here: call the functions of torch.distributed, in the "
    "thread that calls the answer",
    "trying to initialize the default process group twice": "the check has already joined the process group: do not "
    "call init_process_group",
    NO_GRADIENT: "is x.grad None? What a rank receives has a gradient after backward only if requires_grad_() was called on "
    "it before it went through the stage",
}
