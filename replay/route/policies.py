"""The routers that are compared: all that are installed, or those that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bien.core.compose import compose
from bien.core.deployment import Deployment, Selection
from bien.core.errors import BienError, UserError, nearest
from bien.core.plugins import PluginManager


def chosen_policies(
    names: Sequence[str], deployment: Deployment, manager: PluginManager
) -> tuple[dict[str, Deployment], list[str]]:
    """A deployment for each router, which has the parameters of `deployment` where it is the router there,
    and its defaults elsewhere; and what was left out, with the reason.

    Raises:
        UserError: a name is no installed router, or is given twice.
        BienError: one that was asked for cannot be used.
    """
    installed = manager.names("router")
    for name in names:
        if name not in installed:
            raise UserError(f"--policy {name!r} is no installed router; {nearest(name, installed)}")
        if names.count(name) > 1:
            raise UserError(f"--policy {name!r} is given {names.count(name)} times; valid: each once")
    found: dict[str, Deployment] = {}
    notes: list[str] = []
    for name in names or installed:
        one = with_router(deployment, name)
        try:
            compose(one, manager)
        except BienError as error:
            if names:
                raise
            notes.append(f"router {name!r} is left out: {error}")
        else:
            found[name] = one
    if not found:
        raise UserError(f"no installed router can be used: {'; '.join(notes) or 'there is none'}")
    return found, notes


def with_router(deployment: Deployment, name: str) -> Deployment:
    """`deployment` with another router."""
    gateway = deployment.gateway
    router = gateway.router if gateway.router.use == name else Selection(name)
    return msgspec.structs.replace(deployment, gateway=msgspec.structs.replace(gateway, router=router))
