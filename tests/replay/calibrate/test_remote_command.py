"""`bien calibrate --url`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bien.core.compose import Composition
from bien.core.costs.factors import read_calibration
from bien.core.errors import BienError, UserError
from bien.replay.calibrate.remote_run import served
from bien.replay.commands.calibrate import calibrate
from bien.replay.commands.deployment import composed
from tests.replay.calibrate.test_remote_http import Server

DEPLOYMENT = """
[model]
name = "smollm2-135m"
dtype = "{dtype}"
block_tokens = 16
[gateway]
router = "kv-aware"
kv_index = "memory"
[[pool]]
name = "main"
[pool.executor]
use = "simulated"
{executor}
"""
H200 = 'machine = "h200"\ntensor = 3\nweights = "fp8"'


def deployment(folder: Path, executor: str = H200, dtype: str = "bfloat16") -> Path:
    path = folder / "deployment.toml"
    path.write_text(DEPLOYMENT.format(executor=executor, dtype=dtype))
    return path


def composition(folder: Path, executor: str = H200) -> Composition:
    return composed(str(deployment(folder, executor)))


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """In a thread of its own: the command has its own loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
        yield server.url
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@pytest.mark.slow
def test_a_server_is_calibrated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "calibration.json"
    with serving(Server(vocabulary=49152, context=2048)) as url:
        calibrate(str(deployment(tmp_path)), url=url, tokens=8000, sessions=4, out=out)
    found = read_calibration(out)
    assert found.engine == "vllm that serves 'm'" and found.model == "smollm2-135m"
    assert (found.machine, found.layout["tensor"], found.formats["weights"]) == ("h200", 3, "fp8")
    assert found.held_out is not None and found.held_out.places >= 4
    said = capsys.readouterr()
    assert "largest residuals" in said.out and "(--chunk)" in said.err


def test_a_deployment_says_what_is_served(tmp_path: Path) -> None:
    model, machine = served(composition(tmp_path), None)
    assert machine == "h200" and model.machine.name == "H200 SXM"
    assert (model.layout.tensor, model.formats.weights, model.formats.kv) == (3, "fp8", "bf16")
    assert served(composition(tmp_path), "h200")[1] == "h200"
    model, machine = served(composed("laptop"), "cpu-2core")
    assert machine == "cpu-2core" and model.formats.weights == "fp32"


def test_what_does_not_say_enough_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'b200', the deployment's executor has machine = 'h200'"):
        served(composition(tmp_path), "b200")
    with pytest.raises(UserError, match="constant costs"):
        served(composition(tmp_path, "step_ms = 3"), "h200")
    with pytest.raises(UserError, match="--machine says what the server runs on"):
        served(composed("laptop"), None)


def test_bad_options(tmp_path: Path) -> None:
    path = str(deployment(tmp_path))
    out = tmp_path / "c.json"
    with pytest.raises(UserError, match="--chunk says how a server was started"):
        calibrate("laptop", chunk=2048, out=out)
    with pytest.raises(BienError, match="nothing listens there"):
        calibrate(path, url="http://127.0.0.1:9", out=out)
    with serving(Server(models=0)) as url, pytest.raises(UserError, match="serves no model"):
        calibrate(path, url=url, out=out)
    assert not out.exists()
