"""`python -m panax` is `panax`."""

import sys

from panax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
