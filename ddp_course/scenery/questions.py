"""Questions and answers, as files hold them and as a language model reads them: rows of
a CSV, a text, tokens.
"""

import ast
import csv
import warnings

import datasets
from transformers import AutoTokenizer

from ddp_course import UsageError
from ddp_course.scenery.text import files_of, fingerprint_of, made_once

MOST_HELD_OUT = 128  # questions, and a tenth of them at the most
MOST_ON_A_CPU = 1024  # questions to train on, where nobody says how many
LONGEST = 72  # characters of a question, or of an answer
END, PAD = "<|end|>", "<|pad|>"
# as Jinja: "user: ...", a new line, "assistant: ..." and the token that ends a text
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def questions_file():
    """A CSV file with the columns `user`, what a function does, and `prompt`, its first
    line, as a string.

    Both are from the standard library: the docstring's first line, and what follows
    `def`. Made once on a machine.
    """
    sources = [path.read_bytes() for path in files_of("python")[::2]]

    def make(folder):
        with (folder / "questions.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["user", "prompt"])
            rows.writerows(dict(functions_in(sources)).items())  # no question twice

    return str(
        made_once("questions", fingerprint_of(__file__, sources), make)
        / "questions.csv"
    )


def functions_in(sources):
    """What functions do, by their docstrings, and their first lines: pairs of strings.
    sources: bytes.
    """
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of what the sources of old have in their strings
            tree = ast.parse(source)
        for node in ast.walk(tree):
            docstring = (
                ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            )
            if docstring:
                what = docstring.splitlines()[0].strip()
                line = f"def {node.name}({ast.unparse(node.args)}):"
                if (
                    what.isascii()
                    and " " in what
                    and max(len(what), len(line)) <= LONGEST
                ):
                    yield what, line


def load_tokenizer(name):
    """The tokenizer of a model, with a chat template and a token for padding. Raises
    UsageError where that cannot be.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        wanted = "a folder with a model and its tokenizer, or a name on the hub, and the hub within reach"
        raise UsageError(
            f"cannot load --model {name}, it must be {wanted}: {str(error).splitlines()[0]}"
        ) from None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT
    if (
        tokenizer.pad_token is None
    ):  # padding is no target: were it the end, no answer would learn to end
        if tokenizer.unk_token is None:
            raise UsageError(
                f"the tokenizer of {name} has neither a padding nor an unknown token: give it one"
            )
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def load_questions(args, tokenizer, settings):
    """The tokens of questions with their answers: (to train on, held out), two datasets
    of `input_ids`.
    """
    path = questions_file() if args.data == "questions" else args.data
    with settings.main_process_first(
        desc="reading the questions"
    ):  # the others read what it has cached
        try:
            rows = datasets.Dataset.from_csv(
                path, cache_dir=str(args.out / "cache"), keep_in_memory=True
            )
        except (
            OSError,
            ValueError,
            datasets.exceptions.DatasetGenerationError,
        ) as error:
            raise UsageError(
                f"cannot read --data {path}: {str(error).splitlines()[0]}"
            ) from None
    if missing := {"user", "prompt"} - set(rows.column_names):
        raise UsageError(
            f"--data {path} has no column {' and no '.join(sorted(missing))}"
        )
    if len(rows) < 2:
        raise UsageError(
            f"--data {path} has {len(rows)} rows: one to train on and one to hold out are the least"
        )
    for number, row in enumerate(rows, 1):
        if row["user"] is None or row["prompt"] is None:
            raise UsageError(f"--data {path} has an empty cell in row {number}")
    parts = rows.train_test_split(
        test_size=min(MOST_HELD_OUT, -(-len(rows) // 10)), seed=0
    )
    most = (
        len(parts["train"])
        if settings.device.type == "cuda"
        else min(MOST_ON_A_CPU, len(parts["train"]))
    )
    if (wanted := args.train_samples or most) > len(parts["train"]):
        raise UsageError(
            f"--train-samples {wanted} is more than --data {path} has: {len(parts['train'])}"
        )

    def encode(row):
        turns = conversation(str(row["user"]), str(row["prompt"]))
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        return tokenizer(
            text, truncation=True, max_length=args.longest, add_special_tokens=False
        )

    parts["train"] = parts["train"].select(range(wanted))
    encoded = parts.map(encode, remove_columns=rows.column_names, keep_in_memory=True)
    return encoded["train"], encoded["test"]


def conversation(user, prompt=None):
    """A question, and its answer where there is one, as chat templates want them."""
    answer = [] if prompt is None else [{"role": "assistant", "content": prompt}]
    return [{"role": "user", "content": user}, *answer]


def answer(model, tokenizer, user, length=40):
    """What the model answers: the most likely token each time, until it ends its
    answer.
    """
    text = tokenizer.apply_chat_template(
        conversation(user), tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(
        model.device
    )
    model.eval()
    written = model.generate(**tokens, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(
        written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()
