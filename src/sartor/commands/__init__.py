"""The commands of the command line, a module for each or for a few that belong together."""
