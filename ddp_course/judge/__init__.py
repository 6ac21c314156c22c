"""How an answer is judged: the question, the sandbox, the verdict."""
