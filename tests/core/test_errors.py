from __future__ import annotations

from bien.core.errors import BienError, ModelError, UserError, error_kinds
from bien.core.worker.start import Failed


def test_every_code_has_its_class() -> None:
    class Same(ModelError):
        """Keeps its base's code."""

    kinds = error_kinds()
    assert kinds["internal_error"] is BienError
    assert kinds["invalid_request"] is UserError
    assert kinds["invalid_model"] is ModelError
    assert all(kind.code == code for code, kind in kinds.items())


def test_errors_cross_a_pipe_as_what_they_were() -> None:
    again = Failed.of(ModelError("no weights", field="model.name")).revive()
    assert isinstance(again, ModelError)
    assert (str(again), again.field) == ("no weights", "model.name")
    assert type(Failed("of_a_plugin", "x").revive()) is BienError
