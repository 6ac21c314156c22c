"""How ranks start, who they are, and what they send: launch, their environment, and a
watch on their collectives.
"""
