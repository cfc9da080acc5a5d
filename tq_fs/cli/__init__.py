"""The command line, ``tq-fs``."""

from tq_fs.cli._main import main

__all__ = ["main"]
