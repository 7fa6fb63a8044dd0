"""Loading plugins: what is refused, what is set aside, and what the messages say."""

from __future__ import annotations

import re

import msgspec
import pytest

from bien.core.entry_points import PluginRef
from bien.core.errors import PluginError
from bien.core.plugins import PluginManager


def problems(manager: PluginManager) -> str:
    return "\n".join(p.text for p in manager.problems)


def test_built_in_plugins_come_through_entry_points():
    manager = PluginManager.load("")
    assert {ref.distribution for ref in manager.loaded} == {"bien"}
    assert manager.find("scheduler", "fcfs").ref.module == "bien.plugins.schedulers.fcfs"


def test_a_third_party_provider_is_found_with_its_origin(install, source):
    install("acme-lifo", source("scheduler", "lifo"), version="2.1")
    found = PluginManager.load("acme-lifo").find("scheduler", "lifo")
    assert found.ref == PluginRef("acme-lifo", "acme_lifo", "acme-lifo", "2.1")


def test_the_environment_chooses_third_party_plugins(install, source, monkeypatch):
    install("acme-a", source("scheduler", "a"))
    install("acme-b", source("scheduler", "b"), entry_point="bee")
    monkeypatch.delenv("BIEN_PLUGINS", raising=False)
    assert {"a", "b"} <= set(PluginManager.load().names("scheduler"))
    monkeypatch.setenv("BIEN_PLUGINS", "bee")
    manager = PluginManager.load()
    assert "b" in manager.names("scheduler")
    assert "a" not in manager.names("scheduler")
    monkeypatch.setenv("BIEN_PLUGINS", "")
    manager = PluginManager.load()
    assert not {"a", "b"} & set(manager.names("scheduler"))
    with pytest.raises(PluginError, match="BIEN_PLUGINS leaves out: .*acme-a 1.0"):
        manager.find("scheduler", "a")


def test_distributions_are_named_as_packaging_tools_do(install, source):
    install("acme-lifo", source("scheduler", "lifo"), entry_point="x")
    assert "lifo" in PluginManager.load("Acme_Lifo").names("scheduler")


def test_a_name_in_the_environment_must_be_installed(install, source):
    install("acme-lifo", source("scheduler", "lifo"))
    with pytest.raises(PluginError, match="BIEN_PLUGINS names 'acme-lifi': .*did you mean 'acme-lifo'"):
        PluginManager.load("acme-lifo,acme-lifi")


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(PluginError, match="no scheduler named 'fcsf'.*did you mean 'fcfs'"):
        PluginManager.load("").find("scheduler", "fcsf")


def test_two_providers_of_one_name_are_refused_naming_both(install, source):
    install("acme-one", source("scheduler", "lifo"), version="1.0")
    install("acme-two", source("scheduler", "lifo"), version="2.0")
    manager = PluginManager.load("acme-one,acme-two")
    for refuse in (manager.check, lambda: manager.find("scheduler", "lifo")):
        with pytest.raises(PluginError) as caught:
            refuse()
        text = str(caught.value)
        assert "acme-one 1.0" in text
        assert "acme-two 2.0" in text
        assert "pip uninstall acme-two" in text
        assert "BIEN_PLUGINS" in text
    PluginManager.load("acme-one").check()


def test_a_third_party_may_not_replace_a_built_in_silently(install, source):
    install("acme-fcfs", source("scheduler", "fcfs"))
    with pytest.raises(PluginError, match=r"by bien [\d.]+ .*pip uninstall acme-fcfs|by acme-fcfs"):
        PluginManager.load("acme-fcfs").find("scheduler", "fcfs")


def test_one_entry_point_name_in_two_distributions_is_refused(install, source):
    install("acme-one", source("scheduler", "one"), entry_point="fast")
    install("acme-two", source("scheduler", "two"), entry_point="fast")
    with pytest.raises(PluginError, match="'fast'.* defined twice: by acme-one 1.0 .* and by acme-two 1.0"):
        PluginManager.load("fast")
    assert "two" in PluginManager.load("acme-two").names("scheduler")


def test_a_failing_import_is_a_problem_but_fatal_for_who_needs_it(install):
    install("acme-broken", "import no_such_module_anywhere")
    assert "acme-broken" not in problems(PluginManager.load(""))
    with pytest.raises(PluginError, match="acme-broken 1.0 failed to import: ModuleNotFoundError"):
        PluginManager.load("acme-broken")


