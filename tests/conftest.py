"""Before torch starts: its waiting threads must not spin, which slows everything down where a core is shared."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
