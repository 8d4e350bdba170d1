"""What one client can do: batches, descend, full gradients, evaluation, each of one local loop.

Imports model and what lies below it.
"""
