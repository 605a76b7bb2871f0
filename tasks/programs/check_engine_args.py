"""Check ``training.engine_args`` against trl.GRPOConfig, whose arguments they are.

Launch: ``python -m tasks.programs.check_engine_args REQUEST.json`` (an EngineArgsRequest); writes ``result.json`` beside it.
"""

import difflib

from trl import GRPOConfig

from tasks.engines.base import EngineArgsRequest
from tasks.errors import RefusedInput
from tasks.programs import lifecycle


def check_names(request: EngineArgsRequest) -> None:
    """Raise RefusedInput for a name that trl.GRPOConfig does not have, with the nearest that it has."""
    known = GRPOConfig.__dataclass_fields__
    for name in request.names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, n=3)) or "none"
            raise RefusedInput(f"training.engine_args.{name}: trl.GRPOConfig has no such argument; nearest: {near}")


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(EngineArgsRequest, check_names, __doc__))
