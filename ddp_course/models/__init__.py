"""What is trained: small convolutional networks, GPT, Llama, LoRA."""
