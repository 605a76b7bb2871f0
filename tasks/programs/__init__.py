"""Child programs, run as ``python -m tasks.programs.<name>``: the only place where torch and its friends are imported.

What follows is read by those libraries when they are imported, so it is set before any program imports them.
"""

import gc
import logging
import os
import sys

# nothing is ever asked of a model hub, and no bar fills a log
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
# threads that wait for each other must not spin: beside another busy process that makes matrix products ten times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps compiled kernels of the last 1024 shapes, and every length of a growing KV cache is a new shape: bf16 training
# took 20 % more memory, and more with every step
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
# it warns at every import that a package for products in 4 bits is absent, which nothing here computes
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
if any(argument.startswith("tasks.programs.") for argument in sys.orig_argv):
    # looking for garbage takes a fifth of the imports' time; see lifecycle.start
    gc.disable()
    # trl imports it because it is installed, which takes a tenth of a program's start; no program logs to it
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
