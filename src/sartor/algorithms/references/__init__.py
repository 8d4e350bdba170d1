"""FedAvg, FedAvg with fine-tuning, and everyone alone: what others are compared with.

Imports no other family.
"""
