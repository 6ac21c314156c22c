"""Which likely mistakes explain everything that an answer gave, in all cases, on all ranks."""

from contextlib import contextmanager

from ddp_course.checks.claims import agree
from ddp_course.checks.ex20.watch import OF_WORLD, takes_world
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.launch import RankError


def explaining(mistakes, cases, seen, right, digits=10):
    """The causes of those mistakes that give what was seen, and not always what is right.

    mistakes: {cause: function of a case and a rank}; seen: of each case, of each rank.
    """
    places = [(case, rank, got) for case, of_ranks in zip(cases, seen) for rank, got in enumerate(of_ranks)]

    def explains(mistake):
        differs = False
        for case, rank, got in places:
            value = mistake(case, rank)
            if not agree(got, value, min(digits, 5)):
                return False
            differs = differs or not agree(right(case, rank), value, digits)
        return differs

    return [cause for cause, mistake in mistakes.items() if explains(mistake)]


def observed(answer, observe, cases, groups, timeout):
    """What each rank observed; a Wrong, if it failed as it took its rank in the world."""
    try:
        return answer.on_ranks(observe, cases, nproc=sum(map(len, groups)), timeout=timeout)
    except RankError as error:
        if len(groups) > 1 and OF_WORLD in str(error):
            words = f"groups {' and '.join(map(str, groups))}"
            raise Wrong(words, expected="a result on each rank", got=error.message, cause=OF_WORLD) from None
        raise


@contextmanager
def explaining_ranks(groups, of_ranks):
    """A Wrong in this block has the cause that the rank in the world was taken, if it was."""
    try:
        yield
    except Wrong as wrong:
        seen = sum(of_ranks, [])
        inside = len(groups) > 1 and not any(one["outside"] for one in seen)
        if inside and any(takes_world(one["asked"]) for one in seen):
            wrong.rows["likely cause"] = OF_WORLD
        raise
