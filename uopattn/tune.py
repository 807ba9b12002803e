"""`python -m uopattn.tune KEY=VALUE ...`: see `uopattn.tuning.command`. Imported, it is the object `uopattn.tune`."""

import sys

from uopattn.tuning.api import tune

if __name__ == "__main__":
  from uopattn.tuning.command import main

  sys.exit(main())

sys.modules[__name__] = tune  # type: ignore[assignment]
