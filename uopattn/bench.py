"""`python -m uopattn.bench`: see `uopattn.measure.bench`."""

import sys

from uopattn.measure.bench import main

if __name__ == "__main__":
  sys.exit(main())
