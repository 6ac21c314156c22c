"""What is trained on and what is trained: images, text, questions with answers, and
models.
"""
