"""A plugin for pytest that puts our backend into TransferQueue's own end-to-end suites.

They stay as they are: before a module's fixtures run, its table of backends (or, where it has none,
its configuration) gets ours, and Ray runs where the values are to lie. Used by
``tests/test_transfer_queue_suites.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from omegaconf import OmegaConf
from transfer_queue import interface

from tests._transfer_queue_places import PLACES, configuration, raylets
from tq_fs.integrations.transfer_queue import NAME, TqFsStorageManager

_FILES = "asserts the files of SimpleStorage's checkpoint"
_OFFLOAD = "is about SimpleStorage's own offload to disk"
_GDR = "runs with MooncakeStore's GPUDirect only"
SKIPPED = {
    "test_checkpoint_e2e.py::TestCheckpointRoundtrip::test_tensor_fields": _FILES,
    "test_checkpoint_e2e.py::TestIncludeStorageFalse::test_storage_saved_is_true": (
        "asserts that SimpleStorage cannot do without its own copy"
    ),
    "test_checkpoint_e2e.py::TestCheckpointErrors"
    "::test_load_raises_on_storage_unit_count_mismatch": _FILES,
    "test_e2e_lifecycle_consistency.py::test_gdr_gpu_tensor_roundtrip": _GDR,
    "test_e2e_lifecycle_consistency.py::test_gdr_cpu_tensor_roundtrip": _GDR,
    "test_ssd_offload_e2e.py"
    "::test_public_api_routes_per_sample_and_migrates_on_overwrite": _OFFLOAD,
    "test_ssd_offload_e2e.py::test_checkpoint_round_trip_recreates_ssd_data": _OFFLOAD,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--place", choices=PLACES, required=True)
    parser.addoption("--root", required=True, help="a folder, or s3://bucket")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = {item.nodeid.rpartition("/")[2]: item for item in items}
    for name, reason in SKIPPED.items():
        if name not in found:
            raise pytest.UsageError(f"no test is called {name}: does it have another name now?")
        found[name].add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def our_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a module's fixtures find our backend, and Ray."""
    place, root = (request.config.getoption(name) for name in ("--place", "--root"))
    module = request.module
    made = configuration(place, root, module.__name__)
    with pytest.MonkeyPatch.context() as patch, raylets(place) as address:
        patch.setenv("TQ_TEST_BACKEND", NAME)
        if hasattr(module, "BACKEND_CONFIGS"):
            patch.setitem(module.BACKEND_CONFIGS, NAME, made)
        else:
            patch.setattr(module, "_TQ_CONFIG", OmegaConf.create(made))
        ray.init(address=address, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def it_was_ours() -> Iterator[None]:
    """Fail where a test ran on another backend."""
    yield
    client = interface._TQ_CLIENT
    assert client is None or isinstance(client.storage_manager, TqFsStorageManager)
