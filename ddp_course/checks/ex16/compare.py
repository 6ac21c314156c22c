"""Question 4: whether a difference between the times of two programs is real."""

import statistics
from math import comb

from ddp_course.checks.functions import check_function
from ddp_course.judge.question import question

ERROR = 0.05  # of a table: how often it may show a difference where there is none
SHOWN, WORDS = ("faster", "slower"), ("faster", "slower", "not shown")


def sides(before, after):
    """How many rounds are faster, and how many slower."""
    return sum(b > a for b, a in zip(before, after)), sum(b < a for b, a in zip(before, after))


def tail(most, least):
    """How often chance alone puts at least so many of all rounds on one side or the other."""
    n = most + least
    return min(1.0, 2 * sum(comb(n, k) for k in range(least + 1)) / 2**n)


def fewest(error, chance=lambda n: 2 / 2**n):
    n = 1
    while chance(n) > error:
        n += 1
    return n


def of_the_table(comparisons):
    return ERROR / comparisons


def comparing(count=sides, chance=tail, error=of_the_table, words=SHOWN, rounds=fewest, for_rounds=None):
    """The right function, or one with a mistake in a part of it. for_rounds: the error that
    the fewest rounds are for, if it is another one.
    """

    def compare(before, after, comparisons):
        faster, slower = count(before, after)
        least, most = sorted((faster, slower))
        allowed, needed = error(comparisons), rounds((for_rounds or error)(comparisons))
        if chance(most, least) > allowed:
            return "not shown", needed
        return words[faster < slower], needed

    return compare


def by(middle):
    """Says what a middle of the rounds says: a number below 1 where `after` takes less time."""

    def compare(before, after, comparisons):
        value = middle(before, after)
        verdict = "not shown" if value == 1 else SHOWN[value > 1]
        return verdict, fewest(of_the_table(comparisons))

    return compare


def middle_half(before, after, comparisons):
    first, _, third = statistics.quantiles([a / b for a, b in zip(after, before)], n=4)
    verdict = "faster" if third < 1 else "slower" if first > 1 else "not shown"
    return verdict, fewest(of_the_table(comparisons))


def ties_count(before, after):
    """A round in which both take the same time, as one against."""
    faster, slower = sides(before, after)
    same = len(before) - faster - slower
    return (faster, slower + same) if faster > slower else (faster + same, slower)


MEANS = "one slow round can turn the mean, but is one round of many: count on which side each round is"
MISTAKES = {
    "`after` is faster where it takes less time than `before`": comparing(words=SHOWN[::-1]),
    "chance can put the rounds on either side: count both tails": comparing(
        chance=lambda most, least: tail(most, least) / 2, rounds=lambda error: fewest(error, lambda n: 1 / 2**n)),
    "in the verdict, chance can put the rounds on either side: count both tails": comparing(
        chance=lambda most, least: tail(most, least) / 2),
    "for the fewest rounds, chance can put all of them on either side: 2 of 2**n ways": comparing(
        rounds=lambda error: fewest(error, lambda n: 1 / 2**n)),
    "at least as many on one side: add up the chances of all that are as extreme, or more": comparing(
        chance=lambda most, least: 2 * comb(most + least, least) / 2 ** (most + least)),
    "a round in which both take the same time says nothing: leave it out, also of their number": comparing(ties_count),
    "such a round is not one in which `after` is faster: leave it out": comparing(
        lambda before, after: (len(before) - sides(before, after)[1], sides(before, after)[1])),
    "such a round is not one in which `after` is slower: leave it out": comparing(
        lambda before, after: (sides(before, after)[0], len(before) - sides(before, after)[0])),
    "the table has several comparisons: each gets an equal part of the 5 %": comparing(error=lambda comparisons: ERROR),
    "the verdict must keep the 5 % for the whole table: each comparison gets an equal part": comparing(
        error=lambda comparisons: ERROR, for_rounds=of_the_table),
    "the fewest rounds are for one comparison of the table, which gets an equal part of the 5 %": comparing(
        for_rounds=lambda comparisons: ERROR),
    "with more comparisons, each must be surer, not less sure": comparing(
        error=lambda comparisons: min(1.0, ERROR * comparisons)),
    "the fewest rounds: the first number whose chance, 2 / 2**n, is small enough, and no more": comparing(
        rounds=lambda error: fewest(error) + 1),
    MEANS: by(lambda before, after: sum(after) / sum(before)),
    "a median always has a side, also by chance: count how often chance alone would give so many": by(
        lambda before, after: statistics.median(a / b for a, b in zip(after, before))),
    "each round is a pair: compare its two times, not the two lists": by(
        lambda before, after: statistics.median(after) / statistics.median(before)),
    "the middle half leaves out 1 too often with few rounds, and too rarely with many": middle_half,
}  # fmt: skip


