"""Real machines through Flower: a server that asks nodes, nodes that answer, keys, and one adapter to Flower.

Imports runs and all that lies below; Flower's own names stand in modules whose names begin with ``flower``.
"""
