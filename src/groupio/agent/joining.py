"""Brings a job's part on this node to its controller, wherever that is.

The machine (:mod:`groupio.protocol.following`) says whom to follow; this executes it: looks into
the coordinator, keeps the link, sends events, obeys orders, and hosts the controller when this
agent is the one that has to. The coordinator and the store are asked in a thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from blake3 import blake3

import groupio
from groupio.agent.election import Election, is_elsewhere, is_of_tokens, other_token
from groupio.agent.errands import Errands
from groupio.agent.status import tell_memory
from groupio.agent.unheard import Unheard
from groupio.agent.unjoined import LOOK_S, Unjoined
from groupio.controller import messages as cm
from groupio.controller.coordinator import Rule
from groupio.controller.discover import Where
from groupio.controller.host import Host
from groupio.controller.keys import Keys
from groupio.controller.lines import Lines, from_ages
from groupio.controller.opening import open_coordinator
from groupio.controller.transport import ControlClient
from groupio.errors import (
    ControllerLost,
    FormatError,
    GroupIOError,
    NotFound,
    from_wire,
)
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import following as fo
from groupio.protocol import reasons
from groupio.protocol.wireform import WireForm

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to open a store that cannot be opened."""

KEEP_S = 2.0
"""How often a controller looks whether it still rules."""


