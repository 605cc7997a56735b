"""What the controller of a fleet under Ray decides by what agents and Ray tell it."""

from belljar.fleet.ray import membership
from belljar.fleet.ray.membership import MachineReport, Membership

A, B, C = "http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://10.0.0.3:8100"


def report(
    state: membership.State = "ready", sessions: int = 0, *, may_go: bool = True, peers: tuple[str, ...] = ()
) -> MachineReport:
    return MachineReport(state, sessions, capacity=10, may_go=may_go, peers=peers)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_machine_whose_node_died_is_gone_until_another_node_of_it_lives() -> None:
    fleet = Membership()
    fleet.learn({"1": report(), "2": report()}, {"1": A, "2": B}, set())
    assert fleet.lines() == [A, B]
    fleet.learn({"1": report()}, {"1": A}, {B})
    assert fleet.lines() == [A, f"{B} gone"]
    fleet.learn({"1": report()}, {"1": A, "3": B}, {B})
    assert fleet.lines() == [A, B]


def test_a_machine_that_ended_in_good_order_is_nobodys_to_wait_for() -> None:
    fleet = Membership()
    fleet.learn({"1": report(), "2": report("left")}, {"1": A, "2": B}, set())
    assert fleet.lines() == [A]
    fleet.learn({}, {"1": A}, {B})
    assert fleet.lines() == [A]


def test_a_new_controller_knows_what_the_lists_of_the_machines_have() -> None:
    fleet = Membership(clock=(clock := Clock()))
    fleet.learn({"1": report(peers=(A, B, f"{C} gone"))}, {"1": A}, set())
    # B may come back: the cluster may be a new one, which B has not joined yet.
    assert fleet.lines() == [A, B, f"{C} gone"]
    clock.now += membership.MISSING_S + 1
    fleet.learn({"1": report(peers=(A,))}, {"1": A}, set())
    assert fleet.lines() == [A, f"{B} gone", f"{C} gone"]


def test_the_list_is_never_longer_than_servers_read() -> None:
    fleet = Membership()
    lines = tuple(f"http://10.0.{n // 250}.{n % 250}:8100 gone" for n in range(300))
    fleet.learn({"1": report(peers=lines)}, {"1": A}, set())
    assert len(fleet.lines()) == membership.MOST_HOSTS
    assert A in fleet.lines()


def test_as_many_machines_are_wanted_as_open_sessions_need_with_some_to_spare() -> None:
    fleet = Membership(spare=5)
    assert fleet.wanted() == 1
    fleet.learn({"1": report(sessions=10), "2": report(sessions=6)}, {"1": A, "2": B}, set())
    assert fleet.wanted() == 3


def test_a_machine_that_loses_no_session_is_drained_after_ten_idle_minutes_and_never_the_head() -> None:
    fleet = Membership(clock=(clock := Clock()))
    living = {"1": A, "2": B, "3": C}
    reports = {"1": report(), "2": report(may_go=False), "3": report()}
    fleet.learn(reports, living, set())
    assert fleet.to_drain({"1"}) is None
    clock.now += membership.IDLE_S + 1
    assert fleet.to_drain({"1"}) == "3"
    fleet.learn({"3": report("draining")}, living, set())
    clock.now += membership.IDLE_S + 1
    assert fleet.to_drain({"1"}) is None  # one after another
    fleet.learn({"3": report("left")}, living, set())
    assert fleet.to_drain({"1"}) is None
    clock.now += membership.IDLE_S + 1
    assert fleet.to_drain({"1"}) is None  # the other one has a session that sleeps there


def test_a_machine_that_left_returns_when_it_is_needed() -> None:
    fleet = Membership()
    living = {"1": A, "2": B}
    fleet.learn({"1": report(sessions=3), "2": report("left")}, living, set())
    assert fleet.to_return() == []
    fleet.learn({"1": report(sessions=11)}, living, set())
    assert fleet.to_return() == ["2"]


def test_of_machines_that_may_go_the_emptiest_is_drained() -> None:
    fleet = Membership(clock=(clock := Clock()))
    reports = {"1": report(sessions=1), "2": report(sessions=0), "3": report(sessions=2)}
    fleet.learn(reports, {"1": A, "2": B, "3": C}, set())
    assert fleet.to_drain(set()) is None
    clock.now += membership.IDLE_S + 1
    assert fleet.to_drain(set()) == "2"
