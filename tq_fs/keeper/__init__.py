"""Values of one run, kept by one process on Ray and reached from all others."""

from tq_fs.keeper._actor import RunningKeeper, here
from tq_fs.keeper._open import open_keeper, open_values
from tq_fs.keeper._settings import Connection, ValueConfig

__all__ = ["Connection", "RunningKeeper", "ValueConfig", "here", "open_keeper", "open_values"]
