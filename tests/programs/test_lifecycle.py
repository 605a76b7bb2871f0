"""What every child program does first."""

import subprocess
import sys

from tasks.places import PROJECT_DIR

STARTED = """
import gc, sys
sys.orig_argv.append("tasks.programs.train")
from tasks.programs import lifecycle
print(gc.isenabled(), gc.get_freeze_count() > 0)
lifecycle.start()
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_garbage_is_looked_for_again_once_the_imports_are_done() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], cwd=PROJECT_DIR, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True"]
