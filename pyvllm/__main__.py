"""`python -m pyvllm`."""

import sys

from pyvllm.cli import main

sys.exit(main())
