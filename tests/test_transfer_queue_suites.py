"""TransferQueue's own end-to-end suites, unmodified, with our backend in each place.

They come with its wheel. ``tests/_transfer_queue_plugin.py`` puts the backend in, and says which of
their tests are skipped, and why.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.metadata import files
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

from tests._transfer_queue_places import PLACES, Place
from tests._transfer_queue_plugin import SKIPPED

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
PLUGIN = "tests._transfer_queue_plugin"


def suites() -> list[Path]:
    """Return the modules of TransferQueue's end-to-end suites."""
    found = [f for f in files("TransferQueue") or [] if f.match("tests/e2e/test_*.py")]
    return [path for path in (Path(str(f.locate())) for f in found) if path.exists()]


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.s3) if p == "s3" else p for p in PLACES]
)
def test_the_suites_of_transfer_queue_pass(
    place: Place,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules = suites()
    if not modules:
        pytest.skip("TransferQueue was installed without its suites")
    root = f"s3://{request.getfixturevalue('bucket')}" if place == "s3" else f"{tmp_path}/values"
    report, settings = tmp_path / "report.xml", tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")  # theirs are not ours
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "-p", PLUGIN, "-q", "-ra"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(modules[0].parent)]
    command += ["--junitxml", str(report), "--place", place, "--root", root, *map(str, modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = next(ET.parse(report).iter("testsuite")).attrib
    skipped = int(found["skipped"])
    passed = int(found["tests"]) - skipped
    with capsys.disabled():
        seconds = float(found["time"])
        print(f"\n{place}: {passed} passed, {skipped} skipped in {seconds:.0f} s")
        for reason, count in Counter(SKIPPED.values()).items():
            print(f"    {count} skipped: {reason}")
    assert (passed > 0, skipped) == (True, len(SKIPPED))
