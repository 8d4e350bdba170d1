"""Sartor: federated learning when clients differ."""
