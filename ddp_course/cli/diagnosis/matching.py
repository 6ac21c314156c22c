"""Which failure a line of text is about: the matcher of `ddp-course diagnose` and of the
site's search.

A line is cleaned of what is different in each run, then cut into words and pairs of
words. What few failures have in their texts counts more than what many have. site/search.js
does the same in the browser, with the RULES, the texts and the limits of `exported()`.
"""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

# (pattern, replacement), applied in this order; they mean the same in JavaScript.
RULES = [
    (r"\x1b\[[0-9;?]*[A-Za-z]", ""),  # colours
    (r"https?:\/\/\S+", " "),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*", " "),  # times
    (
        r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-1\b",
        " exitcode_sighup ",
    ),  # what torchrun calls signals
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-4\b", " exitcode_sigill "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-6\b", " exitcode_sigabrt "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-7\b", " exitcode_sigbus "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-8\b", " exitcode_sigfpe "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-9\b", " exitcode_sigkill "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-11\b", " exitcode_sigsegv "),
    (r"(?:exit|return)[_ ]?[Cc]ode *[:=]? *-15\b", " exitcode_sigterm "),
    # the name of what is missing decides; the rest of such lines is always the same
    (
        r"\b(lib\w+)\.so[.\d]*: cannot open shared object file(: No such file or directory)?",
        " cannot_open_$1 ",
    ),
    (r"No module named '(\w+)([^']*)'", " no_module_$1 $2 "),
    (
        r"(CUDA initialization: )?Unexpected error from cudaGetDeviceCount\(\)",
        " no_device_count ",
    ),
    (r"Did you run some cuda functions before calling NumCudaDevices\(\)[^?]*\?", " "),
    (
        r"(\[Errno \d+\] )?No such file or directory: "
        r"'([^']*\/)?(tmp-checkpoint|torchrun|\.metadata)[^']*'",
        " no_file_$3 ",
    ),
    (r"(FileNotFoundError: )?\[Errno \d+\] No such file or directory", " "),
    (r"OSError: \[Errno \d+\] Cannot allocate memory", " "),
    (
        r"execve\(\): (\S*\/)?([\w.-]+): No such file( or( directory)?)?",
        " no_program no_program_$2 ",
    ),
    (r"([\w-]+): command not found", " no_command_$1 "),
    (r"\bFile \S+ cannot be opened", " file_cannot_be_opened "),
    (r"cannot import name '(\w+)' from '([\w.]+)'", " no_name_$1 $2 "),
    (r"name '(\w+)' is not defined", " no_global_$1 "),
    (r"\b(list|string|tuple) index out of range", " "),
    (r"system error: 10049\b[^)]*", " error_10049 "),
    # lines of any run, and what is in many of them
    (
        r"(During handling of the above exception, another exception occurred"
        r"|The above exception was the direct cause of the following exception):?",
        " ",
    ),
    (r"^\s*wandb: .*", " "),
    (r"is deprecated and will be removed in( a)?( future)?( version)?", " "),
    (r"job \d+ (queued and waiting for|has been allocated) resources", " "),
    (r"^[\s#$+]*conda activate \S+\s*$", " "),
    (r"\bexit code 0\b", " "),
    (r"Exception ignored in: <(_io\.\w+|function \S+)", " "),
    (r"Connection to \S+ closed by remote host", " "),
    # SLURM's beginnings of lines, whose end says what it is
    (
        r"Batch job submission failed:|Unable to create step for job \d+:"
        r"|Unable to allocate resources:",
        " ",
    ),
    (r"transport\/nvls\.cc\b", " multicast_of_nvls "),
    (r"[A-Za-z]:\\[^\s'\",:;()\[\]]+", " "),  # paths
    (r"(^|[\s'\"(\[=:@])[~.…]{0,2}\/[^\s'\",;()\[\]]+", "$1 "),
    (r"\b[\w.-]+(\/[\w.-]+){2,}", " "),
    (r"\b[\w-]+\.(py|cpp|cc|cu|h|hpp|sh|so)\b[.\d]*(:\d+)?", " "),
    (r"\b0x[0-9A-Fa-f]+|\b[0-9a-f]{12,}\b", " "),  # addresses
    (r"torch\.Size\(\[0\]\)", " empty_shape "),  # what ZeRO leaves of a parameter
    (r"tensor [ab] \(0\)", " empty_shape "),
    (  # any attribute: it is the wrapper that has none
        r"'(DistributedDataParallel|DataParallel|FullyShardedDataParallel"
        r"|DeepSpeedEngine|OptimizedModule)' object has no attribute '([^']*)'",
        " attribute_of_a_wrapper $2 ",
    ),
    # operations of a layer are in a forward, and all others in an optimizer or a norm
    (
        r"aten\.(addmm|baddbmm|bmm|convolution|embedding|linear|matmul|mm)\b\S*"
        r" got mixed",
        " layer_got_mixed ",
    ),
    (r"aten\.\w+(\.\w+)?:? got mixed", " update_got_mixed "),
    # elsewhere the words that all such lines have in common say nothing
    (r"'(\w+)' object has no attribute '([^']*)'", " no_attribute_of_$1 $2 "),
    (r"module '([\w.]+)' has no attribute '([^']*)'", " no_attribute_in_$1 $2 "),
    (r"KeyError: '([A-Za-z_]+)'", " keyerror_$1 "),
    (r"KeyError: '[^']*'", " "),
    (r"\d+", " "),  # and every number
]
WORD = r"[a-z_]{2,}"
# Names of signals: a text that has one is about that signal, whatever else it says.
SIGNAL = r"^(exitcode_)?sig(abrt|bus|fpe|hup|ill|int|kill|quit|segv|term|trap|usr)$"
# what launchers, loggers and people put around any error
NOISE = set(
    "rank default worker node info warn warning error errors debug critical the of to "
    "in is at and for on or an be by it that this with from was not are as if "
    "torch exception traceback most recent call last file line stderr stdout log".split()
)
STRANGE = 1.2  # the weight of a word that no text has: a name of the reader's own
PAIR = 0.5  # a pair of words counts this much of what a word of its rareness does
ENOUGH = 13.0  # the least weight that has to be in common: three rare words
MOST = 0.8  # or this much of a text, which may be short
SHARE = 0.5  # of the shorter of line and text, by weight
SECOND = 0.85  # what a line counts that comes beside a failure's own texts