def test_a_failing_import_shows_when_its_provider_is_missed(install, monkeypatch):
    install("acme-broken", "raise RuntimeError('no GPU')")
    monkeypatch.delenv("BIEN_PLUGINS")
    manager = PluginManager.load()
    assert "acme-broken 1.0 failed to import: RuntimeError: no GPU" in problems(manager)
    manager.find("scheduler", "fcfs")
    with pytest.raises(PluginError, match="no scheduler named 'quick'.*could not be used: .*no GPU"):
        manager.find("scheduler", "quick")
    with pytest.raises(PluginError, match="no GPU"):
        manager.plugin("acme-broken")


def test_a_wrong_api_number_names_both(install, monkeypatch):
    install(
        "acme-future",
        "from bien.core.api import Provider, hookimpl\n"
        "@hookimpl\n"
        "def bien_providers():\n"
        "    return [Provider('scheduler', 'soon', print, api=7)]\n",
    )
    monkeypatch.delenv("BIEN_PLUGINS")
    with pytest.raises(PluginError, match=r"acme-future 1\.0 .*plugin API 7, but .*plugin API 0"):
        PluginManager.load().find("scheduler", "soon")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("Provider('sheduler', 'x', print)", "unknown kind; valid: .*did you mean 'scheduler'"),
        ("Provider('scheduler', '', print)", "not a non-empty string"),
        ("Provider('scheduler', 'x', 3)", "factory is not callable: 3"),
        ("Provider('scheduler', 'x', print, dict)", "not a msgspec.Struct"),
        ("Provider('scheduler', 'x', print, type(Lax()))", "Lax lacks forbid_unknown_fields"),
        ("'fcfs'", "yields 'fcfs' .*not a Provider"),
    ],
)
def test_a_wrong_provider_is_set_aside(install, monkeypatch, body, says):
    install(
        "acme-wrong",
        "import msgspec\nfrom bien.core.api import Provider, hookimpl\n"
        "class Lax(msgspec.Struct): pass\n"
        f"@hookimpl\ndef bien_providers():\n    return [{body}]\n",
    )
    monkeypatch.delenv("BIEN_PLUGINS")
    manager = PluginManager.load()
    assert re.search(says, problems(manager)), problems(manager)
    manager.find("scheduler", "fcfs")


@pytest.mark.parametrize(
    ("source_text", "says"),
    [
        ("@hookimpl\ndef bien_provider():\n    return []\n", "bien_provider.*did you mean 'bien_providers'"),
        ("@hookimpl\ndef bien_providers(wrong):\n    return []\n", "wrong"),
        ("def bien_providers():\n    return []\n", "marks no function with @hookimpl"),
        ("@hookimpl\ndef bien_providers():\n    return 3\n", "failed in bien_providers.*not iterable"),
        ("@hookimpl\ndef bien_providers():\n    raise KeyError('x')\n", "failed in bien_providers.*KeyError"),
    ],
)
def test_a_wrong_hook_is_set_aside(install, monkeypatch, source_text, says):
    install("acme-hook", "from bien.core.api import hookimpl\n" + source_text)
    monkeypatch.delenv("BIEN_PLUGINS")
    manager = PluginManager.load()
    assert re.search(says, problems(manager)), problems(manager)
    manager.find("scheduler", "fcfs")


def test_a_child_loads_exactly_the_listed_plugins(install, source):
    install("acme-one", source("scheduler", "one"))
    install("acme-two", source("scheduler", "two"))
    ref = PluginManager.load("acme-one").find("scheduler", "one").ref
    sent = msgspec.json.decode(msgspec.json.encode(ref), type=PluginRef)
    child = PluginManager.load_refs([sent])
    assert child.loaded == [ref]
    assert [i.provider.name for i in child.installed] == ["one"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "0.9"}, "version 1.0 of acme-one is installed here, but .* composed with 0.9"),
        ({"distribution": "acme-gone"}, "acme-gone is not installed here"),
        ({"entry_point": "acme-uno"}, "no such entry point here.*acme-one"),
        ({"module": "elsewhere"}, "is acme_one here, not elsewhere"),
    ],
)
def test_a_child_refuses_a_different_installation(install, source, change, says):
    install("acme-one", source("scheduler", "one"))
    ref = PluginManager.load("acme-one").plugin("acme-one")
    with pytest.raises(PluginError, match=says):
        PluginManager.load_refs([msgspec.structs.replace(ref, **change)])
