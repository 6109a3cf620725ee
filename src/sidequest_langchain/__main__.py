"""`python -m sidequest_langchain` is the console script `sidequest`."""

from __future__ import annotations

import sys

from sidequest_langchain.cli import main

sys.exit(main())
