"""The command `ddp-course`: JupyterLab, course folders, hints, checking, grading."""
