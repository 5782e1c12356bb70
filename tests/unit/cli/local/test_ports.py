"""Ports: the usual one if it is free, otherwise a free one; one that was asked for by number is that or an error."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from fulmen_cli.local.errors import PortInUseError
from fulmen_cli.local.ports import PortChooser, choose_ports, is_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free() -> int:
    return choose_ports(["any"], {}, {}, rng=random.Random())["any"]


def test_a_port_that_someone_listens_on_is_not_free(taken: int) -> None:
    assert not is_free(taken)


def test_the_preferred_port_is_taken_if_it_is_free(free: int) -> None:
    assert choose_ports(["store"], {}, {"store": free}, rng=random.Random(1)) == {"store": free}


def test_another_port_is_taken_if_the_preferred_one_is_in_use(taken: int) -> None:
    chosen = choose_ports(["store"], {}, {"store": taken}, rng=random.Random(1))

    assert chosen["store"] != taken
    assert is_free(chosen["store"])


def test_a_wanted_port_in_use_is_an_error_that_names_it(taken: int) -> None:
    with pytest.raises(PortInUseError, match=f"store={taken}"):
        choose_ports(["store", "proxy"], {"store": taken}, {}, rng=random.Random(1))


def test_no_two_names_get_the_same_port(free: int) -> None:
    chosen = choose_ports(["a", "b", "c"], {"c": free}, {"a": free, "b": free}, rng=random.Random(1))

    assert chosen["c"] == free
    assert len(set(chosen.values())) == 3


@pytest.fixture
def choosers() -> Iterator[tuple[PortChooser, PortChooser]]:
    both = PortChooser(random.Random(1)), PortChooser(random.Random(1))
    yield both
    for each in both:
        each.release()


def test_a_chosen_port_is_no_other_stacks_before_anything_listens_there(
    choosers: tuple[PortChooser, PortChooser], free: int
) -> None:
    first, second = choosers
    # Both begin to look at the same port.
    chosen = first.choose(["store", "proxy"], {}, {"store": free})
    others = second.choose(["store", "proxy"], {}, {"store": free})

    assert chosen["store"] == free
    assert len({*chosen.values(), *others.values()}) == 4
    with pytest.raises(PortInUseError, match=f"store={free}"):
        second.choose(["store"], {"store": free}, {})


def test_a_service_can_listen_at_the_port_that_its_stack_holds(choosers: tuple[PortChooser, PortChooser]) -> None:
    port = choosers[0].choose(["store"], {}, {})["store"]

    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


def test_a_port_that_was_given_up_is_chosen_again(choosers: tuple[PortChooser, PortChooser], free: int) -> None:
    first, second = choosers
    first.choose(["store"], {}, {"store": free})
    first.release()

    assert second.choose(["store"], {"store": free}, {}) == {"store": free}