class Match(NamedTuple):
    """How well a line fits a failure."""

    score: float
    failure: int  # its place in the index


def cleaned(line):
    """A line without what is different in each run."""
    for pattern, replacement in RULES:
        line = re.sub(pattern, replacement.replace("$", "\\"), line)
    return line


def parts_of(line):
    """The words and the pairs of words in a line, {part: how often}."""
    words = [word.strip("_") for word in re.findall(WORD, cleaned(line).lower())]
    words = [word for word in words if len(word) > 1 and word not in NOISE]
    pairs = [f"{first} {second}" for first, second in zip(words, words[1:])]
    return set(words) | set(pairs)


def signals_in(parts):
    """The names of signals among parts."""
    return {part for part in parts if re.search(SIGNAL, part)}


class Index:
    """The texts of all failures. failures: (texts, how many of them are its own) each;
    the others are lines that come beside them. general: the places of the pages about
    lines that follow almost any failure.
    """

    def __init__(self, failures, general=frozenset()):
        self.general = general
        self.failures = [[parts_of(text) for text in texts] for texts, _ in failures]
        self.signals = [[signals_in(text) for text in texts] for texts in self.failures]
        self.owned = [owned for _, owned in failures]
        known = Counter()
        for texts in self.failures:
            known.update(set().union(*texts))
        many = len(self.failures) + 1
        self.weights = {part: weight(part, many / n) for part, n in known.items()}
        self.having = defaultdict(set)  # part: the failures that have it
        for number, texts in enumerate(self.failures):
            for part in set().union(*texts):
                self.having[part].add(number)
        self.wholes = [
            [self.weight_of(text) for text in texts] for texts in self.failures
        ]
        self.said_of_any = set().union(
            *(text for number in general for text in self.failures[number])
        )

    def weight_of(self, parts):
        """The weight of a line's or a text's parts."""
        return sum(
            self.weights.get(part, 0 if " " in part else STRANGE) for part in parts
        )

    def matches(self, line):
        """The failures that a line fits, best first; those that fit equally well in the
        index's order. A page that also fits without the words of the general pages comes
        before these: in the site's search, a whole log is one line.
        """
        parts = parts_of(line)
        own = self.weight_of(parts)
        near = set().union(*(self.having.get(part, ()) for part in parts))
        found = [Match(self.score(parts, own, number), number) for number in near]
        found = [match for match in found if match.score > 0]
        found = sorted(found, key=lambda match: (-match.score, match.failure))
        rest = parts - self.said_of_any
        own = self.weight_of(rest)
        particular = (
            match.failure for match in found if self.score(rest, own, match.failure)
        )
        return general_last(found, self.general, particular)

    def score(self, parts, own, number):
        """How well a line's parts fit one of a failure's texts; 0 if they do not."""
        best = 0.0
        for place, text in enumerate(self.failures[number]):
            signals = self.signals[number][place]
            if signals and signals.isdisjoint(parts):
                continue
            common, whole = self.weight_of(parts & text), self.wholes[number][place]
            needed = min(ENOUGH, MOST * whole)
            share = common / min(own, whole) if common else 0
            if common >= needed and share >= SHARE:
                alike = 2 * common / (own + whole)
                score = common * (share + alike) / 2
                beside = place >= self.owned[number]
                best = max(best, SECOND * score if beside else score)
        return round(best, 6)


def general_last(found, general, particular):
    """Matches or findings; but where a general page is first, the first of the particular
    failures comes before it.
    """
    if not found or found[0].failure not in general:
        return found
    particular = set(particular) - general
    first = [each for each in found if each.failure in particular][:1]
    return first + [each for each in found if each not in first]


def weight(part, rareness):
    """What a part counts that one failure in so many has."""
    return math.log(rareness) * (PAIR if " " in part else 1)


def exported(failures, pages, general):
    """What site/search.js needs: the rules, the limits, and the texts of each page.
    failures, general: as for Index.
    """
    return {
        "rules": RULES,
        "word": WORD,
        "signal": SIGNAL,
        "noise": sorted(NOISE),
        "general": sorted(general),
        "limits": {
            "strange": STRANGE,
            "pair": PAIR,
            "enough": ENOUGH,
            "most": MOST,
            "share": SHARE,
            "second": SECOND,
        },
        "pages": [
            {"page": page, "texts": texts, "owned": owned}
            for page, (texts, owned) in zip(pages, failures)
        ],
    }
