"""`python -m md4`: the command line."""

import sys

from md4.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
