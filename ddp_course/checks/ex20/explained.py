"""Which likely mistakes explain everything that an answer gave, in all cases, on all ranks."""

from ddp_course.checks.claims import agree


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
