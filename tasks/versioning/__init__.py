"""All of DVC: the store of checkpoints and built inputs, restoring by hash, and finding what is already built.

`state/store` is a DVC repository without SCM, so an unattended run leaves the git tree clean. The outputs of ``dvc.yaml``
are built by a person's `make data` alone: they are read and checked here, never rebuilt, and ``dvc.lock`` is never written.
"""
