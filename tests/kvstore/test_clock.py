"""Simulated time."""

from __future__ import annotations

from kvstore.clock import SimulatedClock


def test_events_run_in_order_of_time_then_of_request() -> None:
    clock = SimulatedClock(start=100.0)
    seen: list[tuple[str, float]] = []
    for name, time in (("late", 102.0), ("first", 101.0), ("second", 101.0)):
        clock.at(time, lambda name=name: seen.append((name, clock())))
    clock.advance(5.0)
    assert seen == [("first", 101.0), ("second", 101.0), ("late", 102.0)]
    assert clock() == 105.0


def test_a_step_runs_one_event_and_stops_at_its_limit() -> None:
    clock = SimulatedClock()
    seen: list[int] = []
    clock.after(1.0, seen.append, 1)
    clock.after(3.0, seen.append, 2)
    assert clock.step(2.0)
    assert (seen, clock.now) == ([1], 1.0)
    assert not clock.step(2.0)
    assert (seen, clock.now) == ([1], 2.0)


def test_an_event_of_the_past_runs_without_turning_time_back() -> None:
    clock = SimulatedClock(start=10.0)
    seen: list[float] = []
    clock.at(3.0, lambda: seen.append(clock.now))
    clock.advance(0.0)
    assert seen == [10.0]


def test_events_may_ask_for_events() -> None:
    clock = SimulatedClock()
    seen: list[float] = []

    def again() -> None:
        seen.append(clock.now)
        clock.after(0.5, again)

    clock.after(0.5, again)
    clock.advance(2.0)
    assert seen == [0.5, 1.0, 1.5, 2.0]
