"""Restarts, in any order in which a controller may hear of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from protocol_help import opened

from groupio.errors import LateMember
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller
from groupio.protocol.lives import LAUNCHES_REMEMBERED
from groupio.protocol.members import FormedLaunch


class Job:
    """A controller whose store is open, and the saves that were asked of it."""

    def __init__(self) -> None:
        self.controller = Controller()
        self.controller.open_store(create=False)
        state = ev.StoreState(job="job", lineages=(), committed=(), aborted=(), incarnation=0)
        self.controller.handle(ev.StoreOpened(state))
        self.errors: dict[tuple[str, int], Exception] = {}
        self._saves = 0

    def hello(self, client: str, rank: int, world: int, launch: str | None, pid: int) -> None:
        self.controller.handle(
            ev.ClientArrived(client, ev.Process(pid, 1), rank, world, "job", launch)
        )

    def open(
        self, client: str, rank: int, world: int, launch: str | None, pid: int, epoch: int
    ) -> Exception | None:
        """Save; the error of this member, if it is refused at once."""
        self._saves += 1
        save = self._saves
        event = opened(
            rank,
            world,
            epoch,
            client=client,
            process=ev.Process(pid, 1),
            save_id=save,
            launch_id=launch,
        )
        for effect in self.controller.handle(event):
            if isinstance(effect, fx.TellFailed):
                self.errors[effect.seat.client, effect.seat.save_id] = effect.error
        return self.errors.get((client, save))

    def gone(self, client: str) -> None:
        self.controller.handle(ev.MemberGone(client, process_gone=True))

    def members_of(self, epoch: int) -> set[str]:
        """The members of all groups of this epoch."""
        groups = [g for g in self.controller.groups.values() if g.epoch == epoch]
        return {seat.opened.client for group in groups for seat in group.seats.values()}


@given(st.data())
def test_after_any_restarts_the_last_life_saves(data: st.DataObject) -> None:
    """Each life's processes start after the end of the old ones, of which news may be late."""
    job, world = Job(), data.draw(st.integers(2, 3), "world")
    lives = data.draw(st.integers(2, 4), "lives")
    launch = data.draw(st.sampled_from([None, "none:29500"]))
    late: list[str] = []
    epoch = 1
    for life in range(lives):
        names = {rank: f"{life}-{rank}" for rank in range(world)}
        for rank in data.draw(st.permutations(range(world))):
            job.hello(names[rank], rank, world, launch, 10 * life + rank)
            for _ in range(data.draw(st.integers(0, 2), "saves")):
                job.open(names[rank], rank, world, launch, 10 * life + rank, epoch)
                epoch += data.draw(st.integers(0, 1))
            for client in list(late):
                if data.draw(st.booleans(), f"{client} is known to be gone"):
                    late.remove(client)
                    job.gone(client)
        if life < lives - 1:
            late += names.values()
    for client in data.draw(st.permutations(late)):
        job.gone(client)
    for number in (epoch + 1, epoch + 2):
        for rank in data.draw(st.permutations(range(world))):
            job.open(names[rank], rank, world, launch, 10 * (lives - 1) + rank, number)
    assert job.members_of(epoch + 2) == set(names.values())


@given(st.data())
def test_a_leftover_never_saves_once_its_successors_did(data: st.DataObject) -> None:
    """Sets of processes with members in common, and connections that are made again."""
    job, newest = Job(), 0
    for save in range(data.draw(st.integers(2, 12), "saves")):
        number = data.draw(st.integers(1, 4), "set")
        rank = data.draw(st.integers(0, 1), "rank")
        client = f"{number}-{rank}-{data.draw(st.integers(0, 1), 'connection')}"
        launch = FormedLaunch("s", number, f"m{number}").launch_id
        error = job.open(client, rank, 2, launch, 10 * number + rank, save)
        assert isinstance(error, LateMember) == (number < newest)
        newest = max(newest, number)
        for group in job.controller.groups.values():
            launches = {seat.opened.launch_id for seat in group.seats.values()}
            assert len(launches) == 1


def test_launches_without_end_are_not_remembered() -> None:
    job = Job()
    for number in range(LAUNCHES_REMEMBERED + 9):
        launch = FormedLaunch(f"s{number}", 1, "m").launch_id
        assert job.open(f"c{number}", 0, 1, launch, number, number) is None
    assert len(job.controller._replaced) == LAUNCHES_REMEMBERED


def test_what_a_launcher_says_is_no_set_of_processes() -> None:
    formed = FormedLaunch("ab", 3, "cd")
    assert FormedLaunch.parse(formed.launch_id) == formed
    for text in (None, "", "none:29500", "formed/ab/x/cd", "formed/ab/3", "slurm:1.0:0"):
        assert FormedLaunch.parse(text) is None
