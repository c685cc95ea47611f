"""`python -m elsa` is the `elsa` command."""

from elsa.cli import main

if __name__ == "__main__":
    main()
