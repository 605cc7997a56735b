"""`python -m belljar`: the same command as `belljar`, for interpreters whose scripts are not on the PATH."""

from belljar.cli import main

if __name__ == "__main__":
    main()
