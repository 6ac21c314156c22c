"""The checks of the exercises, one module per exercise:
`checks.ex03.check_average_gradients(average_gradients)`.
"""

from ddp_course.judge import hints

hints.register()  # the magic %hint in a notebook
