"""``python -m sartor``: the command line."""

from sartor.commands.main import main

if __name__ == "__main__":
    main()
