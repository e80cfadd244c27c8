"""`python -m rallocator` is the command line."""

from rallocator._cli import main

if __name__ == "__main__":
    main()
