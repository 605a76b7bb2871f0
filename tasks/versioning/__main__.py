"""What DVC keeps for halfstep: checkpoints and built inputs, by hash.

Examples:
  python -m tasks.versioning list
  python -m tasks.versioning restore 0123456789abcdef0123456789abcdef.dir /tmp/checkpoint
  python -m tasks.versioning verify

A run's hashes are in its run.json and among its tags in MLflow. To keep a second copy elsewhere:
  cd state/store && python -m dvc remote add -d NAME URL
"""

import argparse
import sys
from pathlib import Path

from tasks.errors import HalfstepError
from tasks.memory import MB
from tasks.places import STORE_DIR
from tasks.versioning.restore import restore_folder
from tasks.versioning.store import list_store, verify_store


def main() -> int:
    """Carry out one command; faults found by `verify` are exit code 1."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tasks.versioning", description=__doc__, formatter_class=about)
    parser.add_argument("--store", type=Path, default=STORE_DIR, help="the store (default: state/store)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what the store holds: kind/name, hash, size")
    commands.add_parser("verify", help="read every stored byte and name each file that is damaged or missing")
    restore = commands.add_parser("restore", help="bring a folder back bit for bit from its hash, out of a cache or the default remote")
    restore.add_argument("hash", help="DVC's hash of the folder, ending in .dir")
    restore.add_argument("destination", type=Path, help="an empty or missing folder")
    arguments = parser.parse_args()
    store = arguments.store.resolve()
    faults: tuple[str, ...] = ()
    if arguments.command == "restore":
        lines = [f"restored {restore_folder(store, arguments.hash, arguments.destination.resolve())}"]
    elif not (versions := list_store(store)):
        lines = [f"the store {store} holds nothing yet"]
    elif arguments.command == "list":
        lines = [f"{'/'.join(version.path.parts[-2:]):44} {version.dvc_hash}  {version.size_bytes / MB:10.1f} MB" for version in versions]
    else:
        faults = verify_store(store)
        lines = [*faults] or [f"{len(versions)} stored folders, every byte as recorded"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HalfstepError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
