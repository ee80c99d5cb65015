"""`python -m linnet`: the `linnet` command."""

from linnet.cli import app

if __name__ == "__main__":
    app()
