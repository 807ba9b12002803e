"""`python -m uopattn.info`: see `uopattn.measure.info`."""

import sys

from uopattn.measure.info import main

if __name__ == "__main__":
  sys.exit(main())
