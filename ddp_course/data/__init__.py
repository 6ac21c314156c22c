"""What is trained on: images, text and its documents, questions with answers, tokenizers and shards of tokens."""
