"""How ranks start, what their environment is, and what they send: launch, environment,
and a watch on collectives.
"""
