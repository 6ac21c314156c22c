"""What a learner and an instructor use: the command `ddp-course`, the doctor, progress,
hints, exercises, grading.
"""
