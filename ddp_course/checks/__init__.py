"""The checks of the exercises, a module for each:
`checks.ex03.check_average_gradients(average_gradients)`.
"""
