"""Grading: submissions are read as text, judged apart, and reported."""
