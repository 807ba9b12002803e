"""`python -m uopattn.run KEY=VALUE ...`: see `uopattn.measure.run`."""

import sys

from uopattn.measure.run import main

if __name__ == "__main__":
  sys.exit(main())
