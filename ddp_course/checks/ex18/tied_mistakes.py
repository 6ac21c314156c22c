"""What people take for the gradient of a tied matrix, in question 3."""

from ddp_course.checks.ex18.tied_cases import own_gradients


def mistakes(case, rank, name, own, step):
    total, replicas = sum(own.values()), len(case["ends"])
    pairs = [pair for pair in case["ends"] if rank in pair]
    of_pair = sum(own[end] for end in own if end[0] in pairs[0])
    here = sum(value for end, value in own.items() if end[0] == rank)
    alike = sum(value for end, value in own.items() if end[1] == name) / replicas
    # one rank with both stages in one parameter has counted it before
    twice = sum(value * sum(other[0] == end[0] for other in own) for end, value in own.items())
    last = own_gradients(case, 0)
    found = [
        (total / replicas, "some digits are lost: keep the dtype of the gradients, float64 here"),
        (own[rank, name], "this is still what backward left"),
        (of_pair, "this is the sum over the stages of one replica: the mean over the replicas is missing"),
        (here, "this is what the rank's own stages give: what other ranks have is missing"),
        (total, "the replicas are added up: their gradients are averaged"),
        (total / replicas / 2, "this is half of the gradient: the gradients of the two stages are added up, not averaged, "
         f"and divided by the number of replicas once, by {replicas} here"),
        (alike, "this is a mean over the replicas: the sum over the stages is missing"),
        (0 * total, "this gradient is lost"),
    ]  # fmt: skip
    if case["one"] and any(a == b for a, b in case["ends"]):
        both = "one parameter that is both has already the sum of its two uses, so it counts once"
        begin = (
            "this is twice the gradient" if all(a == b for a, b in case["ends"]) else "one rank's gradient counts twice"
        )
        found += [
            (twice / replicas, f"{begin}: {both}; and the number of replicas, by which to divide, is {replicas} here"),
            (twice, f"{both}; and the replicas are averaged"),
        ]
    if step:
        found.append((sum(last.values()) / replicas, "this is the gradient of the update before: parameter.grad is another "
                      "tensor after zero_grad(), so read it anew each time"))  # fmt: skip
    return found
