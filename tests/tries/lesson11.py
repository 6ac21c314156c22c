from tries import new, run

OTHER_TEMPLATE = (
    'tokenizer.chat_template = "{% for turn in messages %}'
    '{{ turn.content }}{{ eos_token }}{% endfor %}"'
)
ROWS = 'table([{"merged into": "the original weights", **theirs},'
BASE = """
       {"merged into": "no adapter",
        **agreement(AutoModelForCausalLM.from_pretrained(base))},"""
ASSERTIONS = (
    (
        'assert of["Llama 2 7B, QLoRA"] < 5 < 7.8'
        ' < of["Llama 3.1 8B, QLoRA, rest in fp32"] < 8\n',
        "",
    ),
    (
        'assert computed["Llama 3.1 8B, QLoRA, rest in fp32"]["unpacked"] > 7.8 / 2\n',
        "",
    ),
)
SAME = """\
unpacked = [computed[name]["unpacked"] for name in list(computed)[1:3]]
print(unpacked)
assert unpacked[0] == unpacked[1]
"""
OTHER_ANSWER = 'chosen.replace("(self, ", "(").replace("(self)", "()")'
LONG = """\
[long] = questions.answers(network, padded_with_eos, asked[:1], 200)
print(long)
"""
TRIES = {
    "874c9e88": [
        new("before = lines['α / r']"),
        run("b2277fe3", ("moved(r, 16 / r)", "moved(r, 32 / r)")),
        new(
            "for now, then in zip(lines['α / r'], before):\n"
            "    assert 1.5 < now / then < 2.1"
        ),
    ],
    "80c9f1a5": [
        new(OTHER_TEMPLATE),
        run("14c5e309", says=r"tokens are learnt\ndef\|.*\|<\|end\|>\n"),
        run("1965425e"),
        run("14c5e309", says=r"tokens are learnt\n def\|"),
    ],
    "1c44b0df": [
        run(
            "d8ac68b7",
            ('["--targets", "attention"]', '["--targets", "attention", "--r", "16"]'),
        ),
        run(
            "d8ac68b7",
            ('["--targets", "attention"]', '["--targets", "attention", "--r", "22"]'),
        ),
    ],
    "e05635ac": [
        new('asked = ["Open a file.", "Close the window.", "Return the length."]'),
        new("_ = say(model)", says=r"(?s)(Open|Close|Return).*def "),
    ],
    "a95e8274": [run("f5c4782b", (ROWS, ROWS + BASE), says="no adapter")],
    "78dc9ab6": [
        run("1a6c0da5", (OTHER_ANSWER, 'methods[-1][1]["content"]')),
        run("57accd10"),
    ],
    "e38f30a1": [
        run("719bd95a", ("vocab_size=128256", "vocab_size=32000"), *ASSERTIONS),
        new(SAME),
    ],
    "057fecff": [new(LONG)],
}
NOT_HERE = {"b76b96d2": "needs SmolLM2, a model from the Hub"}
