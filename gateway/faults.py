"""`FAULTS`: what a plugin may raise and be at fault, in place of the process that it runs in."""

from __future__ import annotations

# A plugin, or a library below it, that calls `sys.exit` must not end the gateway. An interrupt is the user's,
# a cancellation the caller's: both go through.
FAULTS = (Exception, SystemExit)
