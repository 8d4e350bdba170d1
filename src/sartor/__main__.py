"""``python -m sartor``: the command line."""

from sartor.cli import main

if __name__ == "__main__":
    main()
