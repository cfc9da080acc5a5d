"""``python -m tq_fs.cli``."""

import sys

from tq_fs.cli._main import main

sys.exit(main())
