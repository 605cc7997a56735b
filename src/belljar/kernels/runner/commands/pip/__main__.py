"""`python -m pip`, and with it IPython's `%pip`."""

import sys

from .belljar import main

if __name__ == "__main__":
    sys.exit(main("pip", sys.argv[1:]))
