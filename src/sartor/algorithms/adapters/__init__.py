"""Low-rank adapters: which of A and B is trained, and which is shared.

Imports split models, whose layers of a client's own these are, and the references.
"""
