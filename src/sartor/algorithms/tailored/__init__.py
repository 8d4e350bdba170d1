"""Diversified global models: A-FSVRG, MA-FSVRG, GA-FSVRG."""
