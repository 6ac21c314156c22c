"""A tokenizer that was used before a fork

Run:    not here: current versions of tokenizers no longer print it
Text:   huggingface/tokenizers: The current process just got forked, after parallelism has already been
        used. Disabling parallelism to avoid deadlocks...
Text:   Explicitly set the environment variable TOKENIZERS_PARALLELISM=(true | false)
Text:   Avoid using `tokenizers` before the fork if possible
Cause:  A fast tokenizer works in threads, and a forked process, such as a DataLoader worker, has none of
        its parent's threads. So the tokenizer goes on in one thread there. It is a note, no error:
        nothing is wrong with the results.
Which:  A program that hangs after this line hangs for another reason: look at the other ranks.
Fix:    `TOKENIZERS_PARALLELISM=false` in the environment, before the start. Better, tokenize the data
        set once, before training, and not in the workers.
Lesson: 8
Source: https://github.com/sillsdev/silnlp/issues/316
Source: https://github.com/deepset-ai/FARM/issues/837
Source: https://github.com/unitaryai/detoxify/pull/120
"""
