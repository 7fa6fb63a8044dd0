"""Of the suite of engines: what a router may believe of an upstream's cache.

Too little costs a recompute, too much sends requests astray: whatever gets lost or cannot be read, nothing
may count as cached that is not, and somebody must be told.
"""

from __future__ import annotations

import unittest

from bien.gateway.testing.engine_base import EngineTests
from bien.gateway.testing.engine_rig import EngineRig, stored, until
from bien.gateway.testing.event_forms import FORMS, recorded

FIRST, LONGER = range(100, 112), range(100, 116)  # of the recorded history
BRANCH = [*range(100, 108), *range(500, 508)]
ADAPTED = range(900, 904)
LONG = 300  # tokens: more than a block of any engine


class EventTests(EngineTests):
    async def test_events_of_every_form_are_understood(self) -> None:
        self._with_events()
        for form in FORMS:
            messages = recorded(form)
            async with self.opened() as rig:
                for message in messages[:2]:
                    await rig.tell(message)
                await rig.claims(LONGER, 16)
                await rig.claims(BRANCH, 16)
                for message in messages[2:5]:
                    await rig.tell(message)
                await rig.claims(LONGER, 12)
                await rig.claims(BRANCH, 12)
                assert not rig.mirror.depth(ADAPTED), "an adapter's blocks count for who does not use it"
                await rig.tell(messages[5])
                await rig.claims(LONGER, 4)
                assert rig.mirror.blocks == 1, f"one block is left, and {rig.mirror.blocks} count: {form}"
                assert not rig.engine.alarms, f"alarms when all is well: {rig.engine.alarms}"

    async def test_what_was_cached_before_is_learnt(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.leave()
            for message in recorded("arrays")[:2]:
                await rig.tell(message, send=False)
            await rig.connect()
            await rig.claims(LONGER, 16)

    async def test_missed_messages_are_asked_for(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            messages = recorded("maps")
            await rig.tell(messages[0])
            await rig.claims(FIRST, 12)
            await rig.tell(messages[1], send=False)
            await rig.tell(messages[2])
            await rig.claims(LONGER, 16)

    async def test_what_was_missed_for_ever_counts_no_more(self) -> None:
        """It may have removed anything."""
        self._with_events()
        async with self.opened() as rig:
            messages = recorded("maps")
            await rig.tell(messages[0])
            await rig.tell(messages[1])
            await rig.claims(LONGER, 16)
            rig.publisher.kept.clear()
            await rig.tell(messages[4], keep=False, send=False)
            await rig.tell_events(stored([70], None, range(700, 704)))
            await rig.claims(range(700, 704), 4)
            assert not rig.mirror.depth(LONGER), (
                "messages are missing that nobody has any more, and what came before them still counts"
            )

    async def test_a_sequence_that_begins_again_is_an_empty_cache(self) -> None:
        """A process was replaced faster than its health was looked at."""
        self._with_events()
        for told in (1, 3):
            async with self.opened() as rig:
                for n in range(told):
                    await rig.tell_events(stored([n], None, range(100 * n, 100 * n + 4)))
                await rig.claims(range(4), 4)
                await rig.claims(range(100 * told - 100, 100 * told - 96), 4)
                rig.begin_again()
                await rig.tell_events(stored([70], None, range(700, 704)))
                await rig.claims(range(700, 704), 4)
                await rig.claims(range(4), 0)
                assert rig.mirror.blocks == 1, (
                    f"the engine began anew with one block, and {rig.mirror.blocks} count"
                )

    async def test_a_message_that_comes_twice_is_one(self) -> None:
        """What is published while earlier messages are asked for is among these too."""
        self._with_events()
        async with self.opened() as rig:
            await rig.leave()
            messages = recorded("maps")
            for message in messages[:5]:
                await rig.tell(message, send=False)
            await rig.connect()
            await rig.claims(LONGER, 12)
            await rig.publisher.publish(4, messages[4], keep=False)
            await rig.tell_events(stored([70], None, range(700, 704)))
            await rig.claims(range(700, 704), 4)
            assert rig.mirror.depth(LONGER) == 12, "a message that came twice is no new life"

    async def test_undecodable_messages_are_alarmed(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.tell_events(stored([1], None, range(100, 104)))
            await rig.claims(range(100, 104), 4)
            await rig.tell(b"\xc1 of another world")
            await self._alarmed(rig, "messages that cannot be decoded")
            await rig.claims(range(100, 104), 0)
            await rig.tell_events(stored([2], None, range(200, 204)))
            await rig.claims(range(200, 204), 4)
            await until(lambda: not rig.engine.alarms, f"all is well again; alarms: {rig.engine.alarms}")

    async def test_unknown_events_are_alarmed(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.tell_events({"type": "BlockFolded", "block_hashes": [1]}, form="maps")
            await self._alarmed(rig, "events of a type that nobody knows")

    async def test_an_engine_that_is_silent_is_alarmed(self) -> None:
        """It has computed prompts and told of none: events are off, or come from elsewhere."""
        self._with_events()
        async with self.opened() as rig:
            await rig.answered(rig.ask(range(LONG)))
            await self._alarmed(rig, "an engine that computes and tells nothing")

    async def test_blocks_of_an_unknown_parent_are_not_guessed(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.tell_events(stored([5], 4, range(100, 104)), stored([6], None, range(200, 204)))
            await rig.claims(range(200, 204), 4)
            assert rig.mirror.blocks == 1, "a block counts whose place in a prompt is not known"

    async def test_other_ranks_do_not_mix(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.tell_events(stored([1], None, range(100, 104)))
            await rig.claims(range(100, 104), 4)
            await rig.tell_events(stored([2], None, range(300, 304)), rank=3)
            await rig.tell_events(stored([3], None, range(200, 204)))
            await rig.claims(range(200, 204), 4)
            assert not rig.mirror.depth(range(300, 304)), "rank 3's blocks count for rank 0"

    async def test_tenants_have_salts_of_their_own(self) -> None:
        """Else one tenant finds in the engine's cache what another has sent there."""
        if not self.salts:
            raise unittest.SkipTest("it has no salts")
        async with self.opened() as rig:
            asked: dict[tuple[str, str], str | None] = {}
            for tenant, salt in (
                ("", ""),
                ("alice", ""),
                ("bob", ""),
                ("", "s"),
                ("alice", "s"),
                ("alice", ""),
            ):
                await rig.answered(rig.ask(tenant=tenant, salt=salt))
                said = rig.server.asked[-1].get(self.salt_field)
                who = f"tenant {tenant!r} with salt {salt!r}"
                assert bool(said) == bool(tenant or salt), f"{who}: {self.salt_field} is {said!r}"
                assert asked.get((tenant, salt), said) == said, f"{who} has another salt each time"
                assert tenant not in (said or "-") or not tenant, f"{who} can be read from {said!r}"
                asked[tenant, salt] = said
            assert len(set(asked.values())) == len(asked), f"tenants share salts: {asked}"

    async def test_salted_blocks_are_their_tenants(self) -> None:
        self._with_events()
        if not self.salts:
            raise unittest.SkipTest("it has no salts")
        async with self.opened() as rig:
            prompt = range(100, 108)
            await rig.answered(rig.ask(prompt, tenant="alice"))
            salt = rig.server.asked[-1][self.salt_field]
            await rig.tell_events(stored([1, 2], None, prompt, salt))
            await rig.claims(prompt, 8, tenant="alice")
            for tenant, own in (("", ""), ("bob", ""), ("alice", "s")):
                assert not rig.mirror.depth(prompt, tenant, own), (
                    f"alice's blocks count for tenant {tenant!r} with salt {own!r}"
                )

    async def test_salts_of_strangers_are_nobodys(self) -> None:
        self._with_events()
        async with self.opened() as rig:
            await rig.tell_events(
                stored([1], None, range(100, 104), "a stranger's"), stored([2], None, range(200, 204))
            )
            await rig.claims(range(200, 204), 4)
            assert not rig.mirror.depth(range(100, 104)), "blocks with a salt count for who has none"

    async def test_a_salt_of_an_earlier_life_is_learnt(self) -> None:
        """The engine has told of a tenant's blocks before this gateway knew the tenant."""
        self._with_events()
        if not self.salts:
            raise unittest.SkipTest("it has no salts")
        async with self.opened() as rig:
            prompt = range(100, 108)
            await rig.answered(rig.ask(prompt, tenant="alice"))
            salt = rig.server.asked[-1][self.salt_field]
            await rig.leave()
            await rig.tell_events(stored([1, 2], None, prompt, salt))
            await rig.connect()
            await until(lambda: rig.mirror.settled, "no snapshot comes")
            await rig.answered(rig.ask(range(800, 808), tenant="alice"))
            await rig.claims(prompt, 8, tenant="alice")

    async def test_without_events_nothing_counts_that_was_not_sent(self) -> None:
        if self.events:
            raise unittest.SkipTest("it follows events")
        async with self.opened() as rig:
            await rig.answered(rig.ask(range(100, 108), tenant="alice"))
            await until(lambda: rig.mirror.settled, "no snapshot comes")
            assert rig.mirror.blocks <= 3, "more counts than was sent and answered"
            assert not rig.mirror.depth(range(100, 108)), "alice's prompt counts for others"

    def _with_events(self) -> None:
        if not self.events:
            raise unittest.SkipTest("it follows no events")

    async def _alarmed(self, rig: EngineRig, what: str) -> None:
        await until(lambda: rig.engine.alarms.get(rig.client.info.id), f"nobody is told of {what}")
        for cause, text in rig.engine.alarms[rig.client.info.id].items():
            assert cause and text, "an alarm says what is wrong"
