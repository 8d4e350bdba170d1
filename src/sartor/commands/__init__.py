"""The command line: one module a command. Imports anything; nothing imports it."""
