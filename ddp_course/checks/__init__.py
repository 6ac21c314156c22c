"""The checks of the exercises, a module for each:
`checks.ex03.check_average_gradients(average_gradients)`.
"""

from ddp_course.school import hints

hints.register()  # %hint, in a notebook
