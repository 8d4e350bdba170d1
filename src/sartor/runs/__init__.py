"""One run: its experiment, set-up, the only round loop, evaluation, and what is recorded and checkpointed.

Imports algorithms, engines and what lies below them.
"""
