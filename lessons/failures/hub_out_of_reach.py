"""A machine that does not reach the Hub

Run:    python lessons/failures/hub_out_of_reach.py
Text:   OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find
        them in the cached files. Check your internet connection or see how to run the library in
        offline mode
Text:   OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in
        the cached files and it looks like bert-base-uncased is not the path to a directory containing
        a file named config.json.
Text:   huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file
        on the Hub and we cannot find the requested files in the local cache.
Text:   ValueError: Connection error, and we cannot find the requested files in the cached path.
Cause:  The program wants a model from the Hub, and the machine has no way there: compute nodes of a
        cluster often have no internet. Or it was told to stay offline, and the files are not in its
        cache.
Which:  On the login node it runs: the compute node has no internet, or another home folder, so another
        cache. Everywhere: a misspelled path of your own, which is then taken for a name.
Fix:    Once, where there is internet: `hf download NAME --local-dir models/NAME`, on a disk that the
        nodes see, and give that path. Or the same `HF_HOME` on both, and `HF_HUB_OFFLINE=1` in the job.
        Let no rank download: start it before the job.
Lesson: 14
Source: https://github.com/huggingface/transformers/issues/10067
Source: https://github.com/CASIA-LMC-Lab/FiLo/issues/10
Source: https://github.com/Comfy-Org/ComfyUI/issues/5695
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # as a machine without internet
os.environ["HF_HOME"] = "an-empty-cache"

from transformers import AutoConfig

AutoConfig.from_pretrained("bert-base-uncased")
