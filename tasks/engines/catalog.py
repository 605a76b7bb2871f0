"""The engines by the name that ``training.engine`` gives them."""

from tasks.engines.base import Engine
from tasks.engines.trl_local import TrlLocal

ENGINES: dict[str, Engine] = {"trl_local": TrlLocal()}
