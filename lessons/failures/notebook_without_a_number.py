"""A notebook that does not say how many processes it wants

Run:    not here: it needs a notebook without a configuration
Text:   ValueError: You have to specify the number of GPUs you would like to use, add
        `num_processes=...` to your call.
Text:   ValueError: You have to specify the number of devices you would like to use, add
        `num_processes=...` to your call.
Cause:  `notebook_launcher` starts the processes itself, and was not told how many. Only on Colab, with
        at most one GPU, it does without the number.
Fix:    `notebook_launcher(train, args, num_processes=2)`, with one process per GPU. If it trains on the
        CPU although there is a GPU, torch does not see it: `torch.cuda.is_available()`.
Lesson: 7
Source: https://github.com/nicolai256/Stable-textual-inversion_win/issues/27
Source: https://github.com/rinongal/textual_inversion/issues/75
"""
