"""Lesson 11's data as people have it: CSV with names of its own, JSONL, several turns."""

import json

import datasets
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ddp_course import UsageError
from ddp_course.data import questions

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add it."},
    {"role": "assistant", "content": "def f(x):"},
    {"role": "user", "content": "And sum?"},
    {"role": "assistant", "content": "def g(x):"},
]
# what matters in the templates of five families: how a turn begins and ends, what a
# system's message becomes, and what is asked for
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (  # an empty thought before the last answer only, and before an asked one
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
FAMILIES = {  # template, end of a text, what ends an answer
    "llama 3": (LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>", "</s>"),
    "gemma": (GEMMA, "<eos>", "<end_of_turn>\n"),
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>\n"),
    "qwen 3": (QWEN3, "<|im_end|>", "<|im_end|>\n"),
}


def tokenizer_of(family):
    """A tokenizer whose tokens are bytes and the special ones of a family."""
    template, end, _ = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<eos>"]
    special += ["<start_of_turn>", "<end_of_turn>", "<think>", "</think>"]
    tokenizer.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template
    )


def learnt(encoded, tokenizer):
    """The texts that are learnt, each from its first token to its last."""
    texts, before = [], questions.IGNORED
    for label in encoded["labels"]:
        if label != questions.IGNORED:
            if before == questions.IGNORED:
                texts.append([])
            texts[-1].append(label)
        before = label
    return [tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_is_learnt_with_its_end_and_nothing_else(family):
    tokenizer, end = tokenizer_of(family), FAMILIES[family][2]
    found = learnt(questions.encode(TURNS, tokenizer, 999), tokenizer)
    assert [text.lstrip() for text in found] == ["def f(x):" + end, "def g(x):" + end]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_is_asked_with_is_how_its_last_turn_began(family):
    """Or it would have learnt to go on from another text than it gets."""
    tokenizer = tokenizer_of(family)
    encoded = questions.encode(TURNS, tokenizer, 999)
    [*_, last] = (n for n, label in enumerate(encoded["labels"]) if label == -100)
    before = tokenizer.decode(encoded["input_ids"][: last + 1])
    assert before == questions.as_text(TURNS[:-1], tokenizer, asks=True)


def test_an_answer_ends_where_the_template_ends_a_turn_too():
    ends = questions.end_tokens(tokenizer_of("gemma"))
    assert tokenizer_of("gemma").convert_ids_to_tokens(ends) == [
        "<eos>",
        "<end_of_turn>",
    ]
    for family in ("llama 3", "mistral", "chatml", "qwen 3"):
        tokenizer = tokenizer_of(family)
        assert questions.end_tokens(tokenizer) == [tokenizer.eos_token_id]


def test_a_conversation_that_the_template_refuses_is_told_in_one_line():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        UsageError, match="roles must alternate .it begins with 'Be brief"
    ):
        questions.encode(TURNS, tokenizer, 999)


def test_what_is_cut_off_is_not_learnt():
    tokenizer = tokenizer_of("chatml")
    whole = questions.encode(TURNS, tokenizer, 999)
    assert questions.encode(TURNS, tokenizer, 90)["labels"] == whole["labels"][:90]


@pytest.mark.parametrize("less, cut", [(0, 0), (1, 1)])
def test_the_card_counts_what_is_cut_and_not_what_just_fits(less, cut):
    tokenizer = tokenizer_of("chatml")
    longest = len(questions.encode(TURNS, tokenizer, 999)["input_ids"]) - less
    short = questions.conversation("Why?", "Because.")
    rows = datasets.Dataset.from_dict({"messages": [TURNS, short]}).map(
        questions.encode_and_say_whether_cut,
        input_columns=["messages"],
        fn_kwargs={"tokenizer": tokenizer, "longest": longest, "all_tokens": False},
    )
    said = questions.card(rows, longest)
    tokens = longest + len(questions.encode(short, tokenizer, 999)["input_ids"])
    assert said.startswith(f"2 conversations, {tokens} tokens, ")
    assert said.endswith(f"; {cut} cut at --longest {longest}")


PAIRS = [questions.conversation(f"q{n}", f"a{n}") for n in range(2)]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.csv", "user,prompt\nq0,a0\nq1,a1\n"),
        ("a.csv", "id,Question, Answer\n7,q0,a0\n8,q1,a1\n"),
        ("a.csv", "prompt,completion\nq0,a0\nq1,a1\n"),
        ("a.csv", "\ufeffinstruction,output,input\nq0,a0,\nq1,a1,\n"),
        (
            "a.jsonl",
            '{"question": "q0", "response": "a0"}\n\n{"response": "a1", "question": "q1"}',
        ),
        (
            "a.jsonl",
            "\n".join(json.dumps({"id": 1, "messages": pair}) for pair in PAIRS),
        ),
    ],
)
def test_names_of_columns_are_guessed(name, content, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert questions.read_questions(tmp_path / name) == PAIRS


def test_an_instruction_has_its_input_below_it(tmp_path):
    file = tmp_path / "alpaca.csv"
    file.write_text("instruction,input,output\nAdd.,1 2,3\nSay hi.,,Hi\n")
    asked = [turns[0]["content"] for turns in questions.read_questions(file)]
    assert asked == ["Add.\n\n1 2", "Say hi."]


def test_a_cell_may_hold_lines_and_commas_and_be_long(tmp_path):
    file, long = tmp_path / "a.csv", "x" * 200_000
    file.write_text(f'user,answer\n"a,\nb",{long}\nc,"\x0bd"\n')
    [first, second] = questions.read_questions(file)
    assert [turn["content"] for turn in first] == ["a,\nb", long]
    assert second[1]["content"] == "\x0bd"


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"messages": [{"role": "user"}]}\n' * 2, "without role and content in row 1"),
        ('{"messages": ["hi"]}\n' * 2, "without role and content in row 1"),
        ('{"messages": []}\n' * 2, "has no answer in row 1"),
        (
            json.dumps({"messages": TURNS}) + "\n" + '{"messages": []}',
            "no answer in row 2",
        ),
        ('{"user": "a", "answer": "b"}\n{"user": "a"}', "an empty cell in row 2"),
        ('{"user": "a", "answer": "b"}\n[1]', "values without names in row 2"),
        ('{"user": "a"}\n{"user": "b"}', "has no column answer; its columns are user"),
        ("[1]\n[2]", "values without names in row 1"),
        ('{"user": "a"\n', "cannot read --data"),
        ("7\n8", "values without names in row 1"),
    ],
)
def test_rows_that_will_not_do_give_one_line(content, said, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match="--data") as error:
        questions.read_questions(tmp_path / "a.jsonl")
    assert said in str(error.value) and "\n" not in str(error.value)
