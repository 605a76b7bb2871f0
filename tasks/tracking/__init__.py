"""All of MLflow: where it is, the parent run and its attempts, and the metrics on their way there.

The defaults below stand before MLflow is first imported: no telemetry, and a server that is away is noticed in seconds
(MLflow's own defaults block one call for four minutes). Whoever sets them in the environment wins.
"""

import logging
import os

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}.items():
    os.environ.setdefault(_name, _value)

# urllib3 repeats at every call what is said once here
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
