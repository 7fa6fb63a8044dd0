"""`python -m bien.core.worker`: what launch.py starts."""

from __future__ import annotations

import sys

from bien.core.worker.main import main

sys.exit(main())