def in_figures(case, got):
    """Which of the two values is wrong, and what the count says."""
    if not (isinstance(got, list) and len(got) == 2 and got[0] in WORDS and type(got[1]) is int):
        return f"return two values: one of {', '.join(map(repr, WORDS))}, and a whole number of rounds"
    faster, slower = sides(case["before"], case["after"])
    allowed = of_the_table(case["comparisons"])
    if got[0] != comparing()(**case)[0]:
        chance = tail(max(faster, slower), min(faster, slower))
        return (f"{faster} rounds are faster and {slower} slower: chance alone puts as many on one side in {chance:.2%} of "
                f"all comparisons, and {allowed:.2%} are allowed")  # fmt: skip
    return f"if all of n rounds agree, that is chance in 2 / 2**n of all comparisons, and {allowed:.2%} are allowed"


def a_case(draw, agree, against, same, comparisons, far):
    """Rounds on a machine that gets slower and slower. far: how many times as long the rounds
    against take: enough to turn the mean.
    """
    before, after, slow = [], [], draw.uniform(0.02, 0.05)
    kinds = ["agree"] * agree + ["against"] * against + ["same"] * same
    draw.shuffle(kinds)
    for kind in kinds:
        slow *= draw.uniform(1.02, 1.3)
        first = round(slow, 4)
        factor = {"agree": draw.uniform(0.8, 0.97), "against": far * draw.uniform(1.03, 1.2), "same": 1.0}[kind]
        before.append(first)
        after.append(first if kind == "same" else round(slow * factor, 4))
    if draw.random() < 0.5:
        before, after = after, before
    return {"before": before, "after": after, "comparisons": comparisons}


def short_times(draw, agree, against):
    """Many rounds of some microseconds, with differences of less than a percent."""
    before = [draw.uniform(20e-6, 50e-6) for _ in range(agree + against)]
    factors = draw.sample([0.997] * agree + [1.003] * against, len(before))
    return {"before": before, "after": [time * factor for time, factor in zip(before, factors)], "comparisons": 1}


@question(
    "A round is on one of two sides, or says nothing. If the programs are equally fast, each side is as likely as the "
    "other: how many of n tosses of a coin would be heads?",
    "Of the n rounds that differ, let k be on the rarer side. Chance puts k or fewer on one given side in "
    "sum(math.comb(n, i) for i in range(k + 1)) of 2**n ways, and there are two sides. Compare that with 5 %, divided by "
    "the number of comparisons.",
    "chance = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n; it is shown where chance <= 0.05 / comparisons. For "
    "the fewest rounds, count n up from 1 while 2 / 2**n > 0.05 / comparisons.",
)
def check_compare(answer, draw):
    """Comparisons close to the limit, on either side of it; with means and medians that say
    something else.
    """
    agree_against_same_comparisons = [
        (5, 0, 0, 1), (6, 0, 0, 1), (8, 0, 0, 7), (9, 0, 0, 7), (7, 1, 0, 1), (8, 1, 0, 1), (6, 0, 3, 1), (5, 0, 4, 1),
        (8, 1, 3, 1), (10, 2, 0, 1), (15, 5, 0, 1), (14, 6, 0, 1), (15, 5, 0, 2), (0, 0, 4, 3), (9, 9, 2, 1), (10, 0, 2, 20),
        (11, 0, 0, 20), (32, 18, 0, 1), (33, 17, 0, 1),
    ]  # fmt: skip
    cases = [a_case(draw, *case, far) for case in agree_against_same_comparisons for far in (1.0, 6.0)]
    cases += [short_times(draw, agree, 70 - agree) for agree in (43, 44)]
    check_function(answer, draw, "compare", cases, comparing(), MISTAKES, in_figures)