class Joining:
    """The way of one job's agent to its controller. Everything but ``run`` runs in the loop."""

    def __init__(self, driver: Driver, job: Job, where: Where) -> None:
        self._driver = driver
        self._job = job
        self.where = where
        self._network = driver.join_network()
        self._errands = Errands(driver, job.path)
        self._machine = fo.Following(driver.node, self._network.life)
        self._made: Election | None = None  # by the thread, which ends it
        self._keys: Keys | None = None
        """What this job's agents prove to each other, once the store is open."""
        self._rule: Rule | None = None
        """The one found last."""
        self._election: Election | None = None
        self._client: ControlClient | None = None
        self._out = WireForm(cm.FROM_NODE)
        self._in = WireForm(cm.FROM_CONTROLLER)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._preparing = False
        self.unheard = Unheard()
        self.unjoined = Unjoined(driver, job)
        self._locked_out = False  # the last controller that was tried has another token
        self._locked = ""  # its address, where this node has none
        self._questions: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._views = 0  # which opened store the controller knows of
        self._ended = False

    @property
    def term(self) -> int:
        """The rule that is followed, 0 before the first."""
        return self._machine.term

    @property
    def joined(self) -> bool:
        """There is a controller, and it knows this node."""
        return self._machine.joined

    @property
    def idle(self) -> bool:
        """No group of other nodes needs this agent either."""
        return not self._driver.groups_of(self._job)

    # -- beginning --------------------------------------------------------------------------------

    def begin(self, *, create: bool) -> None:
        """Look for the controller, once there is a store; with ``create`` make the store."""
        if self._election is None and not self._preparing and not self._ended:
            self._preparing = True
            if "look" not in self._timers:
                self._look()
            self._errands.ask(partial(self._prepare, create), self._prepared)

    def _prepare(self, create: bool) -> Election | None:
        store = self._job.store
        try:
            store_id = store.follow(create=create)
        except NotFound:
            return None
        self._network.claim(store_id, self._job.path)
        if self._ended:
            self._network.release(store_id, self._job.path)
        self._keys = self._read_keys()
        made = open_coordinator(
            self.where,
            store.backend,
            store_id,
            by_token=not self._keys.of_store,
            on_lost=self._deposed,
            after=store.after,
        )
        self._made = Election(
            made, self.where, path=self._job.path, node=self._driver.node, life=self._network.life
        )
        return self._made

    def _read_keys(self) -> Keys:
        return self._network.keys_of(self._job.store)

    def _keys_read(self, keys: Keys | None, error: GroupIOError | None) -> None:
        """The file with the key may have been removed, and made again by the controller."""
        self._keys = keys or self._keys

    def _prepared(self, made: Election | None, error: GroupIOError | None) -> None:
        self._preparing = False
        if error is not None:
            self.unjoined.unusable(error)
            if self._job.opens:
                self._later("prepare", RETRY_S, lambda: self.begin(create=bool(self._job.opens)))
            self._driver.desk.settle_without(self._job, error)
            return
        if made is None:
            if self._job.opens:
                self.begin(create=True)
            else:
                self._driver.desk.settle_without(self._job)
            return
        self._election = made
        self._perform(self._machine.start())

    def _look(self) -> None:
        """Members of saves that no controller takes hear of it in time, from the first one on."""
        if self._machine.joined:
            self.unjoined.over()
            tell_memory(self._driver, self._job)
        else:
            self.unjoined.look()
        self._later("look", LOOK_S, self._look)

    # -- what the rest of the agent says ----------------------------------------------------------

    def tell(self, event: ev.ControllerEvent) -> None:
        """Tell the controller; what cannot be told now is told when it is found."""
        if self._ended:
            return  # the last client's end is what it ended for
        if self._election is None:
            self.begin(create=isinstance(event, ev.MemberOpened))
        if self._machine.joined and self._views != self._job.store.views:
            # What the event tells may stand in another store than the node has shown.
            self._views = self._job.store.views
            self.tell(ev.NodeReopened(self._driver.node))
        if self._job.host is not None:
            self._job.host.tell(event)
        elif self._machine.joined and self._client is not None:
            self._client.send(self._out.encode(event))
        elif isinstance(event, ev.MemberGone | ev.MemberFailed):
            self.unheard.add(event, self._job.clients.get(event.client))

    def tell_swarm(self, message: Any) -> None:
        """Tell the controller, if there is one now, what concerns a grouped read."""
        if self._ended or not self._machine.joined:
            return
        if self._job.host is not None:
            self._job.host.read(message)
        elif self._client is not None:
            self._client.send(self._out.encode(message))

    def settle(self, client: str, request_id: int) -> None:
        """Ask the controller elsewhere about undecided epochs, once there is one."""
        if self._election is None:
            self.begin(create=False)
        elif self._client is not None and self._machine.joined:
            self._client.send(self._out.encode(cm.ClientSettles(client, request_id)))

    def drain(self, *, abort_unstaged: bool) -> None:
        """This node takes no new saves: give up what cannot be staged without them.

        With ``abort_unstaged`` also what is not staged yet. The controller goes on, here until
        the agent ends, then on another node.
        """
        for failed in self.unjoined.drain():
            self.tell(failed)
        if abort_unstaged:
            for opened in self._job.opens.values():
                error = reasons.stopped(opened.epoch)
                self.tell(ev.MemberFailed(opened.client, opened.save_id, error))
        if not self._machine.joined:
            for opened in self.unjoined.waiting():
                self.unjoined.fail(opened, reasons.draining(opened.epoch))

    def describe(self, request_id: int, answer: Callable[[dict[str, Any]], None]) -> bool:
        """Ask the controller elsewhere for the job's state; False when there is none."""
        if self._client is None or not self._machine.joined:
            return False
        self._questions[request_id] = answer
        self._client.send(self._out.encode(cm.StatusAsked(request_id)))
        return True

    # -- the machine's effects --------------------------------------------------------------------

    def _feed(self, event: Any) -> None:
        if not self._ended:
            self._perform(self._machine.handle(event))

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            self._driver.do(partial(self._execute, effect))

    def _execute(self, effect: Any) -> None:
        match effect:
            case fo.FindController():
                assert self._election is not None
                self._errands.ask(self._election.current, self._found)
            case fo.Campaign() if self._is_shut_out:
                # It rules and lives; to replace it would only cut others off.
                self._found(None, other_token(self._job.path, self._driver.node))
            case fo.Campaign(over=over):
                self._run_for(over)
            case fo.ConnectTo(term=term, address=address):
                self._connect(term, address)
            case fo.SendJoin():
                self._send_join()
            case fo.Host(term=term, vanished=before):
                self._host(term, before)
            case fo.StopHosting():
                self._stop_hosting()
            case fo.LeaveTerm():
                self._hang_up()
                self._driver.reads.left(self._job)
                # What the earlier controller had against this agent is its own affair.
                self.unjoined.over()
                groups = self._driver.groups_of(self._job)
                if groups:
                    self._driver.tell_machine(ev.ControllerLeft(groups))
            case fo.Execute(order=order):
                self._obey(order)
            case fx.StartTimer(name=name, delay_s=delay_s):
                self._later(name, delay_s, lambda: self._feed(ev.TimerFired(name)))
            case fx.StopTimer(name=name):
                self._stop(name)
            case _:
                raise AssertionError(f"not an effect of following: {effect!r}")

    @property
    def _is_shut_out(self) -> bool:
        """The controller is there, and does not take this node's keys."""
        if not (self._locked_out or (self._client and self._client.locked_out)):
            return False
        # All who can open the store have the key in it: something else has the port by now.
        assert self._keys is not None
        by_store = self._rule is not None and not self._rule.by_token
        return not (by_store and self._keys.of_store)

    def _later(self, name: str, delay_s: float, step: Callable[[], None]) -> None:
        self._stop(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(delay_s, self._driver.do, step)

    def _stop(self, name: str) -> None:
        handle = self._timers.pop(name, None)
        if handle is not None:
            handle.cancel()

    # -- the coordinator --------------------------------------------------------------------------

    def _run_for(self, over: int) -> None:
        """Campaign; the address is where others would reach a controller of this agent."""
        assert self._election is not None
        try:
            address = "" if is_elsewhere(self.where) else self._gate_address()
        except GroupIOError as error:
            # Its port is another process's: an older agent that ends may have it still.
            self._found(None, error)
            return
        campaign = partial(self._election.campaign, address, over, locked=self._locked)
        self._errands.ask(campaign, self._found)

    def _gate_address(self) -> str:
        assert self._keys is not None
        return self._network.gate_address(self._job.store.store_id, self._keys)

    def _found(self, rule: Rule | None, error: GroupIOError | None) -> None:
        if error is not None:
            log.warning("the controller of %s is not known: %s", self._job.path, error.message)
            self.unjoined.note(error.message)
            if is_of_tokens(error):
                self.unjoined.refused(error)
            self._feed(fo.CoordinatorFailed(error))
            if self._job.host is not None:
                # It was deposed, and who rules is not known: see again whether anybody does.
                self._later("keep", KEEP_S, self._keep)
        elif rule is None:
            self._feed(fo.NoRule())
        else:
            self._rule = rule
            self._feed(fo.RuleFound(rule.term, rule.address, rule.node, rule.life))

    def _deposed(self, why: str) -> None:
        """This agent rules no more; who does, or campaign again. From any thread."""
        log.warning("the rule over %s ended: %s", self._job.path, why)
        term = self._machine.term

        def again() -> None:
            if not self._ended and self._job.host is not None:
                self._run_for(term)  # which another word of the same end may have done already

        self._driver.post(again)

    def _keep(self) -> None:
        """Learn now and then whether this controller still rules."""

        def answer(held: bool | None, error: GroupIOError | None) -> None:
            # A store that does not answer says nothing of who rules.
            if error is None and held is False:
                self._deposed("another agent took over")
            elif self._job.host is not None:
                self._later("keep", KEEP_S, self._keep)

        assert self._election is not None
        self._errands.ask(self._election.keep, answer)

    # -- the link ---------------------------------------------------------------------------------

    def _connect(self, term: int, address: str) -> None:
        self._hang_up()
        self._locked = ""
        log.info("job %s: controller at %s, term %d", self._job.store.job, address, term)
        client: ControlClient
        assert self._keys is not None
        if self._keys.of_store and self._rule is not None and self._rule.by_token:
            self._locked = address
            why = other_token(self._job.path, self._driver.node).message
            self._driver.do(partial(self._feed, fo.LinkDown(term, why)))
            return

        def lost(why: str) -> None:
            if self._client is client:
                self._client = None
                self._locked_out = client.locked_out
                if client.locked_out:
                    self._errands.ask(self._read_keys, self._keys_read)
                self.unjoined.note(why)
                self._driver.reads.left(self._job)
                vanished = client.peer.vanished
                self._driver.do(partial(self._feed, fo.LinkDown(term, why, vanished)))

        try:
            client = ControlClient(
                asyncio.get_running_loop(),
                address,
                self._keys,
                life=self._network.life,
                on_message=lambda payload: self._take(client, payload),
                on_lost=lost,
            )
        except GroupIOError as error:
            log.warning("%s", error.message)
            self._locked = address if self._keys.of_store else ""
            self._driver.do(partial(self._feed, fo.LinkDown(term, error.message)))
            return
        self._client = client
        store = self._job.store
        hello = cm.NodeHello(
            version=cm.CONTROL_VERSION,
            release=groupio.__version__,
            node=self._driver.node,
            life=self._network.life,
            job=store.job,
            store=self._job.path,
            store_id=store.store_id,
            term=term,
        )
        client.send(self._out.encode(hello))

    def _hang_up(self, why: str = "it follows another controller") -> None:
        client, self._client = self._client, None
        self._questions.clear()
        if client is not None:
            client.close(why)
            if not self._ended:
                self._driver.reads.left(self._job)

    def _take(self, client: ControlClient, payload: bytes) -> None:
        if client is not self._client:
            return
        try:
            message = self._in.decode(payload)
        except FormatError as error:
            log.error("the controller at %s: %s", client.address, error.message)
            self._hang_up()
            self._feed(fo.LinkDown(self._machine.term, error.message))
            return
        match message:
            case cm.NodeWelcome(term=term):
                self._locked_out = False
                self._driver.do(lambda: self._feed(fo.LinkUp(term)))
            case cm.NodeRefused():
                refused = from_wire(message.error)
                self.unjoined.log_refusal(client.address, refused)
                self._hang_up()
                self._driver.do(lambda: self._refuse(refused))
            case cm.ControllerEnds():
                self._driver.do(lambda: self._feed(fo.RulerLeft(self._machine.term)))
            case cm.ClientSettled(client=name, request_id=request_id):
                self._driver.desk.settled(name, request_id)
            case cm.StatusAnswer(request_id=request_id, body=body):
                answer = self._questions.pop(request_id, None)
                if answer is not None:
                    answer(body)
            case _:
                self._driver.do(lambda: self._feed(fo.OrderCame(self._machine.term, message)))

    def _refuse(self, error: GroupIOError) -> None:
        term = self._machine.term
        self.unjoined.note(error.message)
        if not isinstance(error, ControllerLost):
            self._errands.run(self._job.store.hide)
            self.unjoined.refused(error)
            self._feed(fo.JoinRefused(term, error))
            return
        # Somebody is there, but not the controller: ask again who that is.
        self._feed(fo.LinkDown(term, error.message))
        if self._election is not None:
            self._errands.ask(self._election.current, self._found_again)

    def _found_again(self, rule: Rule | None, error: GroupIOError | None) -> None:
        """Follow a newer rule at once; without one, time tells."""
        if error is None and rule is not None:
            self._found(rule, None)

    def _obey(self, order: Any) -> None:
        if isinstance(order, fx.TellReached):
            order = from_ages(order)
        self._driver.obey(self._job, order)

    # -- joining and hosting ----------------------------------------------------------------------

    def show(self, order: fx.ShowStore) -> None:
        """Show the controller which store this node sees."""

        def answer(shown: ev.StoreShown | None, error: GroupIOError | None) -> None:
            self.tell(shown or ev.StoreShown(order.node, order.name, error=error))

        self._errands.ask(lambda: self._job.store.show(order), answer)

    def _join_event(self) -> ev.NodeJoined:
        self._views = self._job.store.views
        held = self._driver.held(self._job)
        kept = {(one.client, one.save_id) for group in held for one in group.opened}
        return ev.NodeJoined(
            node=self._driver.node,
            life=self._network.life,
            address=self._network.fabric_address,
            link=self._network.links.link,
            store_id=self._job.store.store_id,
            held=held,
            clients=tuple(self._job.clients.values()),
            opens=tuple(
                one for one in self._job.opens_now() if (one.client, one.save_id) not in kept
            ),
            path=self._job.path,
        )

    def _send_join(self) -> None:
        if self._job.host is not None:
            self._job.host.tell(self._join_event())
        elif self._client is not None:
            self._client.send(self._out.encode(self._join_event()))
        for event in self.unheard.take():
            self.tell(event)
        for peer, request_id in self._job.settling:
            self.settle(peer.client, request_id)
        self._driver.do(lambda: self._driver.reads.joined(self._job))

    def _host(self, term: int, before: tuple[str, str] | None) -> None:
        driver, store = self._driver, self._job.store
        log.info("job %s: this agent has the controller, term %d", store.job, term)
        own = store.for_controller()
        name = blake3(f"{store.store_id} {term}".encode()).digest()
        host = Host(
            self._job.path,
            own,
            driver,
            count(int.from_bytes(name[:4], "little") % (1 << 31) << 20),
            Lines(driver.node),
            term,
            driver.settings.backend_bytes_per_s,
        )
        self._job.host = self._network.hosts[store.store_id] = host
        host.begin(before)
        self._later("keep", KEEP_S, self._keep)
        self._driver.do(lambda: self._feed(fo.LinkUp(term)))

    def _stop_hosting(self) -> None:
        host, self._job.host = self._job.host, None
        if host is not None:
            self._network.hosts.pop(self._job.store.store_id, None)
            self._stop("keep")
            host.hang_up("it was deposed")
            self._errands.run(host.end)

    # -- the end ----------------------------------------------------------------------------------

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` in this job's thread; its errors are logged. From any thread."""
        self._errands.run(task)

    def leave(self) -> None:
        """Take part no more, in the event loop: what is still under way is for nobody."""
        self._ended = True
        self._errands.leave()
        for name in list(self._timers):
            self._stop(name)
        self._hang_up("its agent leaves the job")
        if self._job.host is not None:
            self._network.hosts.pop(self._job.store.store_id, None)
        self._network.release(self._job.store.store_id, self._job.path)

    def shut(self) -> None:
        """After :meth:`leave` and the end of a controller here: let no agent in to it."""
        self._network.close_gate(self._job.store.store_id)

    def end(self) -> None:
        """After :meth:`leave`, in any thread: a controller that was here is free for another."""
        self._errands.run(self._resign)
        self._errands.run(self._job.store.close)
        self._errands.end()

    def _resign(self) -> None:
        if self._made is not None:
            self._made.leave()
