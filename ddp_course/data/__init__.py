"""What is trained on: images, text, questions with answers, tokenizers and shards of tokens."""
