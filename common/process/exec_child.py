"""`python -m common.process.exec_child PARENT MODULE ARGUMENTS...` becomes `python -m MODULE ARGUMENTS...`, bound to
its parent.

The kernel kills the process when the supervisor ends, in whatever way, so no child is left holding a port or memory.
The setting survives exec. It is made here and not between fork and exec of the supervisor, because there its gRPC
threads would make it unsafe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Arranges that this process is killed when its parent ends; ends it now when that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call above.
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Binds this process to its parent and becomes the module."""
    parent, module, *arguments = sys.argv[1:]
    die_with(int(parent))
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
